"""Checkpoints: a new folder, verified by reading it back, then a pointer swapped.

MindSpore removes an existing file before it writes the new one, so nothing is ever overwritten
here. A checkpoint is `step_00000500/` with `parameters.ckpt` (CRC checked) and `state.json`; the
file `latest` names the newest whole one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Parameter

from tuner.config.codec import write_text
from tuner.errors import BadInputError
from tuner.train.scaling import LossScale

PARAMETERS_FILE = "parameters.ckpt"
STATE_FILE = "state.json"
POINTER_FILE = "latest"
UNFINISHED_PREFIX = ".unfinished_"


@dataclass(frozen=True, kw_only=True)
class BestEvaluation:
    """The lowest loss of an evaluation so far.

    Attributes:
        loss: Mean over the evaluated labels.
        steps: Steps that were done then.
    """

    loss: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Where a run stands; with the parameters it is everything that resuming needs.

    Attributes:
        epoch: Epoch of the next step.
        step_in_epoch: Steps of that epoch done.
        steps: Steps done in all.
        updates: Optimizer updates done.
        skipped_updates: Updates of fp16 left out because their gradients overflowed.
        loss_scale: Of fp16; None in fp32 and bf16.
        window_label_tokens: Labels in the gradient buffers.
        real_tokens: Tokens of rows so far.
        padded_tokens: Padded tokens so far.
        evaluated_steps: Steps done at the last evaluation; 0 before the first.
        best: The lowest evaluation so far; None before the first.
        config_fingerprint: Of everything that decides the course of training.
        data_fingerprint: Of the MindRecord set.
        shapes: The shape record: planned (B, L) in warm-up order.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    steps: int = 0
    updates: int = 0
    skipped_updates: int = 0
    loss_scale: LossScale | None = None
    window_label_tokens: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    evaluated_steps: int = 0
    best: BestEvaluation | None = None
    config_fingerprint: str = ""
    data_fingerprint: str = ""
    shapes: tuple[tuple[int, int], ...] = ()


class CheckpointFolder:
    """All checkpoints of one run."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        """Open the folder.

        Args:
            folder: Where checkpoints are; made when the first is saved.
            keep_last: Checkpoints kept, >= 1.
        """
        self._folder = folder
        self._keep_last = keep_last

    def save(self, state: TrainState, parameters: Sequence[Parameter]) -> Path:
        """Save a checkpoint and take the oldest away.

        Raises:
            BadInputError: the disk is full or cannot be written; earlier checkpoints are whole.
        """
        final = self._folder / f"step_{state.steps:08d}"
        unfinished = self._folder / f"{UNFINISHED_PREFIX}{final.name}"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            _write(unfinished, state, parameters)
            shutil.rmtree(final, ignore_errors=True)
            unfinished.rename(final)
        except (OSError, RuntimeError, ValueError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            reason = " ".join(str(error).split())[:300]
            raise BadInputError(
                f"cannot save a checkpoint in {self._folder}: {reason}",
                fix="earlier checkpoints are whole: make room and go on with --resume",
            ) from error
        write_text(self._folder / POINTER_FILE, final.name + "\n")
        for old in self._whole()[: -self._keep_last]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def load_newest(
        self, parameters: Sequence[Parameter], notice: Callable[[str], None]
    ) -> TrainState:
        """Load the newest checkpoint that is whole into the parameters.

        Args:
            parameters: The same parameters that were saved.
            notice: Told about every checkpoint that had to be passed over.

        Raises:
            BadInputError: there is none, or none that is whole.
        """
        candidates = list(reversed(self._whole()))
        for folder in candidates:
            try:
                state = _read_state(folder)
                _load(folder, parameters)
            except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
                reason = " ".join(str(error).split())[:200]
                notice(f"checkpoint {folder.name} is damaged and passed over: {reason}")
                continue
            return state
        found = f"{len(candidates)} damaged ones" if candidates else "none"
        raise BadInputError(
            f"no checkpoint to resume from in {self._folder} ({found})",
            fix="start without --resume",
        )

    def newest_state(self) -> TrainState | None:
        """The state of the newest checkpoint without its parameters; None if there is none."""
        for folder in reversed(self._whole()):
            try:
                return _read_state(folder)
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return None

    def _whole(self) -> list[Path]:
        return sorted(self._folder.glob("step_????????"))


def _write(folder: Path, state: TrainState, parameters: Sequence[Parameter]) -> None:
    file = folder / PARAMETERS_FILE
    content = [{"name": parameter.name, "data": parameter} for parameter in parameters]
    ms.save_checkpoint(content, str(file), crc_check=True)
    write_text(folder / STATE_FILE, _format_state(state))
    # Read back: a checkpoint counts only when it can be loaded.
    loaded = ms.load_checkpoint(str(file), crc_check=True)
    if set(loaded) != {parameter.name for parameter in parameters}:
        raise RuntimeError(f"{file.name} does not hold what was saved")


def _load(folder: Path, parameters: Sequence[Parameter]) -> None:
    loaded = ms.load_checkpoint(str(folder / PARAMETERS_FILE), crc_check=True)
    wanted = {parameter.name for parameter in parameters}
    if set(loaded) != wanted:
        raise ValueError(f"its parameters differ: {sorted(set(loaded) ^ wanted)[:3]}")
    for parameter in parameters:
        value = loaded[parameter.name]
        if value.shape != parameter.shape or value.dtype != parameter.dtype:
            raise ValueError(f"{parameter.name} has shape {value.shape}, not {parameter.shape}")
    for parameter in parameters:
        parameter.set_data(loaded[parameter.name])


def _format_state(state: TrainState) -> str:
    """The state with a checksum of itself; parameters.ckpt carries its own."""
    plain = asdict(state)
    return json.dumps({"state": plain, "sha256": _checksum(plain)}, indent=1)


def _read_state(folder: Path) -> TrainState:
    content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    plain = content["state"]
    if content["sha256"] != _checksum(plain):
        raise ValueError(f"{STATE_FILE} does not match its checksum")
    plain["shapes"] = tuple(tuple(shape) for shape in plain["shapes"])
    if plain.get("loss_scale") is not None:
        plain["loss_scale"] = LossScale(**plain["loss_scale"])
    if plain.get("best") is not None:
        plain["best"] = BestEvaluation(**plain["best"])
    return TrainState(**plain)


def _checksum(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

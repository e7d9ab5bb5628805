"""Checkpoints: a new folder, verified by reading it back, then a pointer swapped.

A checkpoint is `step_00000500/` with `parameters.safetensors` and `state.json`, which knows the
checksum of both. Gradients of a window that is not full yet differ between ranks: those of ranks
1 and up stand beside the first one's, with the rank behind their names. Moments stand there once,
whichever rank keeps them, so that any number of ranks finds its own. It is written beside,
brought to the disk, read back and renamed; nothing that is whole is ever overwritten. The file
`latest` names the checkpoint that a run goes on from, and is swapped last, so it only ever names a
whole one. Where it is gone or names none that can be read, the newest whole one is taken, and that
is said.

One process writes a folder at a time.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor
from numpy.typing import NDArray

from tuner.config.codec import write_text
from tuner.errors import BadInputError
from tuner.train.checksum import file_sha256
from tuner.train.rank_names import take_own
from tuner.train.state import SavedState, TrainState, format_saved, parse_saved
from tuner.train.tensor_file import read_tensors, sync_folder, write_tensors
from tuner.train.world import ALONE, World

PARAMETERS_FILE = "parameters.safetensors"
STATE_FILE = "state.json"
POINTER_FILE = "latest"
UNFINISHED_PREFIX = ".unfinished_"

UNREADABLE = (OSError, ValueError, KeyError, TypeError)
"""What reading a damaged checkpoint may raise."""

Notice = Callable[[str], None]
Snapshot = Mapping[str, NDArray[Any]]
"""Copies of parameters in host memory, by name."""


def take_snapshot(parameters: Sequence[Parameter]) -> Snapshot:
    """Copies of the parameters as they are between two steps."""
    return {parameter.name: np.array(parameter.asnumpy()) for parameter in parameters}


class CheckpointFolder:
    """All checkpoints of one run."""

    def __init__(self, folder: Path, keep_last: int, keep_best: int = 0) -> None:
        """Open the folder.

        Args:
            folder: Where checkpoints are; made when the first is saved.
            keep_last: Newest checkpoints kept, >= 1.
            keep_best: Checkpoints of the lowest evaluation losses kept besides, >= 0.
        """
        self._folder = folder
        self._keep_last = keep_last
        self._keep_best = keep_best

    def save(
        self,
        state: TrainState,
        parameters: Sequence[Parameter],
        evaluation_loss: float | None = None,
    ) -> Path:
        """`write` what the parameters hold now."""
        return self.write(state, take_snapshot(parameters), evaluation_loss)

    def write(
        self, state: TrainState, snapshot: Snapshot, evaluation_loss: float | None = None
    ) -> Path:
        """Write a checkpoint, point to it, and take away what need not be kept.

        Args:
            state: Where the run stood at the snapshot.
            snapshot: The parameters.
            evaluation_loss: Of just these parameters; None if they were not evaluated.

        Returns:
            Its folder.

        Raises:
            BadInputError: the disk is full or cannot be written; earlier checkpoints are whole.
        """
        final = self._folder / f"step_{state.steps:08d}"
        unfinished = self._folder / f"{UNFINISHED_PREFIX}{final.name}"
        try:
            self._remove_unfinished()
            unfinished.mkdir(parents=True)
            _write(unfinished, state, snapshot, evaluation_loss)
            if final.exists():
                # A damaged one, or of a course that an earlier checkpoint was taken up before.
                shutil.rmtree(final)
            unfinished.rename(final)
            sync_folder(self._folder)
            write_text(self._folder / POINTER_FILE, final.name + "\n")
            sync_folder(self._folder)
        except (OSError, ValueError, BadInputError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise BadInputError(
                f"cannot save a checkpoint in {self._folder}: {_reason(error)}",
                fix="earlier checkpoints are whole: make room and go on with --resume",
            ) from error
        self._prune(state.steps)
        return final

    def load_newest(
        self,
        parameters: Sequence[Parameter],
        notice: Notice,
        world: World = ALONE,
        own: Collection[str] = (),
        elsewhere: Collection[str] = (),
    ) -> TrainState:
        """Load the checkpoint that `latest` names, else the newest that is whole.

        Args:
            parameters: The same parameters that were saved.
            notice: Told about everything that had to be passed over.
            world: Who loads it.
            own: Names of what every rank has of its own, as `take_own` takes them; of all others
                there is one for all ranks.
            elsewhere: Names of what other ranks load, and this one leaves.

        Raises:
            BadInputError: there is none, or none that is whole.
        """
        load = partial(_load, parameters=parameters, world=world, own=own, elsewhere=elsewhere)
        return self._load_first(self._newest_first(notice), load, notice)

    def load_best(self, parameters: Sequence[Parameter], notice: Notice) -> TrainState:
        """Load the whole checkpoint of the lowest evaluation loss, of equal ones the first.

        Raises:
            BadInputError: none that was evaluated is whole.
        """
        load = partial(_load, parameters=parameters, world=ALONE, own=(), elsewhere=())
        return self._load_first(self._best_first(), load, notice)

    def newest_state(self, notice: Notice) -> TrainState | None:
        """The state that `load_newest` would go on from; None if there is none.

        Its parameters are read too, since a damaged checkpoint is none.
        """
        for folder in self._newest_first(notice):
            try:
                saved = _read_saved(folder)
                _check_parameters(folder, saved)
            except UNREADABLE as error:
                notice(_passed_over(folder, error))
                continue
            return saved.state
        return None

    def is_empty(self) -> bool:
        """Whether no checkpoint was ever finished."""
        return not self._all()

    def is_among_best(self, evaluation_loss: float, steps: int) -> bool:
        """Whether a checkpoint of this loss would be one of the best that are kept.

        Args:
            evaluation_loss: Any; what is not finite is not good.
            steps: Steps done now; later ones are of another course.
        """
        if self._keep_best == 0 or not math.isfinite(evaluation_loss):
            return False
        best = [folder for folder in self._best_first() if _steps(folder) < steps]
        if len(best) < self._keep_best:
            return True
        worst = _read_saved(best[self._keep_best - 1]).evaluation_loss
        return worst is None or evaluation_loss < worst

    def _load_first(
        self, folders: Sequence[Path], load: Callable[[Path], None], notice: Notice
    ) -> TrainState:
        for folder in folders:
            try:
                saved = _read_saved(folder)
                _check_parameters(folder, saved)
                load(folder)
            except UNREADABLE as error:
                notice(_passed_over(folder, error))
                continue
            return saved.state
        found = f"{len(folders)} damaged ones" if folders else "none"
        raise BadInputError(
            f"no checkpoint to resume from in {self._folder} ({found})",
            fix="train without --resume first",
        )

    def _all(self) -> list[Path]:
        """Newest first."""
        return sorted(self._folder.glob("step_????????"), reverse=True)

    def _newest_first(self, notice: Notice) -> list[Path]:
        """The one that `latest` names, then the others."""
        folders = self._all()
        if not folders:
            return []
        try:
            name = (self._folder / POINTER_FILE).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            notice(f"{POINTER_FILE} cannot be read, the newest whole checkpoint is taken: {error}")
            return folders
        named = self._folder / name
        if named not in folders:
            notice(f"{POINTER_FILE} names no checkpoint, the newest whole one is taken: {name!r}")
            return folders
        return [named, *(folder for folder in folders if folder != named)]

    def _best_first(self) -> list[Path]:
        """Those that were evaluated."""
        losses = {}
        for folder in self._all():
            try:
                loss = _read_saved(folder).evaluation_loss
            except UNREADABLE:
                continue
            if loss is not None and math.isfinite(loss):
                losses[folder] = loss
        return sorted(losses, key=lambda folder: (losses[folder], _steps(folder)))

    def _prune(self, steps: int) -> None:
        """Keep the newest and the best; what is later than these steps was left behind."""
        kept = {folder for folder in self._all() if _steps(folder) <= steps}
        newest = sorted(kept, reverse=True)[: self._keep_last]
        best = [folder for folder in self._best_first() if folder in kept][: self._keep_best]
        for folder in self._all():
            if folder not in newest and folder not in best:
                shutil.rmtree(folder, ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for folder in self._folder.glob(f"{UNFINISHED_PREFIX}*"):
            shutil.rmtree(folder)


def _write(
    folder: Path, state: TrainState, snapshot: Snapshot, evaluation_loss: float | None
) -> None:
    if evaluation_loss is not None and not math.isfinite(evaluation_loss):
        evaluation_loss = None
    digest = write_tensors(folder / PARAMETERS_FILE, snapshot)
    saved = SavedState(state=state, parameters_sha256=digest, evaluation_loss=evaluation_loss)
    write_text(folder / STATE_FILE, format_saved(saved))
    # Read back: a checkpoint counts only when it can be loaded.
    if _read_saved(folder) != saved:
        raise ValueError(f"{STATE_FILE} does not hold what was saved")
    _check_parameters(folder, saved)
    sync_folder(folder)


def _read_saved(folder: Path) -> SavedState:
    return parse_saved((folder / STATE_FILE).read_text(encoding="utf-8"))


def _check_parameters(folder: Path, saved: SavedState) -> None:
    if file_sha256(folder / PARAMETERS_FILE) != saved.parameters_sha256:
        raise ValueError(f"{PARAMETERS_FILE} does not match its checksum")


def _load(
    folder: Path,
    parameters: Sequence[Parameter],
    world: World,
    own: Collection[str],
    elsewhere: Collection[str],
) -> None:
    loaded = take_own(read_tensors(folder / PARAMETERS_FILE), world, own)
    loaded = {name: value for name, value in loaded.items() if name not in elsewhere}
    wanted = {parameter.name for parameter in parameters}
    if set(loaded) != wanted:
        raise ValueError(f"its parameters differ: {sorted(set(loaded) ^ wanted)[:3]}")
    for parameter in parameters:
        shape = loaded[parameter.name].shape
        if shape != tuple(parameter.shape):
            raise ValueError(f"{parameter.name} has shape {shape}, not {parameter.shape}")
    for parameter in parameters:
        parameter.set_data(Tensor(loaded[parameter.name], parameter.dtype))


def _steps(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


def _passed_over(folder: Path, error: BaseException) -> str:
    return f"checkpoint {folder.name} is damaged and passed over: {_reason(error)[:200]}"


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:300]

"""What a run tells: one record a step, as JSON lines; and the figures at the end."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.config.codec import write_text
from tuner.errors import BadInputError

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step, one line of metrics.jsonl.

    Attributes:
        step: Steps done, this one included; from 1.
        epoch: From 0.
        batch_size: B.
        padded_length: L in tokens.
        step_s: Seconds of forward, backward and update.
        data_wait_s: Seconds that the loop waited for the batch.
        real_tokens: Tokens of rows.
        padded_tokens: B * L.
        label_tokens: Targets that count.
        loss: Mean over label_tokens; None without any.
        updates: Optimizer updates done.
        grad_norm: Global norm before clipping, of the update made in this step; None if none was.
        learning_rate: Of that update; None if none was made.
        clip_norm: Threshold of that update's gradient norm; None if none was made or none held.
        clipped: Whether that update's gradients were scaled down; None if none was made.
        recompiles: Compiles so far that no warm-up planned.
        memory_bytes: Memory of the process.
        skipped_updates: Updates of fp16 so far whose gradients overflowed.
        loss_scale: Of fp16, for the next step; None in fp32 and bf16.
        recompile_s: Seconds of those compiles.
    """

    step: int
    epoch: int
    batch_size: int
    padded_length: int
    step_s: float
    data_wait_s: float
    real_tokens: int
    padded_tokens: int
    label_tokens: int
    loss: float | None
    updates: int
    grad_norm: float | None
    learning_rate: float | None
    recompiles: int
    memory_bytes: int
    skipped_updates: int = 0
    loss_scale: float | None = None
    recompile_s: float = 0.0
    clip_norm: float | None = None
    clipped: bool | None = None


class MetricsFile:
    """metrics.jsonl of a run; on resume, records after the checkpoint's step are taken out."""

    def __init__(self, folder: Path, keep_steps: int) -> None:
        """Open for appending.

        Args:
            folder: Folder of the run.
            keep_steps: Records of later steps are removed; 0 for a new run.

        Raises:
            BadInputError: the folder cannot be written.
        """
        path = folder / METRICS_FILE
        kept = [line for line in _read_lines(path) if line["step"] <= keep_steps]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: StepRecord) -> None:
        """Add one line; it is with the system when this returns.

        Raises:
            BadInputError: the disk is full or the file is gone.
        """
        try:
            self._file.write(json.dumps(dataclasses.asdict(record)) + "\n")
            self._file.flush()
        except OSError as error:
            raise BadInputError(
                f"cannot write {self._path}: {error.strerror or error}",
                fix="make room and go on with --resume",
            ) from None

    def close(self) -> None:
        """Bring everything to the disk."""
        os.fsync(self._file.fileno())
        self._file.close()


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole records; a last line cut off by a kill is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records

"""What a run tells: one record a step and one an evaluation, as JSON lines."""

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
EVALUATION_FILE = "evaluation.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step over all ranks, one line of metrics.jsonl; seconds and memory are the first's.

    Attributes:
        step: Steps done, this one included; from 1.
        epoch: From 0.
        step_in_epoch: From 0; with epoch it says which rows: those of that step of the plan.
        batch_size: B, of one rank.
        padded_length: L in tokens.
        step_s: Seconds of forward, backward and update.
        data_wait_s: Seconds that the loop waited for the batch.
        real_tokens: Tokens of rows.
        padded_tokens: B * L times the ranks.
        label_tokens: Targets that count.
        loss: Mean over label_tokens; None without any.
        updates: Optimizer updates done.
        grad_norm: Global norm before clipping, of the update made in this step; None if none was.
        learning_rate: Of that update; None if none was made.
        clip_norm: Threshold of that update's gradient norm; None if none was made or none held.
        clipped: Whether that update's gradients were scaled down; None if none was made.
        update_s: Seconds of the update among those of the step; 0 where none was tried.
        slow: Whether it took far longer than others of its shape, without a compile or a pause
            before it that would explain it.
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
    step_in_epoch: int = 0
    update_s: float = 0.0
    slow: bool = False


@dataclass(frozen=True, kw_only=True)
class LengthLoss:
    """What an evaluation says of the rows of one class of lengths.

    Attributes:
        up_to: Their padded or class length in tokens, inclusive; longer than the class before.
        rows: Rows of it with a label.
        label_tokens: Their labels.
        loss: Mean over these.
        perplexity: exp of it; None where that is more than a float holds.
    """

    up_to: int
    rows: int
    label_tokens: int
    loss: float
    perplexity: float | None


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One evaluation, one line of evaluation.jsonl.

    Attributes:
        step: Steps done.
        seconds: That it took, reading included.
        rows: Rows with a label.
        label_tokens: All labels.
        loss: Sum of the losses over all labels, divided by their number; None without any, or
            where it is no number.
        perplexity: exp of it; None where that is more than a float holds.
        by_length: Of every class of lengths with a label, by rising length; empty where the loss
            is no number.
    """

    step: int
    seconds: float
    rows: int
    label_tokens: int
    loss: float | None
    perplexity: float | None
    by_length: tuple[LengthLoss, ...] = ()


class RecordFile:
    """Records of a run as JSON lines; on resume, those after the checkpoint's step are taken out.

    A record has a `step`.
    """

    def __init__(self, path: Path, keep_steps: int) -> None:
        """Open for appending.

        Args:
            path: In the folder of the run.
            keep_steps: Records of later steps are removed; 0 for a new run.

        Raises:
            BadInputError: the folder cannot be written.
        """
        kept = [line for line in _read_lines(path) if line["step"] <= keep_steps]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: StepRecord | EvaluationRecord) -> None:
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

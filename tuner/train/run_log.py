"""All that is kept of the steps of a run: files while it runs, figures for its end.

Only the steps of this process count in the figures; the files hold those before a resumption too.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tuner.batching.grouping import Shape
from tuner.train.event_file import EventFile
from tuner.train.metrics import (
    EVALUATION_FILE,
    METRICS_FILE,
    EvaluationRecord,
    RecordFile,
    StepRecord,
)
from tuner.train.step_times import StepCurve, StepTimes

LOSS_STEPS = 10
"""Steps at either end whose mean losses are told."""

SLOW_LINES = 5
"""Slow steps that are told one by one; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Sums over the steps of this process.

    Attributes:
        num_steps: Steps.
        num_updates: Updates made in them.
        real_tokens: Tokens of rows.
        padded_tokens: Tokens computed.
        step_s: Seconds of forward, backward and update.
        update_s: Of these, of the updates.
        data_wait_s: Seconds that the loop waited for data.
        num_slow: Steps far slower than others of their shape.
        slow_excess_s: Seconds that they took over the medians of these.
        recompiles: Compiles that no warm-up planned.
        recompile_s: Their seconds.
        curves: (B, L) -> seconds of its steps, without the updates.
        first_losses: Of the first steps with a loss.
        last_losses: Of the last ones.
        evaluation: The last one; None if there was none.
        evaluation_s: Seconds of all of them.
    """

    num_steps: int = 0
    num_updates: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    step_s: float = 0.0
    update_s: float = 0.0
    data_wait_s: float = 0.0
    num_slow: int = 0
    slow_excess_s: float = 0.0
    recompiles: int = 0
    recompile_s: float = 0.0
    curves: Mapping[Shape, StepCurve] = dataclasses.field(default_factory=dict)
    first_losses: tuple[float, ...] = ()
    last_losses: tuple[float, ...] = ()
    evaluation: EvaluationRecord | None = None
    evaluation_s: float = 0.0

    @property
    def effective_token_fraction(self) -> float:
        """Real tokens over padded tokens; 0 before the first step."""
        return self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0


class RunLog:
    """Takes every record of a run: files, event file, slow steps, sums."""

    def __init__(
        self,
        folder: Path,
        keep_steps: int,
        on_notice: Callable[[str], None] = lambda line: None,
        *,
        writes_events: bool = False,
        writes: bool = True,
    ) -> None:
        """Open the files.

        Args:
            folder: Of the run.
            keep_steps: Records of later steps no longer hold; 0 for a new run.
            on_notice: Told the first slow steps.
            writes_events: Whether event files for TensorBoard are written.
            writes: Whether any file is; of several ranks one does.

        Raises:
            BadInputError: the folder cannot be written.
        """
        self._steps = RecordFile(folder / METRICS_FILE, keep_steps) if writes else None
        self._evaluations = RecordFile(folder / EVALUATION_FILE, keep_steps) if writes else None
        self._events = EventFile(folder, keep_steps) if writes and writes_events else None
        self._on_notice = on_notice
        self._times: StepTimes[Shape] = StepTimes()
        self._update_times: StepTimes[None] = StepTimes()
        self._first_losses: list[float] = []
        self._last_losses: deque[float] = deque(maxlen=LOSS_STEPS)
        self._sums = StepFigures()
        self._is_after_pause = False

    def append(self, record: StepRecord) -> StepRecord:
        """Take a step in.

        Returns:
            The record as it was written, with `slow`.

        Raises:
            BadInputError: the disk is full or a file is gone.
        """
        usual_s = self._usual_s(record)
        if usual_s is not None:
            record = dataclasses.replace(record, slow=True)
            self._tell_slow(record, usual_s)
        self._is_after_pause = False
        self._add(record, usual_s)
        if self._steps is not None:
            self._steps.append(record)
        if self._events is not None:
            self._events.write(record.step, _scalars_of_step(record))
        return record

    def pause(self) -> None:
        """A checkpoint or an evaluation came between two steps: the next may well be slow."""
        self._is_after_pause = True

    def evaluated(self, record: EvaluationRecord) -> None:
        """Take an evaluation in.

        Raises:
            BadInputError: the disk is full or a file is gone.
        """
        self.pause()
        self._sums = dataclasses.replace(
            self._sums,
            evaluation=record,
            evaluation_s=self._sums.evaluation_s + record.seconds,
        )
        if self._evaluations is not None:
            self._evaluations.append(record)
        if self._events is not None:
            self._events.write(record.step, _scalars_of_evaluation(record))

    def close(self) -> None:
        """Bring everything to the disk."""
        for file in (self._steps, self._evaluations, self._events):
            if file is not None:
                file.close()

    def figures(self) -> StepFigures:
        """Sums over the steps of this process so far."""
        return dataclasses.replace(
            self._sums,
            curves=self._times.curves(),
            first_losses=tuple(self._first_losses),
            last_losses=tuple(self._last_losses),
        )

    def _usual_s(self, record: StepRecord) -> float | None:
        """Median seconds of what this step should have taken, if it was slow; else None."""
        shape = record.batch_size, record.padded_length
        usual_s = self._times.add(shape, record.step_s - record.update_s)
        usual_update_s = self._update_times.add(None, record.update_s) if record.update_s else None
        if self._is_after_pause or record.recompiles > self._sums.recompiles:
            return None
        if usual_s is None and usual_update_s is None:
            return None
        return (usual_s or record.step_s - record.update_s) + (usual_update_s or record.update_s)

    def _tell_slow(self, record: StepRecord, usual_s: float) -> None:
        if self._sums.num_slow >= SLOW_LINES:
            return
        more = "; further ones are counted only" if self._sums.num_slow + 1 == SLOW_LINES else ""
        self._on_notice(
            f"slow step {record.step} (epoch {record.epoch}, its step {record.step_in_epoch}, "
            f"B={record.batch_size} L={record.padded_length}): {record.step_s:.2f} s, usual "
            f"{usual_s:.2f} s; waited {record.data_wait_s:.2f} s for data besides{more}"
        )

    def _add(self, record: StepRecord, usual_s: float | None) -> None:
        if record.loss is not None:
            if len(self._first_losses) < LOSS_STEPS:
                self._first_losses.append(record.loss)
            self._last_losses.append(record.loss)
        sums = self._sums
        self._sums = dataclasses.replace(
            sums,
            num_steps=sums.num_steps + 1,
            num_updates=sums.num_updates + (record.grad_norm is not None),
            real_tokens=sums.real_tokens + record.real_tokens,
            padded_tokens=sums.padded_tokens + record.padded_tokens,
            step_s=sums.step_s + record.step_s,
            update_s=sums.update_s + record.update_s,
            data_wait_s=sums.data_wait_s + record.data_wait_s,
            num_slow=sums.num_slow + record.slow,
            slow_excess_s=sums.slow_excess_s
            + (0.0 if usual_s is None else record.step_s - usual_s),
            recompiles=record.recompiles,
            recompile_s=record.recompile_s,
        )


def _scalars_of_step(record: StepRecord) -> dict[str, float | None]:
    return {
        "train/loss": record.loss,
        "train/learning_rate": record.learning_rate,
        "train/grad_norm": record.grad_norm,
        "train/clip_norm": record.clip_norm,
        "train/loss_scale": record.loss_scale,
        "batch/effective_token_fraction": record.real_tokens / record.padded_tokens,
        "batch/padded_length": record.padded_length,
        "speed/real_tokens_per_s": record.real_tokens / (record.step_s + record.data_wait_s),
        "speed/step_s": record.step_s,
        "speed/data_wait_s": record.data_wait_s,
        "speed/recompiles": record.recompiles,
        "memory/bytes": record.memory_bytes,
    }


def _scalars_of_evaluation(record: EvaluationRecord) -> dict[str, float | None]:
    by_length = {f"evaluation/loss_up_to_{item.up_to:05d}": item.loss for item in record.by_length}
    return {
        "evaluation/loss": record.loss,
        "evaluation/perplexity": record.perplexity,
        **by_length,
    }

"""What varseq-train shows while it runs: a progress line, and lines above it."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tuner.train.metrics import EvaluationRecord, StepRecord

LINE_EVERY_S = 10.0


class TrainView:
    """Progress on standard error: a live bar on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._planned_steps = 0
        self._started_after = self._done_steps = 0
        self._loss: float | None = None
        self._evaluation_loss: float | None = None
        self._recompiles = 0
        self._real_tokens = self._padded_tokens = 0
        self._started = self._last_line = time.perf_counter()

    def __enter__(self) -> TrainView:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def start(self, planned_steps: int, done_steps: int) -> None:
        """The first step is about to run."""
        self._planned_steps = planned_steps
        self._started_after = self._done_steps = done_steps
        self._started = self._last_line = time.perf_counter()
        self._task = self._progress.add_task("", total=planned_steps, completed=done_steps)

    def notice(self, line: str) -> None:
        """Show a line above the bar."""
        if self._console.is_terminal:
            self._progress.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def step(self, record: StepRecord) -> None:
        """A step is done."""
        if record.loss is not None:
            self._loss = record.loss
        self._done_steps = record.step
        self._real_tokens += record.real_tokens
        self._padded_tokens += record.padded_tokens
        self._recompiles = record.recompiles
        line = self._line()
        if self._task is not None:
            self._progress.update(self._task, completed=record.step, description=line)
        now = time.perf_counter()
        is_due = now - self._last_line >= LINE_EVERY_S or record.step == self._planned_steps
        if not self._console.is_terminal and is_due:
            self._last_line = now
            left = f", {_duration(self._seconds_left(now))} left"
            self.notice(f"step {record.step}/{self._planned_steps} {line}{left}")

    def evaluation(self, record: EvaluationRecord) -> None:
        """An evaluation is done."""
        self._evaluation_loss = record.loss
        self.notice(describe_evaluation(record))

    def _line(self) -> str:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        evaluated = (
            "" if self._evaluation_loss is None else f", evaluation {self._evaluation_loss:.3f}"
        )
        return (
            f"loss {_loss(self._loss)}{evaluated}, {self._real_tokens / seconds:,.0f} real "
            f"tokens/s, effective {self._effective():.2f}, recompiles {self._recompiles}"
        )

    def _effective(self) -> float:
        return self._real_tokens / self._padded_tokens if self._padded_tokens else 0.0

    def _seconds_left(self, now: float) -> float:
        """If the steps to come take as long as those of this process."""
        own_steps = max(1, self._done_steps - self._started_after)
        return (now - self._started) / own_steps * (self._planned_steps - self._done_steps)


def describe_evaluation(record: EvaluationRecord) -> str:
    """An evaluation in one line."""
    if record.loss is None:
        what = "no labels in its rows" if not record.label_tokens else "the loss is no number"
        return f"evaluation after step {record.step}: {what}"
    by_length = ", ".join(f"up to {item.up_to}: {item.loss:.3f}" for item in record.by_length)
    return (
        f"evaluation after step {record.step}: loss {record.loss:.4f}, perplexity "
        f"{_perplexity(record.perplexity)} over {record.label_tokens:,} labels of "
        f"{record.rows:,} rows in {record.seconds:.1f} s; by length {by_length}"
    )


def _perplexity(value: float | None) -> str:
    return "beyond all numbers" if value is None else f"{value:,.2f}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

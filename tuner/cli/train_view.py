"""What varseq-train shows: a progress line while it runs, a table at the end."""

from __future__ import annotations

import sys
import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from tabulate import tabulate

from tuner.config.schema import TrainConfig
from tuner.train.metrics import StepRecord
from tuner.train.run import RunReport

LOSS_WINDOW_STEPS = 10
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
        self._first_losses: list[float] = []
        self._last_losses: deque[float] = deque(maxlen=LOSS_WINDOW_STEPS)
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
            if len(self._first_losses) < LOSS_WINDOW_STEPS:
                self._first_losses.append(record.loss)
            self._last_losses.append(record.loss)
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
            self.notice(f"step {record.step}/{self._planned_steps} {line}")

    def final_table(self, config: TrainConfig, report: RunReport) -> str:
        """Predicted against observed, for the steps since the start or the resumption."""
        tuned = config.provenance.prediction if config.provenance else None
        rows = [
            ("steps", f"{report.planned_steps}", f"{report.state.steps}"),
            ("optimizer updates", "", f"{report.state.updates}"),
            (
                "effective token fraction",
                f"{tuned.effective_token_fraction:.3f}" if tuned else "",
                f"{self._effective():.3f}",
            ),
            (
                "real tokens/s after warm-up",
                f"{tuned.estimated_steady_real_tokens_per_s:,.0f}" if tuned else "",
                f"{report.real_tokens / report.loop_s:,.0f}",
            ),
            (
                "warm-up seconds",
                f"{tuned.estimated_compile_s:.1f}" if tuned else "",
                f"{report.warm_up_s:.1f}",
            ),
            ("recompiles after warm-up", "0", f"{self._recompiles}"),
            (
                f"peak memory GB ({report.memory_kind})",
                f"{tuned.peak_bytes / 1e9:.2f}" if tuned else "",
                f"{report.peak_bytes / 1e9:.2f}",
            ),
            (f"loss, mean of first {LOSS_WINDOW_STEPS} steps", "", _mean(self._first_losses)),
            (f"loss, mean of last {LOSS_WINDOW_STEPS} steps", "", _mean(list(self._last_losses))),
        ]
        return tabulate(
            rows,
            headers=["", "predicted", "observed"],
            disable_numparse=True,
            colalign=("left", "right", "right"),
        )

    def _line(self) -> str:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        loss = f"{self._last_losses[-1]:.3f}" if self._last_losses else "-"
        return (
            f"loss {loss}, {self._real_tokens / seconds:,.0f} real tokens/s, "
            f"effective {self._effective():.2f}, recompiles {self._recompiles}"
        )

    def _effective(self) -> float:
        return self._real_tokens / self._padded_tokens if self._padded_tokens else 0.0


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "-"

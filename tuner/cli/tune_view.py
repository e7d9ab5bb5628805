"""What varseq-tune shows while it runs: a line a trial, and on a terminal a bar with the best."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tuner.config.schema import TrainConfig
from tuner.report.study import describe_config
from tuner.study.choose import choose_best, pad_to_longest
from tuner.study.outcome import NumberedOutcome
from tuner.study.result import StudyResult


class TuneView:
    """Progress on standard error."""

    def __init__(self, trials: int) -> None:
        """Show nothing yet.

        Args:
            trials: Wanted in all.
        """
        self.notices: list[str] = []
        self._trials = trials
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("trial {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=trials)
        self._has_started = False
        self._shown: set[int] = set()
        self._best = ""

    def __enter__(self) -> TuneView:
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def notice(self, line: str) -> None:
        """Show a line, and keep it for the report."""
        self.notices.append(line)
        self._print(line)

    def trial(self, number: int, config: TrainConfig) -> None:
        """A trial starts."""
        self._progress.update(
            self._task, description=f"{self._best}now: {describe_config(config)}"
        )

    def result(self, result: StudyResult) -> None:
        """There is more to know; at the start, what earlier starts have found."""
        outcomes = result.outcomes
        # Not before: up to here a signal may end the process on the spot, bar and all.
        self._progress.start()
        new = [item for item in outcomes if item.number not in self._shown]
        if self._has_started:
            for item in new:
                self._print(self._outcome_line(item, outcomes))
        elif outcomes:
            are = "trials are" if len(outcomes) > 1 else "trial is"
            self._print(f"{len(outcomes)} {are} done already; going on from there")
        self._has_started = True
        self._shown |= {item.number for item in new}
        self._best = self._best_so_far(outcomes)
        done = sum(item.outcome.baseline is None for item in outcomes)
        self._progress.update(self._task, completed=done, description=self._best)

    def _outcome_line(self, item: NumberedOutcome, outcomes: Sequence[NumberedOutcome]) -> str:
        outcome = item.outcome
        if outcome.real_tokens_per_s is None:
            found = f"{outcome.status}: {outcome.reason}"
        else:
            found = f"{outcome.real_tokens_per_s:,.0f} real tokens/s"
        took = f"{outcome.wall_s:.0f} s" if outcome.wall_s else "nothing new to measure"
        return (
            f"{self._place(item, outcomes)}: {describe_config(outcome.config)}: {found}, {took}; "
            f"{self._best_so_far(outcomes)}"
        ).rstrip("; ")

    def _place(self, item: NumberedOutcome, outcomes: Sequence[NumberedOutcome]) -> str:
        if item.outcome.baseline is not None:
            return f"trial {item.number} ({item.outcome.baseline})"
        place = sum(o.outcome.baseline is None and o.number <= item.number for o in outcomes)
        return f"trial {item.number} ({place} of {self._trials})"

    @staticmethod
    def _best_so_far(outcomes: Sequence[NumberedOutcome]) -> str:
        best, fixed = choose_best(outcomes), pad_to_longest(outcomes)
        if best is None or best.outcome.real_tokens_per_s is None:
            return ""
        text = f"best {best.outcome.real_tokens_per_s:,.0f}"
        if fixed is not None and fixed.outcome.real_tokens_per_s:
            ratio = best.outcome.real_tokens_per_s / fixed.outcome.real_tokens_per_s
            text += f", {ratio:.2f} x pad-to-longest"
        return text + "; "

    def _print(self, line: str) -> None:
        if self._console.is_terminal:
            self._progress.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

"""Writing what a study found: every file is replaced at once, after every trial."""

from __future__ import annotations

from tuner.config.codec import format_config, write_text
from tuner.report.contents import Absent, SeveralDevices
from tuner.report.gather import best_config, gather_contents
from tuner.report.gather_devices import gather_devices
from tuner.report.html import format_html
from tuner.report.study import StudyContext, summary_text, trials_csv
from tuner.simulate.cost_file import cost_file
from tuner.study.result import StudyResult
from tuner.study.setup import StudySetup, cost_identity


class Outputs:
    """The files of one study."""

    def __init__(self, setup: StudySetup, context: StudyContext) -> None:
        """Write nothing yet.

        Args:
            setup: What the study is about.
            context: What the pages say besides its result.
        """
        self._setup = setup
        self._context = context
        self._result: StudyResult | None = None
        self._devices: SeveralDevices | Absent = Absent()

    def write(self, result: StudyResult) -> None:
        """Write trials.csv, summary.txt, cost_model.yaml, and best.yaml if any is feasible.

        Args:
            result: All that is known by now.

        Raises:
            BadInputError: the folder cannot be written; files there stay whole.
        """
        if not result.outcomes:
            return
        self._result, self._devices = result, gather_devices(result, self._setup)
        folder = self._setup.folder
        write_text(folder.trials_table, trials_csv(result.outcomes))
        write_text(folder.summary, summary_text(result, self._context, self._devices))
        costs = cost_file(result.book, cost_identity(self._setup.base))
        write_text(folder.costs, format_config(costs, header=COSTS_HEADER))
        if (text := self._best_text(result)) is not None:
            write_text(folder.best_config, text)

    def write_report(self) -> None:
        """Write report.html; it takes a second or two, so it is not done after every trial."""
        if self._result is not None:
            contents = gather_contents(self._result, self._setup, self._context, self._devices)
            write_text(self._setup.folder.report, format_html(contents))

    def _best_text(self, result: StudyResult) -> str | None:
        config = best_config(result, self._setup)
        if config is None or config.provenance is None:
            return None
        trial, num_trials = config.provenance.trial, len(result.outcomes)
        is_confirmed = result.confirmation is not None and result.confirmation.winner is not None
        how = "confirmed against the baselines" if is_confirmed else "not confirmed yet"
        return format_config(
            config,
            header=(
                f"Trial {trial}, the best of {num_trials} trials of varseq-tune, {how}.\n"
                f"Train it with: varseq-train --config {self._setup.folder.best_config}"
            ),
        )


COSTS_HEADER = """\
What varseq-tune measured here and the costs fitted to it: seconds and bytes by shape (B, L).
Start another study of this model from it, or tune without a device:
varseq-tune --cost-model cost_model.yaml [--dry-run] ..."""

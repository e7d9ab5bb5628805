"""Writing what a study found: every file is replaced at once, after every trial."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.config.codec import format_config, write_text
from tuner.report.study import StudyContext, report_markdown, summary_text, trials_csv
from tuner.study.choose import choose_best, with_provenance
from tuner.study.optuna_study import STUDY_NAME
from tuner.study.outcome import NumberedOutcome
from tuner.study.search import StudySetup


def write_outputs(
    outcomes: Sequence[NumberedOutcome], setup: StudySetup, context: StudyContext
) -> None:
    """Write trials.csv, summary.txt, report.md, and best.yaml if any trial was measured.

    Raises:
        BadInputError: the folder cannot be written; files there stay whole.
    """
    folder = setup.folder
    write_text(folder.trials_table, trials_csv(outcomes))
    write_text(folder.summary, summary_text(outcomes, context))
    write_text(folder.report, report_markdown(outcomes, context))
    best = choose_best(outcomes)
    if best is None:
        return
    config = with_provenance(
        best,
        data_fingerprint=setup.data.dataset.fingerprint,
        num_samples=setup.data.lengths.num_samples,
        study_name=STUDY_NAME,
        installation=setup.installation,
    )
    header = (
        f"Trial {best.number}, the best of {len(outcomes)} trials of varseq-tune.\n"
        f"Train it with: varseq-train --config {folder.best_config}"
    )
    write_text(folder.best_config, format_config(config, header=header))

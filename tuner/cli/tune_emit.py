"""`varseq-tune --emit STACK`: best.yaml as a fragment for another training stack, beside it."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.config.codec import load_config, write_text
from tuner.errors import BadInputError
from tuner.report.handover import STACKS, hand_over
from tuner.train.schedule import peak_rate
from tuner.trial.folder import StudyFolder

ALLOWED_BESIDE = ("--emit", "--out")


def emit(folder: StudyFolder, stack: str, given: Sequence[str]) -> int:
    """Write the fragment, print its path; returns the exit code.

    Args:
        folder: With a best.yaml; nothing else in it is read.
        stack: One of STACKS.
        given: The command line, to refuse what would start trials.

    Raises:
        BadInputError: other options were given, there is no best.yaml or it says no shapes, the
            stack cannot express its strategy, or the folder cannot be written.
    """
    _refuse_others(given)
    if not folder.best_config.is_file():
        raise BadInputError(
            f"--emit needs a finished study: there is no {folder.best_config}",
            fix="run varseq-tune --data first, or give the folder of a study (--out)",
        )
    config = load_config(folder.best_config)
    text = hand_over(config, stack, peak_rate=peak_rate(config))
    path = folder.path / STACKS[stack].file_name
    write_text(path, text)
    print(path)
    return 0


def _refuse_others(given: Sequence[str]) -> None:
    """Abbreviations are not taken, so an option stands under its whole name."""
    names = [argument.partition("=")[0] for argument in given if argument.startswith("--")]
    others = [name for name in names if name not in ALLOWED_BESIDE]
    if others:
        raise BadInputError(
            f"--emit writes what best.yaml holds and runs no trial (got {', '.join(others)} too)",
            fix="give it with --out alone",
        )

"""`varseq-tune`: find the fastest config for the data."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tuner.cli.entry import OneLineParser, add_override_option, exit_on_sigterm, run_command

COMMAND = "varseq-tune"
EXIT_NOTHING_MEASURED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    exit_on_sigterm()
    return run_command(
        COMMAND,
        lambda: _tune(options, given),
        after_interrupt="; the same command goes on from the finished trials",
    )


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=COMMAND,
        description="Measure short trial trainings and write the fastest config to best.yaml.",
        epilog="Stopped by Ctrl-C, a kill or a crash? The same command goes on from the finished "
        "trials.",
    )
    parser.add_argument("--data", metavar="PATH", help="MindRecord file, glob or folder")
    parser.add_argument(
        "--config", metavar="FILE", help="your own model and settings; the found ones go into it"
    )
    parser.add_argument(
        "--trials",
        type=_positive_int,
        default=30,
        metavar="N",
        help="trials in all, those of earlier starts included (default: %(default)s)",
    )
    parser.add_argument(
        "--out", default="results", metavar="DIR", help="results folder (default: %(default)s)"
    )
    parser.add_argument(
        "--space",
        default="default",
        metavar="NAME",
        help="search space: a shipped name or a YAML file (default: %(default)s)",
    )
    add_override_option(parser, "train.epochs=5")
    parser.add_argument(
        "--trial-timeout",
        type=_positive_float,
        default=900.0,
        metavar="SECONDS",
        help="time limit of one trial (default: %(default)g)",
    )
    parser.add_argument(
        "--memory-limit",
        default="90%",
        metavar="AMOUNT",
        help="memory limit of one trial: 12GB, 500MB or 90%% of the machine (default: 90%%)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the search (default: 0)"
    )
    parser.add_argument(
        "--new-study",
        action="store_true",
        help="start over; an earlier study in the folder is renamed",
    )
    return parser  # fmt: skip


def _tune(options: argparse.Namespace, given: Sequence[str]) -> int:
    from tuner.cli.study_files import write_outputs
    from tuner.cli.study_lock import hold_folder, put_aside
    from tuner.cli.tune_setup import set_up_study
    from tuner.cli.tune_view import TuneView
    from tuner.report.study import StudyContext, failure_lines
    from tuner.study.choose import choose_best
    from tuner.study.outcome import NumberedOutcome
    from tuner.study.search import StudyWatch, run_search
    from tuner.trial.folder import StudyFolder
    from tuner.trial.runner import ProcessRunner

    folder = StudyFolder(Path(options.out))
    runner = ProcessRunner()
    with hold_folder(folder), TuneView(options.trials) as view:
        setup = set_up_study(options, folder, runner, view.notice)
        if options.new_study:
            put_aside(folder)
        context = StudyContext(
            data_path=setup.base.data.path,
            num_samples=setup.data.lengths.num_samples,
            longest=setup.data.longest,
            device=setup.installation.device,
            versions=setup.installation.versions,
            notes=tuple(view.notices),
            command=_longer_command(given, options.trials),
            best_config_path=str(folder.best_config),
        )

        def on_outcome(outcomes: Sequence[NumberedOutcome]) -> None:
            if outcomes:
                write_outputs(outcomes, setup, context)
            view.outcomes(outcomes)

        watch = StudyWatch(on_notice=view.notice, on_trial=view.trial, on_outcome=on_outcome)
        outcomes = run_search(setup, runner, watch)
    if choose_best(outcomes) is None:
        print(failure_lines(outcomes), file=sys.stderr)
        print(
            f"{COMMAND}: no trial could be measured; best.yaml is not written. Mend the cause and "
            "give --new-study to try these again",
            file=sys.stderr,
        )
        return EXIT_NOTHING_MEASURED
    print(folder.summary.read_text(encoding="utf-8"), end="")
    return 0


def _longer_command(given: Sequence[str], trials: int) -> str:
    """The same command line with twice the trials: it goes on with this study."""
    kept = []
    skip = False
    for argument in given:
        if skip or argument == "--new-study" or argument.startswith("--trials="):
            skip = False
        elif argument == "--trials":
            skip = True
        else:
            kept.append(argument)
    return shlex.join([COMMAND, *kept, "--trials", str(2 * trials)])


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1 (got {text!r})")
    return value


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0 (got {text!r})")
    return value


if __name__ == "__main__":
    sys.exit(main())

"""`varseq-tune`: find the fastest config for the data."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.entry import OneLineParser, add_override_option, exit_on_sigterm, run_command

if TYPE_CHECKING:
    from tuner.study.result import StudyResult
    from tuner.trial.folder import StudyFolder

COMMAND = "varseq-tune"
OTHER_STACKS = ("mindformers", "mindspeed", "minddata")
EXIT_NOTHING_MEASURED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse_options(given)
    exit_on_sigterm()
    if options.emit:
        return run_command(COMMAND, lambda: _emit(options, given))
    return run_command(
        COMMAND,
        lambda: _tune(options, given),
        after_interrupt="; the same command goes on from the finished trials",
    )


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, without the program's name."""
    return _parser().parse_args(arguments)


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
        "--out", default="results", metavar="DIR", help="results folder (default: %(default)s)"
    )
    parser.add_argument(
        "--space",
        default="default",
        metavar="NAME",
        help="search space: a shipped name or a YAML file (default: %(default)s)",
    )
    parser.add_argument(
        "--emit",
        choices=OTHER_STACKS,
        help="run nothing: write the best.yaml of --out for MindFormers (YAML), MindSpeed-LLM "
        "(flags) or a MindSpore dataset (Python)",
    )
    add_override_option(parser, "train.epochs=5")
    _add_budget_options(parser.add_argument_group("how much"))
    _add_study_options(parser.add_argument_group("which study"))
    _add_cost_options(parser.add_argument_group("known costs"))
    return parser


def _add_budget_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trials",
        type=_positive_int,
        default=30,
        metavar="N",
        help="trials in all besides the baselines, those of earlier starts included "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--confirm",
        type=_whole_number,
        default=2,
        metavar="ROUNDS",
        help="measure the best and the baselines so many times again, in fresh processes; "
        "0: not at all (default: %(default)s)",
    )
    group.add_argument(
        "--confirm-seconds",
        type=_positive_float,
        default=8.0,
        metavar="SECONDS",
        help="time each of them so long at least, half of --trial-timeout at most; more evens out "
        "a machine that others use, too (default: %(default)g)",
    )
    group.add_argument(
        "--timeout",
        type=_positive_float,
        metavar="SECONDS",
        help="time limit of the whole command: nothing new is started after it, and the "
        "confirmation has its time set aside (default: none)",
    )
    group.add_argument(
        "--trial-timeout",
        type=_positive_float,
        default=900.0,
        metavar="SECONDS",
        help="time limit of one trial (default: %(default)g)",
    )
    group.add_argument(
        "--memory-limit",
        default="90%",
        metavar="AMOUNT",
        help="memory limit of one trial: 12GB, 500MB or 90%% of the machine (default: 90%%)",
    )
    group.add_argument(
        "--jobs",
        type=_positive_int,
        default=1,
        metavar="N",
        help="trials at a time, each on a device of its own (default: %(default)s)",
    )


def _add_study_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--storage",
        metavar="URL",
        help="Optuna storage that several tuners share: postgresql://..., journal:PATH, a file "
        "(default: study.db in the results folder)",
    )
    group.add_argument(
        "--study",
        default="varseq-tune",
        metavar="NAME",
        help="name of the study in the storage (default: %(default)s)",
    )
    group.add_argument(
        "--new-study",
        action="store_true",
        help="start over; an earlier study in the folder is renamed",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the search (default: 0)"
    )


def _add_cost_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cost-model",
        metavar="FILE",
        help="cost_model.yaml of an earlier study of the same model, to start from",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="run no trial: rank the space by the cost model alone; needs no device",
    )


def _emit(options: argparse.Namespace, given: Sequence[str]) -> int:
    from tuner.cli.tune_emit import emit
    from tuner.trial.folder import StudyFolder

    return emit(StudyFolder(Path(options.out)), options.emit, given)


def _tune(options: argparse.Namespace, given: Sequence[str]) -> int:
    from tuner.cli.study_files import Outputs
    from tuner.cli.study_lock import hold_folder, put_aside
    from tuner.cli.tune_dry import dry_run
    from tuner.cli.tune_setup import set_up_study, study_context
    from tuner.cli.tune_view import TuneView
    from tuner.study.run import run_study
    from tuner.study.watch import StudyWatch
    from tuner.trial.folder import StudyFolder
    from tuner.trial.runner import ProcessRunner

    folder = StudyFolder(Path(options.out))
    runner = ProcessRunner()
    with hold_folder(folder), TuneView(options.trials) as view:
        setup = set_up_study(options, folder, runner, view.notice)
        if options.dry_run:
            return dry_run(setup)
        if options.new_study:
            put_aside(folder)
        command = _longer_command(given, options.trials)
        outputs = Outputs(setup, study_context(setup, tuple(view.notices), command))

        def on_result(result: StudyResult) -> None:
            outputs.write(result)
            view.result(result)

        watch = StudyWatch(on_notice=view.notice, on_trial=view.trial, on_result=on_result)
        try:
            result = run_study(setup, runner, watch)
            # What other tuners have told while this one waited for them.
            on_result(result)
        finally:
            outputs.write_report()
    return _end(result, folder)


def _end(result: StudyResult, folder: StudyFolder) -> int:
    from tuner.report.study import failure_lines

    if not result.outcomes:
        print(
            f"{COMMAND}: no trial was run within the time limit; best.yaml is not written. Give a "
            "longer --timeout, or none",
            file=sys.stderr,
        )
        return EXIT_NOTHING_MEASURED
    if result.best is None:
        print(failure_lines(result.outcomes), file=sys.stderr)
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


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 0 (got {text!r})")
    return int(text)


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

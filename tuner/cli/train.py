"""`varseq-train`: train the plan of a config."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.entry import (
    OneLineParser,
    add_override_option,
    exit_on_sigterm,
    run_command,
)
from tuner.cli.start_over import start_over
from tuner.cli.train_ranks import (
    add_worker_options,
    check_worker_options,
    launch_workers,
    run_as_rank,
    run_scheduler,
)
from tuner.errors import BadInputError
from tuner.train.world import is_scheduler, world_of

if TYPE_CHECKING:
    from tuner.config.schema import TrainConfig
    from tuner.data.lengths import Lengths
    from tuner.train.loader import Batch
    from tuner.train.rank_watch import RankWatch
    from tuner.train.run import OnFailure, RunReport

COMMAND = "varseq-train"

SHAPE_ERROR_FILE = "shape_error.txt"
"""In train.out: what MindSpore said of shapes that do not fit together."""

EXIT_DIVERGED = 1
EXIT_START_OVER = 75
"""EX_TEMPFAIL of sysexits.h: the same command again will do. Nobody sees it from varseq-train
itself, which then starts over in place."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check_options(parser, options)
    check_worker_options(parser, options)
    options.given = list(sys.argv[1:] if arguments is None else arguments)
    # With arguments of its own it runs inside another program, which must not be replaced.
    return run_command(COMMAND, lambda: _train(options, owns_process=arguments is None))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=COMMAND,
        description="Train on the batches that a config plans, as varseq-tune writes it.",
        epilog="Ctrl-C or SIGTERM: finishes the step, saves, and exits with 130 or 143; the same "
        "command with --resume goes on. A second one stops at once.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="for example best.yaml")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in train.out"
    )
    parser.add_argument(
        "--accept-data",
        action="store_true",
        help="train a tuned config on other data than it was tuned on: with the tuned shapes, "
        "after saying what tuning again would gain",
    )
    add_override_option(parser, "train.max_steps=50")
    add_worker_options(parser)
    parser.add_argument(
        "--profile",
        type=int,
        default=0,
        metavar="STEPS",
        help="take so many steps, after the first two, under MindSpore's profiler, into "
        "train.out/profile; varseq-doctor --profile reads it",
    )
    parser.add_argument(
        "--export",
        metavar="FOLDER",
        help="train nothing: write the newest checkpoint of train.out as a Hugging Face "
        "checkpoint, adapters merged, into a new folder",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="with --export: the checkpoint of the lowest evaluation loss",
    )
    parser.add_argument(
        "--export-dtype",
        choices=("fp32", "bf16", "fp16"),
        help="with --export: of the stored numbers (default: fp32)",
    )
    return parser


def _check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.export is None and (options.best or options.export_dtype is not None):
        parser.error("--best and --export-dtype need --export FOLDER")
    if options.export is not None and options.accept_data:
        parser.error("--export trains nothing, so it does not go with --accept-data")
    if options.profile < 0:
        parser.error(f"--profile must be a number of steps (got {options.profile})")
    if options.export is not None and options.profile:
        parser.error("--export trains nothing, so it does not go with --profile")
    if options.export is not None and options.resume:
        parser.error("--export trains nothing, so it does not go with --resume")


def _train(options: argparse.Namespace, *, owns_process: bool) -> int:
    from tuner.config.codec import load_config
    from tuner.config.override import override_config, parse_assignments

    if is_scheduler(os.environ):
        return run_scheduler()
    overrides = parse_assignments(options.assignments)
    config = override_config(load_config(options.config), overrides)
    if options.export is not None:
        return _export(config, options)
    world = world_of(os.environ)
    if world.is_alone and options.workers * options.nodes > 1:
        return launch_workers(config, options, options.given)
    if not world.is_alone:
        with StopRequest() as stop:
            return run_as_rank(
                COMMAND,
                config,
                world,
                lambda together: _run(config, options, stop, lambda: None, together),
            )
    with StopRequest() as stop:
        on_stuck = _start_over if owns_process else lambda: None
        code = _run(config, options, stop, on_stuck)
    if code == EXIT_START_OVER and owns_process:
        _start_over()
    return code


def _export(config: TrainConfig, options: argparse.Namespace) -> int:
    from tuner.train.export import ExportOptions, export_run

    exit_on_sigterm()
    wanted = ExportOptions(dtype=options.export_dtype or "fp32", takes_best=options.best)
    report = export_run(
        config, Path(options.export), wanted, lambda line: print(line, file=sys.stderr)
    )
    print(
        f"wrote {report.folder}: {report.family}, {report.num_weights:,} weights as "
        f"{wanted.dtype}, after {report.steps} steps of training"
    )
    return 0


def _start_over() -> None:
    from tuner.train.compile_cache import FRESH_VARIABLE

    start_over(FRESH_VARIABLE, StopRequest.SIGNALS)


def _run(
    config: TrainConfig,
    options: argparse.Namespace,
    stop: StopRequest,
    on_stuck: Callable[[], None],
    together: RankWatch | None = None,
) -> int:
    # MindSpore is imported only when the config is known to be whole.
    from tuner.cli.train_view import TrainView
    from tuner.train.compile_cache import UnsoundCacheError
    from tuner.train.loop import DivergedError
    from tuner.train.run import RunWatch, train_run
    from tuner.train.warmup import StoppedError

    with TrainView() as view:
        watch = RunWatch(
            on_start=view.start,
            on_step=view.step,
            on_notice=view.notice,
            stop_requested=lambda: stop.signal_number is not None,
            on_stuck=on_stuck,
            on_evaluation=view.evaluation,
            on_other_data=_tell_drift(options.config, view.notice)
            if options.accept_data
            else None,
            on_failure=_explain_to(view.notice, _shape_error_file(config, together)),
            profile_steps=options.profile,
        )
        try:
            report = train_run(config, watch, resume=options.resume, together=together)
        except DivergedError as error:
            print(f"{COMMAND}: {error}", file=sys.stderr)
            return EXIT_DIVERGED
        except UnsoundCacheError:
            # Said already; the folder is removed.
            return EXIT_START_OVER
        except StoppedError:
            print(f"{COMMAND}: stopped before the first step; nothing to save", file=sys.stderr)
            return 128 + (stop.signal_number or signal.SIGTERM)
    return _tell_end(config, report, stop)


def _tell_end(config: TrainConfig, report: RunReport, stop: StopRequest) -> int:
    from tuner.cli.train_end import format_end

    if report.summary is None:
        print(f"nothing left to do: all {report.planned_steps} steps are done")
        return 0
    tuned = None if report.is_other_data else config.provenance
    print(
        format_end(
            report.summary,
            tuned.prediction if tuned else None,
            planned_steps=report.planned_steps,
            done_steps=report.state.steps,
        )
    )
    for recompile in report.recompiles:
        print(f"unplanned compile: {recompile}")
    if not report.is_complete:
        # Of several ranks, any may have been told to stop.
        print(
            f"stopped after step {report.state.steps} of {report.planned_steps}, saved; "
            "go on with --resume"
        )
        return 128 + (stop.signal_number or signal.SIGTERM)
    return 0


def _shape_error_file(config: TrainConfig, together: RankWatch | None) -> Path:
    """In train.out, where of several ranks the first alone writes; others have their own."""
    if together is None or together.world.is_first:
        return Path(config.train.out) / SHAPE_ERROR_FILE
    return together.folder.shape_error_of(together.world.rank)


def _explain_to(notice: Callable[[str], None], file: Path) -> OnFailure:
    """What is told of an error about shapes; MindSpore's own text goes to a file."""

    def tell(error: Exception, model: Any, config: TrainConfig, batch: Batch) -> None:
        from tuner.config.codec import write_text
        from tuner.diagnose.mismatch import explain_failure

        explanation = explain_failure(error, model, config, batch)
        if explanation is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        for line in explanation.lines(file):
            notice(line)
        # After the lines: a full disk must not keep them back.
        write_text(file, explanation.raw)
        raise BadInputError(explanation.error_line, fix="see the lines above") from error

    return tell


def _tell_drift(
    config_path: str, notice: Callable[[str], None]
) -> Callable[[TrainConfig, Lengths], None]:
    """What is told of data that a config was not tuned on."""

    def tell(config: TrainConfig, lengths: Lengths) -> None:
        from tuner.cli.train_drift import describe_drift
        from tuner.simulate.drift import find_drift

        assert config.provenance is not None
        drift = find_drift(config, config.provenance, lengths)
        for line in describe_drift(drift, config_path, config.data.path):
            notice(line)

    return tell


class StopRequest:
    """SIGINT or SIGTERM: the first asks the run to save and end, the second ends at once.

    The signals are blocked and waited for by a thread. A handler would not do: while a graph runs,
    MindSpore puts its own in place of ours, which turns SIGINT into SIGTERM. Enter before
    MindSpore starts its threads, which inherit what is blocked.
    """

    SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._closing = False
        self._waiter = threading.Thread(target=self._wait, name="stop-request", daemon=True)

    def __enter__(self) -> StopRequest:
        signal.pthread_sigmask(signal.SIG_BLOCK, self.SIGNALS)
        self._waiter.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing = True
        signal.pthread_kill(self._waiter.ident or 0, signal.SIGTERM)
        self._waiter.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.SIGNALS)

    def _wait(self) -> None:
        while True:
            number = int(signal.sigwait(self.SIGNALS))
            if self._closing:
                return
            if self.signal_number is not None:
                os._exit(128 + number)
            self.signal_number = number
            print(
                f"\n{COMMAND}: finishing the step, then saving; a second signal stops at once",
                file=sys.stderr,
            )


if __name__ == "__main__":
    sys.exit(main())

"""varseq-train on several devices: starting the ranks, and being one of them."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.errors import EXIT_BAD_INPUT, BadInputError

if TYPE_CHECKING:
    from tuner.config.schema import TrainConfig
    from tuner.train.rank_watch import RankWatch
    from tuner.train.world import World

EXIT_BUG = 1
MULTI_NODE_PORT = 8118
"""The port that msrun takes by default, where several machines have to know it."""

FIRST_SAYS_S = 3.0
"""Seconds in which the first rank may say first what is wrong with all of them."""


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """Add `--workers` and where they are."""
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="train on so many devices of this machine together, by MindSpore's msrun; on CPU "
        "so many processes",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="M",
        help="machines with N workers each; the same command is run on each, on a shared folder",
    )
    parser.add_argument(
        "--node-rank", type=int, default=0, metavar="I", help="number of this machine, from 0"
    )
    parser.add_argument(
        "--master",
        metavar="ADDR[:PORT]",
        help=f"machine 0, as the others reach it (default port: {MULTI_NODE_PORT})",
    )


def check_worker_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what does not go together; exits."""
    if options.workers < 1 or options.nodes < 1:
        parser.error("--workers and --nodes must be at least 1")
    if not 0 <= options.node_rank < options.nodes:
        parser.error(f"--node-rank must be in 0..{options.nodes - 1} (got {options.node_rank})")
    if options.nodes > 1 and options.master is None:
        parser.error("--nodes needs --master, the address of machine 0")
    if options.export is not None and options.workers * options.nodes > 1:
        parser.error("--export trains nothing, so it does not go with --workers")
    if options.master is not None:
        _address(parser, options.master)


def launch_workers(
    config: TrainConfig, options: argparse.Namespace, arguments: Sequence[str]
) -> int:
    """Start the ranks of this machine and wait for their end; the exit code."""
    from tuner.train.launch import launch
    from tuner.train.msrun import LOOPBACK, LaunchPlan
    from tuner.train.rank_files import RankFolder

    master, port = LOOPBACK, None
    if options.master is not None:
        master, port = _split_address(options.master)
    if options.nodes > 1 and port is None:
        port = MULTI_NODE_PORT
    plan = LaunchPlan(
        workers=options.workers,
        nodes=options.nodes,
        node_rank=options.node_rank,
        master=master,
        port=port,
    )
    folder = RankFolder(Path(config.train.out))
    return launch(plan, folder, without_worker_options(arguments), show=_show)


def without_worker_options(arguments: Sequence[str]) -> list[str]:
    """What the ranks are given: msrun looks through it, and stumbles over `--master`.

    It takes a word for one of its own options that begin so, of which there are two (2.10).
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_worker_options(parser)
    return parser.parse_known_args(arguments)[1]


def run_scheduler() -> int:
    """Be the process that brings the ranks together; signals are for the ranks."""
    from tuner.train.collectives import serve_as_scheduler

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    serve_as_scheduler()
    return 0


def run_as_rank(
    command_name: str, config: TrainConfig, world: World, run: Callable[[RankWatch], int]
) -> int:
    """Train as one rank, and tell the others how it ended.

    Args:
        command_name: Starts the line of an error.
        config: Of the run.
        world: This rank.
        run: Trains; returns the exit code.

    Returns:
        0; any other exit code ends the process here, since MindSpore's own way out waits for
        ranks that may be gone.
    """
    from tuner.train.rank_files import RankFolder
    from tuner.train.rank_watch import RankWatch

    for name, value in time_limits(config).items():
        os.environ.setdefault(name, value)
    with RankWatch(RankFolder(Path(config.train.out)), world) as watch:
        code, message = _run_and_tell(command_name, watch, run)
        sys.stdout.flush()
        sys.stderr.flush()
        is_fault = code not in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
        watch.wait_for_first(FIRST_SAYS_S if is_fault or not watch.has_stepped else math.inf)
        watch.end(code, message)
        if code:
            # Where msrun ends all ranks at the first bad end, let the files be seen before.
            time.sleep(0.2)
            os._exit(code)
    return 0


def time_limits(config: TrainConfig) -> Mapping[str, str]:
    """How long HCCL waits for ranks, by name of its variable.

    MindSpore reads them when ranks meet. From the documentation, not run.

    Args:
        config: A tuned one says how long its warm-up takes.
    """
    from tuner.simulate.warm_up_time import choose_timeouts

    tuned = config.provenance
    return choose_timeouts(tuned.prediction.estimated_compile_s if tuned else 0.0).variables


def _run_and_tell(
    command_name: str, watch: RankWatch, run: Callable[[RankWatch], int]
) -> tuple[int, str]:
    """The exit code, and a line about it if there is one."""
    from tuner.train.rank_watch import in_a_line

    try:
        return run(watch), ""
    except BadInputError as error:
        print(f"{command_name}: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT, str(error)
    except Exception as error:
        traceback.print_exc()
        return EXIT_BUG, in_a_line(error)


def _address(parser: argparse.ArgumentParser, text: str) -> None:
    try:
        _split_address(text)
    except ValueError:
        parser.error(f"--master must be ADDR or ADDR:PORT (got {text})")


def _split_address(text: str) -> tuple[str, int | None]:
    """`10.0.0.1:8118` -> ("10.0.0.1", 8118)."""
    address, colon, port = text.partition(":")
    if not address or (colon and not 1024 <= int(port) <= 65535):
        raise ValueError(text)
    return address, int(port) if colon else None


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()

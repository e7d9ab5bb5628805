"""What every command shares: bad input becomes one line and exit code 2, Ctrl-C becomes 130."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from tuner.errors import EXIT_BAD_INPUT, BadInputError

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line, and that takes no abbreviated options."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def add_override_option(parser: argparse.ArgumentParser, example: str) -> None:
    """Add `--set NAME=VALUE`, which may be repeated; the values come as `assignments`.

    Args:
        parser: Of a command that has a config.
        example: An assignment that makes sense for the command.
    """
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="assignments",
        help=f"override a field of the config, for example {example}; may be repeated",
    )


def exit_on_sigterm() -> None:
    """Make SIGTERM an exception, so that half-written files and child processes are cleared up."""
    signal.signal(signal.SIGTERM, _raise_exit)


@contextlib.contextmanager
def end_at_once(command_name: str) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process on the spot for as long as the block runs.

    For the time in which MindSpore is imported and reads rows: an exception of a signal handler
    there comes out as an ImportError, or aborts the process (MindSpore 2.10). Only where there is
    no child process and no progress bar to clear up, and no file half written under its own name.

    Args:
        command_name: The name that starts the line after Ctrl-C.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        if number == signal.SIGINT:
            print(f"{command_name}: interrupted", file=sys.stderr, flush=True)
        os._exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(EXIT_TERMINATED)


def run_command(
    command_name: str, command: Callable[[], int], *, after_interrupt: str = ""
) -> int:
    """Run a command's body and turn what users can cause into an exit code.

    Args:
        command_name: The name that starts the error line, for example `varseq-data`.
        command: The body; returns the exit code.
        after_interrupt: Said after Ctrl-C: how to go on.

    Returns:
        The body's exit code; 2 for bad input or a full disk, 130 after Ctrl-C.
    """
    try:
        return command()
    except BadInputError as error:
        print(f"{command_name}: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(f"{command_name}: interrupted{after_interrupt}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; say nothing more, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        place = f" {error.filename}" if error.filename else ""
        print(
            f"{command_name}: error: cannot write{place}: {error.strerror}; make room or choose "
            "another folder",
            file=sys.stderr,
        )
        return EXIT_BAD_INPUT

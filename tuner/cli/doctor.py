"""`varseq-doctor`: what this machine can do, and whether a config will run here."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.entry import OneLineParser, add_override_option, exit_on_sigterm, run_command

if TYPE_CHECKING:
    from tuner.config.schema import TrainConfig
    from tuner.diagnose.finding import Finding, Severity

COMMAND = "varseq-doctor"

EXIT_CODES: dict[Severity, int] = {"ok": 0, "note": 0, "warning": 3, "error": 4}
"""By the worst finding; 2 stays for a wrong call, as everywhere."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check_options(parser, options)
    exit_on_sigterm()
    look = _read_profile if options.profile is not None else _examine
    return run_command(COMMAND, lambda: look(options))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=COMMAND,
        description="Look at versions, CANN, environment, memory and disk, run a small step of "
        "each kind, and say what is wrong, why it matters and what to do.",
        epilog="Exit code: 0 all is well or notes only, 3 warnings, 4 something will not run, "
        "2 a wrong call.",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="also say whether this config will run here"
    )
    add_override_option(parser, "graph.mode=dynamic")
    parser.add_argument(
        "--trace-shapes",
        action="store_true",
        help="with --config: run the model op by op at three of its planned shapes, and print "
        "what every Cell takes and gives",
    )
    parser.add_argument(
        "--profile",
        metavar="FOLDER",
        help="look at nothing but a profile, as varseq-train --profile writes it: which ops fell "
        "back to a slow core",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "ascend"),
        help="what the small steps run on (default: the config's, else auto)",
    )
    parser.add_argument(
        "--no-steps", action="store_true", help="run no small steps: seconds instead of a minute"
    )
    parser.add_argument(
        "--out",
        default="results",
        metavar="FOLDER",
        help="where results would go; its disk is looked at (default: results)",
    )
    parser.add_argument("--json", action="store_true", help="the same for machines")
    return parser


def _check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.config is None and (options.assignments or options.trace_shapes):
        parser.error("--set and --trace-shapes need --config FILE")
    if options.profile is not None and options.config is not None:
        parser.error("--profile looks at nothing else, so it does not go with --config")


def _read_profile(options: argparse.Namespace) -> int:
    from tuner.cli.doctor_view import format_profile, profile_to_json
    from tuner.diagnose.fallback import read_profile
    from tuner.diagnose.finding import worst_of

    report = read_profile(Path(options.profile))
    print(profile_to_json(report) if options.json else format_profile(report))
    return EXIT_CODES[worst_of(report.findings)]


def _examine(options: argparse.Namespace) -> int:
    from tuner.cli.doctor_view import format_end, to_json_text
    from tuner.diagnose.capability import WORKER_COMMAND
    from tuner.diagnose.doctor import Wishes, examine, examine_shapes
    from tuner.trial.runner import ProcessRunner

    config = _load(options)
    wishes = Wishes(
        folder=Path(options.out),
        device=options.device or (config.device if config else "auto"),
        config=config,
        runs_steps=not options.no_steps,
    )
    view = _SectionView(is_silent=options.json)
    with tempfile.TemporaryDirectory(prefix=f"{COMMAND}-", ignore_cleanup_errors=True) as folder:
        found = examine(wishes, ProcessRunner(WORKER_COMMAND), Path(folder), view.show)
    if config is not None and options.trace_shapes:
        examine_shapes(found, config, view.show_text)
    print(to_json_text(found.sections) if options.json else f"\n{format_end(found.findings)}")
    return EXIT_CODES[found.worst]


def _load(options: argparse.Namespace) -> TrainConfig | None:
    if options.config is None:
        return None
    from tuner.config.codec import load_config
    from tuner.config.override import override_config, parse_assignments

    return override_config(load_config(options.config), parse_assignments(options.assignments))


class _SectionView:
    """Prints sections as they come."""

    def __init__(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._last_title = ""

    def show(self, title: str, findings: Sequence[Finding]) -> None:
        """One section, or the next bit of the one before."""
        from tuner.cli.doctor_view import format_section

        if self._is_silent:
            return
        is_new = title != self._last_title
        if is_new and self._last_title:
            print()
        print(format_section(title, findings, has_title=is_new), flush=True)
        self._last_title = title

    def show_text(self, text: str) -> None:
        """Text between two sections."""
        if not self._is_silent:
            print(f"\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

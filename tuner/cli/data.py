"""`varseq-data`: text to MindRecord, demo data, and a look at what a file holds."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.entry import OneLineParser, exit_on_sigterm, run_command
from tuner.cli.inspect import add_inspect

if TYPE_CHECKING:
    from tuner.data.prepare import PrepareSummary, ProgressSink

COMMAND = "varseq-data"

PREPARE_HELP = """\
Tokenise text into a MindRecord file with the columns input_ids, labels and length. Rows are cut to
--max-length and never padded. Nothing appears under the final name unless all of it worked.

inputs:   .jsonl, .jsonl.gz (one JSON object per line), .json (a list, or {"data": [...]}),
          .txt (one row per line; see --text-unit), and folders of them
rows:     {"text"}, {"messages": [{"role", "content"}]}, {"prompt", "completion"},
          {"instruction", "input", "output"}; parts are joined by a line break where neither side
          has white space, nothing else is added
labels:   equal to input_ids on answers and plain text, -100 on prompts and on all turns but the
          assistant's; not shifted (the trainer shifts)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `varseq-data`.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        The exit code: 0, 2 for bad input, 130 after Ctrl-C.
    """
    arguments = _build_parser().parse_args(argv)
    # MindSpore reports on the terminal what we report ourselves, with a C++ call stack.
    os.environ.setdefault("GLOG_v", "4")
    exit_on_sigterm()
    return run_command(COMMAND, lambda: int(arguments.run(arguments)))


def _build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog=COMMAND, description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_prepare(commands)
    _add_demo(commands)
    add_inspect(commands)
    return parser


def _add_prepare(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    parser = commands.add_parser(
        "prepare",
        help="tokenise text into a MindRecord file",
        description=PREPARE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="text files or folders of them")
    add("--out", required=True, type=Path, metavar="FILE", help="e.g. data.mindrecord")
    add(
        "--tokenizer",
        required=True,
        metavar="FILE|bytes|train:N",
        help="a Hugging Face tokenizer.json or a SentencePiece .model; `bytes`; or a byte-level "
        "BPE of N ids trained on the input and saved as tokenizer.json beside the output",
    )
    add("--max-length", type=int, metavar="TOKENS", help="cut longer rows (default: no limit)")
    add(
        "--vocab-limit",
        type=int,
        metavar="N",
        help="keep the N - 1 most frequent ids, fold all others into one unknown id",
    )
    add("--train-on-prompt", action="store_true", help="labels on every token, prompts included")
    add(
        "--end-token",
        default="auto",
        metavar="TOKEN",
        help="put after every row that is not cut: a token's text, `none`, or `auto` (default: "
        "<|endoftext|>, </s>, [SEP] or the like, where the tokenizer has one)",
    )
    add(
        "--text-unit",
        choices=("line", "paragraph", "file"),
        default="line",
        help="what a row of a .txt file is (default: line)",
    )
    add("--shards", type=int, default=1, metavar="N", help="number of files (default: 1)")
    add("--overwrite", action="store_true", help="replace the output if it exists")
    parser.set_defaults(run=_prepare)


def _add_demo(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="make data from this Python's standard library",
        description="Write rows.jsonl, tokenizer.json and data.mindrecord, made of the functions, "
        "classes and docstrings of this Python's standard library.",
    )
    add = parser.add_argument
    add("--out", required=True, type=Path, metavar="DIR", help="folder to write to")
    add("--rows", type=int, default=4000, metavar="N", help="rows, at most (default: 4000)")
    add("--max-length", type=int, default=512, metavar="TOKENS", help="default: 512")
    add("--vocab-size", type=int, default=4000, metavar="N", help="default: 4000")
    add("--overwrite", action="store_true", help="replace the files if they exist")
    parser.set_defaults(run=_demo)


def _prepare(arguments: argparse.Namespace) -> int:
    from tuner.data.prepare import PrepareOptions, prepare

    options = PrepareOptions(
        inputs=tuple(arguments.inputs),
        out=arguments.out,
        tokenizer=arguments.tokenizer,
        max_length=arguments.max_length,
        vocab_limit=arguments.vocab_limit,
        train_on_prompt=arguments.train_on_prompt,
        end_token=arguments.end_token,
        text_unit=arguments.text_unit,
        num_shards=arguments.shards,
        overwrite=arguments.overwrite,
    )
    with _progress_bar() as report_progress:
        summary = prepare(options, report_progress)
    _print_summary(summary)
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from tuner.data.demo import DemoOptions, make_demo

    options = DemoOptions(
        folder=arguments.out,
        max_length=arguments.max_length,
        num_rows=arguments.rows,
        vocab_size=arguments.vocab_size,
        overwrite=arguments.overwrite,
    )
    with _progress_bar() as report_progress:
        summary = make_demo(options, report_progress)
    _print_summary(summary)
    return 0


@contextmanager
def _progress_bar() -> Iterator[ProgressSink]:
    """A bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    bar = Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("starting", total=None)
    with bar:
        yield lambda stage, done, total: bar.update(
            task, description=stage, completed=done, total=total
        )


def _print_summary(summary: PrepareSummary) -> None:
    from tuner.report.lengths import format_counts, format_table

    files = [
        (
            tally.file.name,
            tally.rows_read,
            format_counts(tally.formats),
            format_counts(tally.skipped),
        )
        for tally in summary.files
    ]
    print(format_table(files, ["file", "rows", "formats", "skipped"]), end="\n\n")
    label_fraction = summary.num_label_tokens / max(summary.num_tokens, 1)
    rows: list[tuple[str, object]] = [
        ("rows read", summary.rows_read),
        ("rows written", summary.rows_written),
        ("rows truncated", summary.rows_truncated),
        ("rows skipped", format_counts(summary.skipped)),
        ("rows without a label to train on", summary.rows_without_labels),
        ("files of other kinds ignored", summary.num_ignored_files),
        ("tokens", summary.num_tokens),
        ("tokens trained on", f"{summary.num_label_tokens:,} ({label_fraction:.1%})"),
        ("longest row", summary.longest),
        ("vocabulary", f"{summary.vocab_size:,} ids ({summary.tokenizer})"),
    ]
    if summary.num_folded_tokens:
        rows.append(("tokens folded into the unknown id", summary.num_folded_tokens))
    rows.append(("written to", str(summary.out)))
    cells = [(name, f"{value:,}" if isinstance(value, int) else value) for name, value in rows]
    print(format_table(cells, headers=[]))


if __name__ == "__main__":
    sys.exit(main())

"""Real text on any machine without a download: the standard library of the running Python.

Rows are functions (signature and docstring as the prompt, the body as the completion; the whole
source where there is no docstring), classes (head and docstring) and module docstrings. The same
Python gives the same rows, tokenizer and data.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuner.data.mindrecord import check_free, check_output
from tuner.data.prepare import (
    TOKENIZER_FILE,
    PrepareOptions,
    PrepareSummary,
    ProgressSink,
    check_options,
    prepare,
)
from tuner.data.staging import StagingFolder
from tuner.errors import BadInputError

DATA_FILE, ROWS_FILE = "data.mindrecord", "rows.jsonl"
SEED = 0
MIN_CHARACTERS = 40  # one-line wrappers teach nothing
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What `varseq-data demo` was asked for."""

    folder: Path
    max_length: int = 512
    num_rows: int = 4000
    vocab_size: int = 4000
    overwrite: bool = False


def make_demo(options: DemoOptions, report_progress: ProgressSink) -> PrepareSummary:
    """Write rows.jsonl, tokenizer.json and data.mindrecord into the folder.

    Raises:
        BadInputError: If the folder cannot be written to, a file is there already, or this Python
            comes without the source of its library.
    """
    rows_file = options.folder / ROWS_FILE
    prepared = PrepareOptions(
        inputs=(str(rows_file),),
        out=options.folder / DATA_FILE,
        tokenizer=f"train:{options.vocab_size}",
        max_length=options.max_length,
        overwrite=options.overwrite,
    )
    _check(options, prepared)
    rows = sample_rows(Path(sysconfig.get_paths()["stdlib"]), options.num_rows)
    if not rows:
        raise BadInputError(
            "this Python comes without the source of its library",
            fix="use `varseq-data prepare` with a text of your own",
        )
    _write_rows(rows_file, rows)
    return prepare(prepared, report_progress)


def sample_rows(library: Path, num_rows: int) -> list[dict[str, str]]:
    """Rows of `prompt` and `completion`, or of `text`: a seeded sample of the distinct ones."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(library.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(file.relative_to(library).parts[:-1]):
            for row in _read_rows(file):
                found.setdefault("".join(row.values()), row)
    rows = [row for text, row in found.items() if len(text) >= MIN_CHARACTERS]
    return random.Random(SEED).sample(rows, min(num_rows, len(rows)))


def _check(options: DemoOptions, prepared: PrepareOptions) -> None:
    if options.num_rows < 1:
        raise BadInputError(f"--rows must be at least 1 (got {options.num_rows})", fix="raise it")
    if options.folder.exists() and not options.folder.is_dir():
        raise BadInputError(f"{options.folder} is not a folder", fix="name another")
    check_options(prepared)
    check_output(prepared.out, num_shards=1, overwrite=options.overwrite)
    for name in (ROWS_FILE, TOKENIZER_FILE):
        check_free(options.folder / name, overwrite=options.overwrite)


def _write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    staging = StagingFolder(file)
    staging.open()
    finished = False
    try:
        with (staging.path / file.name).open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        staging.publish([file.name])
        finished = True
    except OSError as error:
        raise BadInputError(
            f"cannot write {file}: {error.strerror}", fix="check the free space of that disk"
        ) from error
    finally:
        staging.close(keep_folders=finished)


def _read_rows(file: Path) -> Iterator[dict[str, str]]:
    try:
        source = file.read_text("utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library are not ours to report
            tree = ast.parse(source)
    except (SyntaxError, ValueError, OSError):
        return  # templates and deliberately broken examples
    docstring = ast.get_docstring(tree)
    if docstring:
        yield {"text": docstring}
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            yield from _rows_of(node, lines)


def _rows_of(node: Definition, lines: list[str]) -> Iterator[dict[str, str]]:
    assert node.end_lineno is not None  # set by ast.parse
    if ast.get_docstring(node) is None:
        if not isinstance(node, ast.ClassDef):
            yield {"text": _dedent(lines[node.lineno - 1 : node.end_lineno])}
        return
    docstring_end = node.body[0].end_lineno
    head = _dedent(lines[node.lineno - 1 : docstring_end])
    if isinstance(node, ast.ClassDef):
        yield {"text": head}
    elif len(node.body) > 1:
        whole = _dedent(lines[node.lineno - 1 : node.end_lineno])
        yield {"prompt": head + "\n", "completion": whole[len(head) + 1 :]}


def _dedent(lines: list[str]) -> str:
    return textwrap.dedent("\n".join(lines))

"""Text files to a MindRecord file of token rows: read, tokenise, truncate, write; never pad.

Everything streams. What has to be known before the first row can be written (a tokenizer trained
on the input, which ids are frequent) takes a pass over the input of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tuner.data.content import IGNORED_LABEL
from tuner.data.input_files import FileRows, InputFiles, TextUnit, find_input_files
from tuner.data.mindrecord import MindRecordWriter, check_free, check_output
from tuner.data.rows import SkippedRow, TextRow
from tuner.data.token_rows import LabelPolicy, TokenRow, tokenise_rows
from tuner.data.tokenizer import (
    AUTOMATIC,
    ByteTokenizer,
    LibraryTokenizer,
    TextTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from tuner.data.vocabulary import MIN_VOCAB_LIMIT, POLICY, FoldedVocabulary, fold_vocabulary
from tuner.errors import BadInputError

ROWS_PER_WRITE = 1000
MIN_LENGTH = 2  # one token to predict another from
TOKENIZER_FILE = "tokenizer.json"
TRAIN_PREFIX = "train:"

ProgressSink = Callable[[str, int, int], None]
"""Called with what is going on, bytes of the input done, bytes of the input in all."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What `varseq-data prepare` was asked for."""

    inputs: tuple[str, ...]
    out: Path
    tokenizer: str
    """A file, `bytes` or `train:N`."""
    max_length: int | None = None
    vocab_limit: int | None = None
    train_on_prompt: bool = False
    end_token: str = AUTOMATIC
    text_unit: TextUnit = "line"
    num_shards: int = 1
    overwrite: bool = False


@dataclass(kw_only=True)
class FileTally:
    """What was found in one input file."""

    file: Path
    formats: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def rows_read(self) -> int:
        """Rows of any kind."""
        return self.formats.total() + self.skipped.total()


@dataclass(frozen=True, kw_only=True)
class PrepareSummary:
    """What was read and written."""

    files: tuple[FileTally, ...]
    num_ignored_files: int
    rows_written: int
    rows_truncated: int
    rows_without_labels: int
    """Written rows of which no token is trained on."""
    num_tokens: int
    num_label_tokens: int
    num_folded_tokens: int
    longest: int
    vocab_size: int
    tokenizer: str
    out: Path

    @property
    def rows_read(self) -> int:
        """Rows of all files, skipped ones included."""
        return sum(tally.rows_read for tally in self.files)

    @property
    def skipped(self) -> Mapping[str, int]:
        """Skipped rows by reason."""
        return sum((tally.skipped for tally in self.files), Counter[str]())


def prepare(options: PrepareOptions, report_progress: ProgressSink) -> PrepareSummary:
    """Make the MindRecord file.

    Raises:
        BadInputError: If an option, an input or the output cannot be used; nothing is written.
    """
    check_options(options)
    check_output(options.out, num_shards=options.num_shards, overwrite=options.overwrite)
    source = InputRows(find_input_files(options.inputs), options.text_unit, report_progress)
    tokenizer = _make_tokenizer(options, source)
    policy = LabelPolicy(max_length=options.max_length, train_on_prompt=options.train_on_prompt)
    fold = _count_and_fold(options, source, tokenizer, policy)
    rows = tokenise_rows(source.read("tokenising"), tokenizer, policy)
    totals = _Totals()
    with MindRecordWriter(
        options.out,
        description=_describe(options, tokenizer, fold),
        num_shards=options.num_shards,
        overwrite=options.overwrite,
    ) as writer:
        if options.tokenizer.startswith(TRAIN_PREFIX) and isinstance(tokenizer, LibraryTokenizer):
            writer.add_companion(TOKENIZER_FILE, tokenizer.to_json())
        while chunk := list(islice(rows, ROWS_PER_WRITE)):
            writer.write([_as_record(row, fold) for row in chunk if totals.add(row)])
    return _summarise(options, source, tokenizer, fold, totals)


class InputRows:
    """The usable rows of all input files, as often as they are needed.

    Args:
        inputs: The files.
        text_unit: What a row of a .txt file is.
        report_progress: Told how far the reading is.
    """

    def __init__(
        self, inputs: InputFiles, text_unit: TextUnit, report_progress: ProgressSink
    ) -> None:
        self.inputs = inputs
        self.tallies: list[FileTally] = []
        self._text_unit = text_unit
        self._report_progress = report_progress

    def read(self, stage: str) -> Iterator[TextRow]:
        """One pass over all files; afterwards `tallies` says what was in them.

        Raises:
            BadInputError: If a file cannot be read or has no usable row at all.
        """
        self.tallies = []
        bytes_before, total_bytes = 0, self.inputs.total_bytes
        for file in self.inputs.files:
            tally = FileTally(file=file)
            self.tallies.append(tally)
            rows = FileRows(file, self._text_unit)
            for row in rows:
                if isinstance(row, SkippedRow):
                    tally.skipped[row.reason] += 1
                    continue
                tally.formats[row.row_format] += 1
                self._report_progress(stage, bytes_before + rows.bytes_read, total_bytes)
                yield row
            _require_usable(tally)
            bytes_before += file.stat().st_size
        self._report_progress(stage, total_bytes, total_bytes)


def _require_usable(tally: FileTally) -> None:
    if tally.formats:
        return
    reasons = "; ".join(f"{count} x {reason}" for reason, count in tally.skipped.most_common(3))
    raise BadInputError(
        f"{tally.file} has no usable row ({reasons or 'it is empty'})",
        fix="rows need text, messages, prompt and completion, or instruction and output",
    )


def check_options(options: PrepareOptions) -> None:
    """Check the ranges of the numbers.

    Raises:
        BadInputError: Naming the first that is out of range.
    """
    limits: Sequence[tuple[str, int | None, int]] = (
        ("--max-length", options.max_length, MIN_LENGTH),
        ("--vocab-limit", options.vocab_limit, MIN_VOCAB_LIMIT),
    )
    for name, value, least in limits:
        if value is not None and value < least:
            raise BadInputError(f"{name} must be at least {least} (got {value})", fix="raise it")


def _make_tokenizer(options: PrepareOptions, source: InputRows) -> TextTokenizer:
    spec = options.tokenizer
    if spec == "bytes":
        return ByteTokenizer(options.end_token)
    if not spec.startswith(TRAIN_PREFIX):
        return load_tokenizer(spec, options.end_token)
    size = spec.removeprefix(TRAIN_PREFIX)
    if not size.isdecimal():
        raise BadInputError(
            f"--tokenizer {spec}: '{size}' is not a number of ids", fix="write e.g. train:8000"
        )
    check_free(options.out.with_name(TOKENIZER_FILE), overwrite=options.overwrite)
    texts = (row.text for row in source.read("training the tokenizer"))
    return train_tokenizer(texts, int(size), options.end_token)


def _count_and_fold(
    options: PrepareOptions, source: InputRows, tokenizer: TextTokenizer, policy: LabelPolicy
) -> FoldedVocabulary | None:
    if options.vocab_limit is None or options.vocab_limit >= tokenizer.vocab_size:
        return None
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for row in tokenise_rows(source.read("counting tokens"), tokenizer, policy):
        counts += np.bincount(row.input_ids, minlength=tokenizer.vocab_size)
    return fold_vocabulary(counts, options.vocab_limit, tokenizer.end_id)


def _as_record(row: TokenRow, fold: FoldedVocabulary | None) -> dict[str, Any]:
    ids, labels = row.input_ids, row.labels
    if fold is not None:
        trained = labels != IGNORED_LABEL
        ids = fold.new_ids[ids]
        labels = np.where(trained, ids, np.int32(IGNORED_LABEL))
    return {"input_ids": ids, "labels": labels, "length": len(ids)}


def _describe(
    options: PrepareOptions, tokenizer: TextTokenizer, fold: FoldedVocabulary | None
) -> dict[str, Any]:
    """What travels in the header of the file: JSON values, no paths."""
    ids = {"pad_id": tokenizer.pad_id, "end_id": tokenizer.end_id}
    if fold is not None:
        ids = {k: None if i is None else int(fold.new_ids[i]) for k, i in ids.items()}
    description = {
        "length_of": "input_ids",
        "vocab_size": fold.vocab_size if fold else tokenizer.vocab_size,
        **ids,
        "max_length": options.max_length,
        "ignored_label": IGNORED_LABEL,
        "labels_are_shifted": False,
        "trained_on": "everything" if options.train_on_prompt else "answers and plain text",
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
    }
    if fold is not None:
        description["unknown_id"] = fold.unknown_id
        description["vocab_policy"] = POLICY
        description["kept_token_ids"] = fold.kept_ids.tolist()
    return description


@dataclass(kw_only=True)
class _Totals:
    rows: int = 0
    truncated: int = 0
    without_tokens: int = 0
    without_labels: int = 0
    tokens: int = 0
    label_tokens: int = 0
    longest: int = 0

    def add(self, row: TokenRow) -> bool:
        """Count a row; False if it has no token and is not to be written."""
        if len(row.input_ids) == 0:
            self.without_tokens += 1
            return False
        label_tokens = int(np.count_nonzero(row.labels != IGNORED_LABEL))
        self.rows += 1
        self.truncated += row.is_truncated
        self.without_labels += label_tokens == 0
        self.tokens += len(row.input_ids)
        self.label_tokens += label_tokens
        self.longest = max(self.longest, len(row.input_ids))
        return True


def _summarise(
    options: PrepareOptions,
    source: InputRows,
    tokenizer: TextTokenizer,
    fold: FoldedVocabulary | None,
    totals: _Totals,
) -> PrepareSummary:
    tallies = source.tallies
    if totals.without_tokens:
        tallies[-1].skipped["no tokens"] += totals.without_tokens
    return PrepareSummary(
        files=tuple(tallies),
        num_ignored_files=source.inputs.num_ignored,
        rows_written=totals.rows,
        rows_truncated=totals.truncated,
        rows_without_labels=totals.without_labels,
        num_tokens=totals.tokens,
        num_label_tokens=totals.label_tokens,
        num_folded_tokens=fold.num_folded_tokens if fold else 0,
        longest=totals.longest,
        vocab_size=fold.vocab_size if fold else tokenizer.vocab_size,
        tokenizer=tokenizer.name,
        out=options.out,
    )

"""Text files and folders of them, read as a stream of rows.

| name ends in | rows |
|---|---|
| .jsonl, .jsonl.gz | one JSON object per line; blank lines are passed over |
| .json | a list of objects, or {"data": [...]} |
| .txt | one row per line (or per paragraph, or the whole file) |

UTF-8 with or without a byte order mark, line ends of any system. A folder stands for the files of
these kinds in it and below it, sorted by path; hidden ones are left out, other kinds are counted.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from tuner.data.rows import SkippedRow, TextRow, parse_row, parse_text
from tuner.errors import BadInputError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".txt")
TextUnit = Literal["line", "paragraph", "file"]
PARAGRAPH_BREAK = re.compile(r"\n[ \t]*\n\s*")


@dataclass(frozen=True, kw_only=True)
class InputFiles:
    """The files that will be read."""

    files: tuple[Path, ...]
    num_ignored: int
    """Files in the folders that are of another kind."""

    @property
    def total_bytes(self) -> int:
        """Size of all files on the disk."""
        return sum(file.stat().st_size for file in self.files)


def find_input_files(inputs: Sequence[str]) -> InputFiles:
    """Find the files behind the names that the user gave.

    Raises:
        BadInputError: If one is missing or of an unknown kind, or a folder has no usable file.
    """
    files: list[Path] = []
    num_ignored = 0
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found, others = _find_in_folder(path)
            files += found
            num_ignored += others
        elif not path.exists():
            raise BadInputError(f"no such file: {name}", fix="check the path")
        elif not _is_known(path):
            raise BadInputError(
                f"{name} is of an unknown kind", fix=f"use one of {', '.join(SUFFIXES)}"
            )
        else:
            files.append(path)
    return InputFiles(files=tuple(files), num_ignored=num_ignored)


class FileRows:
    """Iterates over the rows of one file and knows how far it is.

    Args:
        file: One of `find_input_files`.
        text_unit: What a row of a .txt file is.

    Raises:
        BadInputError: While iterating, if the file cannot be read, with the line number.
    """

    def __init__(self, file: Path, text_unit: TextUnit = "line") -> None:
        self._file = file
        self._text_unit = text_unit
        self._raw: IO[bytes] | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes of the file on the disk that have been read so far."""
        return 0 if self._raw is None or self._raw.closed else self._raw.tell()

    def __iter__(self) -> Iterator[TextRow | SkippedRow]:
        try:
            with self._file.open("rb") as self._raw:
                yield from self._parse(self._raw)
        except OSError as error:
            # A broken gzip is an OSError without a system error text.
            reason = error.strerror or str(error)
            raise BadInputError(f"cannot read {self._file}: {reason}", fix="check it") from error
        except (EOFError, zlib.error) as error:
            raise BadInputError(
                f"{self._file} is not a whole gzip file: {error}", fix="copy it again"
            ) from error

    def _parse(self, raw: IO[bytes]) -> Iterator[TextRow | SkippedRow]:
        name = self._file.name.lower()
        if name.endswith(".jsonl.gz"):
            with gzip.open(raw, "rb") as stream:
                yield from self._parse_json_lines(stream)
        elif name.endswith(".jsonl"):
            yield from self._parse_json_lines(raw)
        elif name.endswith(".json"):
            yield from self._parse_json(raw)
        else:
            yield from self._parse_text(raw)

    def _parse_json_lines(
        self, stream: IO[bytes] | gzip.GzipFile
    ) -> Iterator[TextRow | SkippedRow]:
        for number, line in enumerate(stream, start=1):
            text = self._decode(line, number)
            if text.strip():
                yield parse_row(self._load_json(text, number))

    def _parse_json(self, stream: IO[bytes]) -> Iterator[TextRow | SkippedRow]:
        value = self._load_json(self._decode(stream.read(), None), None)
        rows = value.get("data") if isinstance(value, dict) else value
        if not isinstance(rows, list):
            raise BadInputError(
                f'{self._file} holds neither a list of rows nor {{"data": [...]}}',
                fix="bring it into one of these forms, or write a .jsonl file, one row per line",
            )
        yield from map(parse_row, rows)

    def _parse_text(self, stream: IO[bytes]) -> Iterator[TextRow | SkippedRow]:
        if self._text_unit == "line":
            lines = (self._decode(line, number) for number, line in enumerate(stream, start=1))
            units: Iterator[str] = (line.rstrip("\r\n") for line in lines)
        else:
            text = self._decode(stream.read(), None).replace("\r\n", "\n").strip("\n")
            whole_file = self._text_unit == "file"
            units = iter([text] if whole_file else PARAGRAPH_BREAK.split(text))
        yield from (parse_text(unit) for unit in units if unit.strip())

    def _decode(self, data: bytes, line_number: int | None) -> str:
        try:
            return data.decode("utf-8-sig" if line_number in (None, 1) else "utf-8")
        except UnicodeDecodeError as error:
            number = line_number or data.count(b"\n", 0, error.start) + 1
            raise BadInputError(
                f"{self._file}, line {number} is not UTF-8 text", fix="convert the file to UTF-8"
            ) from error

    def _load_json(self, text: str, line_number: int | None) -> object:
        try:
            return json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            at = getattr(error, "lineno", 1) if line_number is None else line_number
            reason = getattr(error, "msg", "nested too deeply")
            column = getattr(error, "colno", 1)
            raise BadInputError(
                f"{self._file}, line {at} is not JSON: {reason} at column {column}",
                fix="mend or remove that line",
            ) from error


def _find_in_folder(folder: Path) -> tuple[list[Path], int]:
    files, num_ignored = [], 0
    for path in sorted(folder.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if path.is_file() and _is_known(path):
            files.append(path)
        else:
            num_ignored += path.is_file()
    if not files:
        raise BadInputError(
            f"the folder {folder} holds no file that ends in {', '.join(SUFFIXES)}",
            fix="name another folder",
        )
    return files, num_ignored


def _is_known(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)

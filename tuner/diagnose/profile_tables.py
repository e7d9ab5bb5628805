"""Tables that MindSpore's profiler writes: found below a folder, read as a stream of rows.

- Columns are found by name, whatever their case, spaces and underscores, in the spellings of
  MindSpore 2.7 to 2.10 and of msprof below it (CANN 7.0 to 9.0). The Ascend tables are known from
  the documentation and from the profiler's own source; none was seen on a device.
- A table is read in blocks, never as a whole: memory does not grow with its size.
- Nothing raises for what is in a file: what could not be used is counted and told by
  `TableRows.findings`.

Source: mindspore/profiler of 2.10 (ascend_kernel_details_viewer.py, constant.py: columns and
renames); op_summary of msprof, in hiascend.com/document/detail/en/canncommercial/850/devaids/
profiling/atlasprofiling_16_0067.html, and op_statistic beside it; tables of a CPU run of 2.10.
"""

from __future__ import annotations

import codecs
import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tuner.diagnose.finding import Finding

if TYPE_CHECKING:
    from _csv import Reader

LONGEST_FIELD = 131_072
"""Characters of a field; what a quote that does not end swallows at most."""
BLOCK_BYTES = 1 << 20
MAX_LINE_CHARS = 1 << 20
"""A longer line is none of a table; reading ends there."""

PROFILE_FOLDERS = ("*_ascend_ms", "*_ascend_pt")
"""Folders that hold one profile of one rank; the second as torch_npu names them."""


@dataclass(frozen=True, kw_only=True)
class TableKind:
    """A kind of table.

    Attributes:
        name: For the user.
        file_name: Pattern of its file names, in lower case.
        columns: Field -> spellings of its column in the form of `plain_name`, the first that is
            there counts.
        needed: Fields without which the table is of no use.
    """

    name: str
    file_name: str
    columns: Mapping[str, tuple[str, ...]]
    needed: tuple[str, ...]


_KERNEL_COLUMNS = {
    "op_type": ("optype", "type"),
    "core": ("acceleratorcore", "tasktype", "coretype"),
    "duration_us": ("duration(us)", "taskduration(us)", "duration", "taskduration"),
    "name": ("opname", "name"),
    "state": ("opstate",),
    "input_shapes": ("inputshapes",),
    "output_shapes": ("outputshapes",),
    "data_types": ("inputdatatypes",),
}

KERNEL_DETAILS = TableKind(
    name="kernel_details",
    file_name="kernel_details*.csv",
    columns=_KERNEL_COLUMNS,
    needed=("op_type", "core", "duration_us"),
)
OP_SUMMARY = TableKind(
    name="op_summary",
    file_name="op_summary*.csv",
    columns=_KERNEL_COLUMNS,
    needed=("op_type", "core", "duration_us"),
)
"""What msprof writes and kernel_details is made from."""

OP_STATISTIC = TableKind(
    name="op_statistic",
    file_name="op_statistic*.csv",
    columns={
        "op_type": ("optype", "type"),
        "core": ("coretype", "acceleratorcore", "tasktype"),
        "count": ("count",),
        "total": ("totaltime(us)", "totaltime"),
    },
    needed=("op_type", "core", "count", "total"),
)
CPU_OP_TYPES = TableKind(
    name="cpu_op_type_info",
    file_name="cpu_op_type_info*.csv",
    columns={
        "op_type": ("optype",),
        "count": ("typeoccurrences",),
        "total": ("totalcomputetime", "totalcomputetime(ms)", "totaltime(ms)"),
    },
    needed=("op_type", "count", "total"),
)
CPU_OP_DETAILS = TableKind(
    name="cpu_op_detail_info",
    file_name="cpu_op_detail_info*.csv",
    columns={
        "op_type": ("optype",),
        "count": ("opoccurrences",),
        "total": ("optotaltime(ms)", "optotaltime"),
    },
    needed=("op_type", "count", "total"),
)

ASCEND_KINDS = (KERNEL_DETAILS, OP_SUMMARY, OP_STATISTIC)
CPU_KINDS = (CPU_OP_TYPES, CPU_OP_DETAILS)
"""From the best to the least: of one profile the first that can be read is taken, since all hold
the same kernels."""


def plain_name(text: str) -> str:
    """A column's name without case, spaces, underscores and quotes."""
    return "".join(text.split()).replace("_", "").strip("\"'").lower()


def find_tables(folder: Path) -> tuple[Mapping[str, Sequence[Path]], ...]:
    """Tables anywhere below a folder, apart for every profile, by the name of their kind.

    Tables of one profile are those below one `*_ascend_ms` folder, or else beside each other.
    Folders that cannot be read are passed over.
    """
    profiles: dict[Path, dict[str, list[Path]]] = {}
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            for kind in (*ASCEND_KINDS, *CPU_KINDS):
                if fnmatch(name.lower(), kind.file_name):
                    tables = profiles.setdefault(_profile_of(Path(parent)), {})
                    tables.setdefault(kind.name, []).append(Path(parent, name))
    return tuple(profiles[home] for home in sorted(profiles))


def _profile_of(parent: Path) -> Path:
    for folder in (parent, *parent.parents):
        if any(fnmatch(folder.name, pattern) for pattern in PROFILE_FOLDERS):
            return folder
    return parent


class TableRows:
    """The rows of one table, read once.

    Attributes:
        path: The file.
        kind: What is looked for in it.
        columns: Field -> place in a row; known once `rows` has begun.
        num_rows: Rows given so far.
        bad_numbers: Rows that the reader of the rows could not use for a number; it counts them.
    """

    def __init__(self, path: Path, kind: TableKind) -> None:
        self.path = path
        self.kind = kind
        self.columns: dict[str, int] = {}
        self.num_rows = 0
        self.bad_numbers = 0
        self._width = 0
        self._findings: list[Finding] = []
        self._short_rows = 0
        self._lost_lines = 0
        self._is_truncated = False
        self._encoding_problem = ""

    def rows(self) -> Iterator[list[str]]:
        """Rows below the header, each at least as long as it; `columns` says what is where."""
        try:
            if not self.path.is_file():
                self._refuse("is not a file that can be read")
                return
            # The limit is the process's, and MindSpore's profiler takes it away.
            before = csv.field_size_limit(LONGEST_FIELD)
            try:
                with self.path.open("rb") as file:
                    yield from self._rows(file)
            finally:
                csv.field_size_limit(before)
        except OSError as error:
            self._refuse(f"cannot be read: {error.strerror or error}")

    def findings(self) -> tuple[Finding, ...]:
        """What was wrong with the table; ask when all rows are read."""
        found = list(self._findings)
        if self._encoding_problem:
            found.append(self._finding(self._encoding_problem, "names in it may be garbled"))
        if self._is_truncated:
            found.append(self._finding("ends within a line", "what came after it is missing"))
        for number, problem in (
            (self._short_rows, "too few columns"),
            (self._lost_lines, "a quote that does not end"),
            (self.bad_numbers, "no usable number"),
        ):
            if number:
                problem = f"has {number} line{'s' * (number > 1)} with {problem}"
                found.append(self._finding(problem, "they are left out of all figures"))
        return tuple(found)

    def _rows(self, file: BinaryIO) -> Iterator[list[str]]:
        ends_open = _ends_within_line(file)
        # One reader for the header too: a quoted name may hold a line break.
        reader = csv.reader(chain.from_iterable(self._blocks_of_lines(file)))
        if not self._read_header(reader):
            return
        held: list[str] | None = None
        for row in self._parsed(reader):
            if held is not None:
                yield from self._short_row(held)
                held = None
            if len(row) < self._width:
                # The last one may be cut off within a number: it is looked at later.
                held = row
                continue
            self.num_rows += 1
            yield row
        if held is None:
            return
        if ends_open:
            self._is_truncated = True
            return
        yield from self._short_row(held)

    def _read_header(self, reader: Reader) -> bool:
        header = next((row for row in self._parsed(reader) if row), None)
        if header is None:
            if not self._findings:
                self._refuse("is empty")
            return False
        names = [plain_name(name) for name in header]
        self._width = len(names)
        for field, spellings in self.kind.columns.items():
            place = next((names.index(name) for name in spellings if name in names), None)
            if place is not None:
                self.columns[field] = place
        missing = [field for field in self.kind.needed if field not in self.columns]
        if missing:
            wanted = " and ".join("/".join(self.kind.columns[field]) for field in missing)
            self._refuse(f"has no column {wanted}")
        return not missing

    def _short_row(self, row: list[str]) -> Iterator[list[str]]:
        """A row with all that is needed is used; MindSpore leaves out empty last fields."""
        if not row:
            return
        if len(row) <= max(self.columns[field] for field in self.kind.needed):
            self._short_rows += 1
            return
        self.num_rows += 1
        yield row + [""] * (self._width - len(row))

    def _parsed(self, reader: Reader) -> Iterator[list[str]]:
        """Rows; after an error, such as a quote that never ends, the reader goes on by itself."""
        while True:
            before = reader.line_num
            try:
                for row in reader:
                    yield row
                    before = reader.line_num
                return
            except csv.Error:
                self._lost_lines += reader.line_num - before

    def _blocks_of_lines(self, file: BinaryIO) -> Iterator[list[str]]:
        """Lines without their ends, those of about BLOCK_BYTES at a time."""
        decoder = codecs.getincrementaldecoder(self._encoding(file))(errors="replace")
        rest = ""
        while block := file.read(BLOCK_BYTES):
            text = decoder.decode(block)
            # The search costs nothing in text of 8-bit characters, which has no such one.
            if "\ufffd" in text and not self._encoding_problem:
                self._encoding_problem = "is not UTF-8"
            *lines, rest = (rest + text).split("\n")
            yield lines
            if len(rest) > MAX_LINE_CHARS:
                self._refuse(
                    "has a line of over a million characters, where reading ends",
                    "it is no such table",
                )
                return
        if rest:
            yield [rest]

    def _encoding(self, file: BinaryIO) -> str:
        start = file.read(2)
        file.seek(0)
        if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            self._encoding_problem = "is UTF-16 in place of UTF-8"
            return "utf-16"
        return "utf-8-sig"

    def _refuse(self, problem: str, why: str = "nothing of it is in the figures") -> None:
        self._findings.append(self._finding(problem, why))

    def _finding(self, problem: str, why: str) -> Finding:
        return Finding(
            name="profile-table",
            severity="warning",
            what=f"{self.path.name} {problem} (in {self.path.parent})",
            why=why,
            fix="copy the whole profile folder again, or profile again",
        )


def _ends_within_line(file: BinaryIO) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    last = file.read(1)
    file.seek(0)
    # The second byte of a line's end in UTF-16.
    return last not in (b"\n", b"\0")

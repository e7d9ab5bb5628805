"""The only MindRecord reader and writer; MindSpore is imported when rows move, not before.

- Rows come back in exactly the order asked for: a SubsetSampler over an explicit list of files
  keeps the order over all shards and allows repeats, and its numbering is the `.db` ROW_ID order,
  file after file (checked against MindSpore 2.10 in tests/data/test_mindrecord.py).
- Writing happens in a folder beside the target; the files get their names when they are complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.data.record_files import (
    DESCRIPTION_KEY,
    MindRecordSet,
    PathLike,
    find_shards,
    index_path,
    open_mindrecord,
    read_index_column,
    require_columns,
)
from tuner.data.staging import StagingFolder
from tuner.errors import BadInputError

__all__ = [
    "TOKEN_SCHEMA",
    "MindRecordSet",
    "MindRecordWriter",
    "RowSchema",
    "open_mindrecord",
    "read_index_column",
    "read_rows",
    "require_columns",
    "require_row_indices",
]

Row = Mapping[str, Any]
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class RowSchema:
    """The columns of a new file."""

    columns: Mapping[str, Mapping[str, Any]]
    """Column -> MindSpore's schema entry, for example {"type": "int32", "shape": [-1]}."""
    index_columns: tuple[str, ...] = ()
    """Scalar columns whose values also go into the index."""


TOKEN_SCHEMA = RowSchema(
    columns={
        "input_ids": {"type": "int32", "shape": [-1]},
        "labels": {"type": "int32", "shape": [-1]},
        "length": {"type": "int32"},
    },
    index_columns=("length",),
)
READER_THREADS = 2
MAX_SHARDS = 1000  # MindSpore's own limit
ROWS_PER_WRITE = 1000
FORBIDDEN_IN_FILE_NAMES = frozenset("\\/:*?\"<>|`&';")  # MindSpore's check_filename

# Page sizes. A file is never smaller than its header and one page, a row never larger than a page,
# and each page takes some 200 bytes of the header. So rows are held back until their sizes are
# known: small sets get small pages, large ones MindSpore's defaults (good for 2 TB a shard).
BYTES_HELD_BACK = 64 << 20
MIN_PAGE_BYTES, SMALL_SET_PAGE_BYTES, LARGE_SET_PAGE_BYTES = 32 << 10, 1 << 20, 32 << 20
MAX_PAGE_BYTES = 256 << 20
SMALL_SET_HEADER_BYTES, LARGE_SET_HEADER_BYTES = 96 << 10, 16 << 20


def read_rows(
    dataset: MindRecordSet, columns: Sequence[str], row_indices: Array | None = None
) -> Iterator[tuple[Array, ...]]:
    """Yield rows one by one; memory does not grow with their number.

    Args:
        dataset: From `open_mindrecord`.
        columns: Columns to read; a row is a tuple in this order.
        row_indices: int64 [M], values in [0, num_samples), any order over all shards, repeats
            allowed. None means every row, in order.

    Returns:
        An iterator of rows: one array per column, [length] for array columns, [] for scalars.

    Raises:
        BadInputError: If a column is missing, an index is out of range, or a file is broken.
    """
    require_columns(dataset, columns)
    if row_indices is not None:
        require_row_indices(dataset, row_indices)
    if dataset.num_samples == 0:
        return iter(())
    if row_indices is None:
        return _iterate(dataset, columns, None)
    # A SubsetSampler takes no more indices than there are rows, however often they repeat.
    starts = range(0, len(row_indices), dataset.num_samples)
    pieces = (row_indices[start : start + dataset.num_samples] for start in starts)
    return chain.from_iterable(_iterate(dataset, columns, piece) for piece in pieces)


def require_row_indices(dataset: MindRecordSet, row_indices: Array) -> None:
    """Raise a BadInputError if a row index, int64 [M], is out of range."""
    wrong = row_indices[(row_indices < 0) | (row_indices >= dataset.num_samples)]
    if len(wrong):
        raise BadInputError(
            f"{dataset.path} has no row {int(wrong[0])} (it has {dataset.num_samples} rows)",
            fix="use row numbers that were made for this file",
        )


def _iterate(
    dataset: MindRecordSet, columns: Sequence[str], row_indices: Array | None
) -> Iterator[tuple[Array, ...]]:
    import mindspore.dataset as msds

    order: dict[str, Any] = {"shuffle": False}
    if row_indices is not None:
        order = {"sampler": msds.SubsetSampler([int(index) for index in row_indices])}
    is_array = [column in dataset.blob_columns for column in columns]
    iterator = None
    try:
        rows = msds.MindDataset(
            [str(file) for file in dataset.files],
            columns_list=list(columns),
            num_parallel_workers=min(READER_THREADS, os.cpu_count() or 1),
            **order,
        )
        iterator = rows.create_tuple_iterator(num_epochs=1, output_numpy=True, do_copy=True)
        for row in iterator:
            yield tuple(map(_restore_dimension, row, is_array))
    except (RuntimeError, ValueError) as error:
        raise BadInputError(
            f"MindSpore cannot read {dataset.path}: {_first_error_line(error)}",
            fix="write the file again",
        ) from error
    finally:
        if iterator is not None:
            iterator.release()


def _restore_dimension(value: Array, is_array: bool) -> Array:
    """MindSpore gives an array without elements back as a scalar."""
    if is_array and value.ndim == 0 and value.dtype.kind in "if":
        return np.zeros(0, value.dtype)
    return value


class MindRecordWriter:
    """Writes rows to MindRecord files that appear only when they are complete and verified.

    A context manager. Leaving it with an exception, Ctrl-C included, removes what was written.

    Args:
        path: Name of the file; with several shards their numbers are appended to it.
        description: JSON values that travel in the header; `open_mindrecord` returns them.
        schema: The columns; by default those of `varseq-data prepare`.
        num_shards: Number of files, 1 to 1000. Rows are dealt out chunk by chunk.
        overwrite: Replace files of that name; they stay until the new ones are complete.

    Raises:
        BadInputError: If the name cannot be used, the output exists, the folder cannot be written
            to, the disk is full, or a row is larger than a page can be.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        description: Mapping[str, Any],
        schema: RowSchema = TOKEN_SCHEMA,
        num_shards: int = 1,
        overwrite: bool = False,
    ) -> None:
        self._path = Path(path)
        self._schema = schema
        self._description = json.dumps({DESCRIPTION_KEY: dict(description)}, sort_keys=True)
        self._num_shards = num_shards
        self._replaced = check_output(self._path, num_shards=num_shards, overwrite=overwrite)
        self._staging = StagingFolder(self._path)
        self._held_back: list[Row] = []
        self._held_back_bytes = self._largest_row_bytes = 0
        self._writer: Any = None
        self._overwrite = overwrite
        self._companions: list[str] = []
        self.num_rows = 0

    def __enter__(self) -> MindRecordWriter:
        self._staging.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        finished = False
        try:
            if kind is None:
                self._finish()
                finished = True
        finally:
            self._writer = None
            self._staging.close(keep_folders=finished)

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows; each maps every column of the schema to a scalar or an array [length]."""
        for row in rows:
            row_bytes = _largest_size(row)
            self._held_back.append(row)
            self._held_back_bytes += row_bytes
            self._largest_row_bytes = max(self._largest_row_bytes, row_bytes)
        self.num_rows += len(rows)
        if self._writer is not None or self._held_back_bytes > BYTES_HELD_BACK:
            self._write_held_back()

    def add_companion(self, name: str, content: str) -> None:
        """Put a text file beside the data, under the same rules: complete, or not there.

        Raises:
            BadInputError: If there is a file of that name and overwrite is False.
        """
        check_free(self._path.with_name(name), overwrite=self._overwrite)
        with self._mindspore_errors():
            (self._staging.path / name).write_text(content, encoding="utf-8")
        self._companions.append(name)

    def _write_held_back(self) -> None:
        rows, self._held_back = self._held_back, []
        with self._mindspore_errors():
            if self._writer is None:
                self._writer = self._open_writer()
            for start in range(0, len(rows), ROWS_PER_WRITE):
                self._writer.write_raw_data(
                    [dict(row) for row in rows[start : start + ROWS_PER_WRITE]]
                )

    def _open_writer(self) -> Any:
        from mindspore.mindrecord import FileWriter

        writer = FileWriter(str(self._staging.path / self._path.name), shard_num=self._num_shards)
        page_bytes, header_bytes = self._choose_page_and_header_bytes()
        writer.set_header_size(header_bytes)
        writer.set_page_size(page_bytes)
        columns = {name: dict(field) for name, field in self._schema.columns.items()}
        writer.add_schema(columns, self._description)
        if self._schema.index_columns:
            writer.add_index(list(self._schema.index_columns))
        return writer

    def _choose_page_and_header_bytes(self) -> tuple[int, int]:
        if self._held_back_bytes > BYTES_HELD_BACK:
            page_bytes, header_bytes = LARGE_SET_PAGE_BYTES, LARGE_SET_HEADER_BYTES
        else:
            page_bytes = max(MIN_PAGE_BYTES, min(self._held_back_bytes, SMALL_SET_PAGE_BYTES))
            header_bytes = SMALL_SET_HEADER_BYTES + 2 * len(self._description)
        page_bytes = max(page_bytes, self._largest_row_bytes)
        if page_bytes > MAX_PAGE_BYTES:
            raise BadInputError(
                f"the longest row needs up to {page_bytes} bytes, a MindRecord page holds "
                f"{MAX_PAGE_BYTES}",
                fix="cut the rows with a smaller maximum length",
            )
        return _next_power_of_two(page_bytes), _next_power_of_two(header_bytes)

    def _finish(self) -> None:
        self._write_held_back()
        if self.num_rows == 0:
            raise BadInputError(f"no row to write to {self._path}", fix="check the input")
        with self._mindspore_errors():
            self._writer.commit()
        names = _file_names(self._path.name, self._num_shards)
        written = open_mindrecord([self._staging.path / name for name in names])
        if written.num_samples != self.num_rows:
            raise BadInputError(
                f"{self._path}: {written.num_samples} of {self.num_rows} rows could be written",
                fix="check that every row has the columns and types of the schema",
            )
        indexes = [name + ".db" for name in names]
        self._staging.publish([*self._companions, *names, *indexes], remove=self._replaced)

    @contextmanager
    def _mindspore_errors(self) -> Iterator[None]:
        from mindspore.mindrecord.common.exceptions import MindRecordException

        try:
            yield
        except (RuntimeError, OSError, MindRecordException) as error:
            raise BadInputError(
                f"cannot write {self._path}: {_first_error_line(error)}",
                fix="check the free space of that disk, or name another place",
            ) from error


def check_output(path: Path, *, num_shards: int, overwrite: bool) -> tuple[Path, ...]:
    """Check that the files can be written under that name, before any work is done.

    Returns:
        The files that will be replaced: those of the set that has the name now, indexes first, so
        that a half-done replacement is seen as a missing index and never read as a mixture.

    Raises:
        BadInputError: If the name cannot be used, or is taken and overwrite is False.
    """
    if not 1 <= num_shards <= MAX_SHARDS:
        raise BadInputError(
            f"the number of shards must be 1 to {MAX_SHARDS} (got {num_shards})", fix="change it"
        )
    forbidden = FORBIDDEN_IN_FILE_NAMES & set(path.name)
    if forbidden or path.name != path.name.strip() or not path.name or path.name.endswith(".db"):
        raise BadInputError(
            f"MindRecord files cannot be called '{path.name}'",
            fix="use a name like data.mindrecord, without "
            + " ".join(sorted(FORBIDDEN_IN_FILE_NAMES)),
        )
    if path.is_dir():
        raise BadInputError(
            f"{path} is a folder", fix=f"name a file, e.g. {path / 'data.mindrecord'}"
        )
    new = [path.with_name(name) for name in _file_names(path.name, num_shards)]
    files = {path, *new, *find_shards(path)}
    taken = sorted(
        file for one in files for file in (index_path(one), one) if os.path.lexists(file)
    )
    for file in taken:
        check_free(file, overwrite=overwrite)
    return tuple(sorted(taken, key=lambda file: file.suffix != ".db"))


def check_free(path: Path, *, overwrite: bool) -> None:
    """Check that a file of that name may be written.

    Raises:
        BadInputError: If it is there already and overwrite is False.
    """
    if os.path.lexists(path) and not overwrite:
        raise BadInputError(
            f"{path} exists already", fix="name another output, or allow it with --overwrite"
        )


def _file_names(name: str, num_shards: int) -> list[str]:
    """The names that MindSpore's FileWriter gives: numbers padded to the width of the last."""
    if num_shards == 1:
        return [name]
    width = len(str(num_shards - 1))
    return [f"{name}{number:0{width}}" for number in range(num_shards)]


def _largest_size(row: Row) -> int:
    """Bytes that a row can take in a page: arrays are packed, at worst to 2 bits above raw."""
    sizes = (
        value.size * (value.itemsize + 0.25) if isinstance(value, np.ndarray) else len(str(value))
        for value in row.values()
    )
    return 64 + 32 * len(row) + int(sum(sizes))


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _first_error_line(error: BaseException) -> str:
    """The sentence for users in MindSpore's framed messages, which end in a C++ call stack."""
    lines = [line.strip() for line in str(error).splitlines()]
    marked = [line.removeprefix("[ERROR]").strip() for line in lines if line.startswith("[ERROR]")]
    plain = [line for line in lines if line and not line.startswith("-")]
    return (marked or plain or [type(error).__name__])[0].rstrip(".")

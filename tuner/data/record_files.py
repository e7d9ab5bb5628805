"""What a set of MindRecord files holds, read from their headers and indexes alone.

A MindRecord file starts with a little-endian uint64, the size of the JSON header that follows; the
rows stand behind it in pages. Beside it lies `<name>.db`, an SQLite index with one line per row:
where the row is, and the values of the scalar fields chosen as index columns. Both are enough to
say what is in the files and whether they are whole, in milliseconds and without MindSpore. What
was read of the indexes stays with the set (16 bytes a row), so that lengths are found without
reading them again.

Source: MindSpore 2.10 file writer, checked against MindDataset in tests/data/test_mindrecord.py.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tuner.data.record_index import IndexSource, IntArray, RowIndex, read_row_indexes
from tuner.errors import BadInputError

DESCRIPTION_KEY = "varseq"
MAX_HEADER_BYTES = 128 << 20  # MindSpore's own limit for set_header_size
# The first bytes of a few rows of each file are read: rows of the same lengths can differ in their
# values, and a copy that went wrong has holes. (MindSpore crashes on rows that are damaged.)
SAMPLED_ROWS = 64
SAMPLED_BYTES = 4096

PathLike = str | os.PathLike[str]

FileState = tuple[int, int]
"""Size of a file in bytes and when it was last changed, in ns of Unix time."""


def _no_rows() -> IntArray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class MindRecordSet:
    """One or several MindRecord files read as one table; row `i` means the same everywhere."""

    path: str
    """As the user gave it; several paths are joined by commas."""
    files: tuple[Path, ...]
    """The shards in order: rows of the first file come first."""
    num_samples: int
    rows_per_file: tuple[int, ...]
    columns: Mapping[str, str]
    """Column name -> MindRecord type: int32, int64, float32, float64, string or bytes."""
    blob_columns: tuple[str, ...]
    """Columns that hold arrays or bytes, in the order in which a row stores them."""
    index_columns: tuple[str, ...]
    """Scalar columns whose values stand in the index."""
    description: Mapping[str, Any]
    """What `varseq-data prepare` noted (vocab_size, tokenizer, ...); empty for other files."""
    fingerprint: str
    """sha256 over schema, index and a sample of the payload. File names are not part of it."""
    format_version: str = ""
    """Version of the file format, as the headers name it."""
    row_indexes: tuple[RowIndex, ...] = field(default=(), repr=False, compare=False)
    """What opening read of each file's index."""
    blob_starts: IntArray = field(default_factory=_no_rows, repr=False, compare=False)
    """int64 [N], read-only; of all row_indexes, which hold parts of it."""
    blob_bytes: IntArray = field(default_factory=_no_rows, repr=False, compare=False)
    """int64 [N], read-only; as blob_starts."""
    file_states: tuple[FileState, ...] = field(default=(), repr=False, compare=False)
    """Of each file when it was opened."""


def open_mindrecord(path: PathLike | Sequence[PathLike]) -> MindRecordSet:
    """Open MindRecord files for reading and check that they are whole.

    Args:
        path: A file; the common name of a sharded set (`data.mindrecord` for `data.mindrecord0`,
            `data.mindrecord1`, ...); one shard, which then means exactly that shard; a glob
            pattern; a folder; or a list of these.

    Raises:
        BadInputError: If nothing is there, an index or a shard is missing, a file is not
            MindRecord, is cut off or was renamed, or the files do not belong together.
    """
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if not paths:
        raise BadInputError("no MindRecord file given", fix="name at least one")
    files = tuple(file for one in paths for file in _find_files(os.fspath(one)))
    twice = [file for i, file in enumerate(files) if file in files[:i]]
    if twice:
        raise BadInputError(f"{twice[0]} is named twice", fix="name it once")
    headers = [_read_header(file) for file in files]
    schema = _schema_of(headers[0], files[0])
    for file, header in zip(files, headers, strict=True):
        if _schema_of(header, file)["schema"] != schema["schema"]:
            raise BadInputError(
                f"{file} and {files[0]} have different columns",
                fix="name only files that were written together",
            )
    indexes = read_row_indexes(list(map(_index_source, files, headers)))
    file_states = tuple(file_state(file.stat()) for file in files)
    digest = hashlib.sha256()
    for file, header, index in zip(files, headers, indexes, strict=True):
        _check_and_digest(file, header, index, digest)
    indexes, starts, sizes = _in_one_piece(indexes)
    return MindRecordSet(
        path=", ".join(os.fspath(one) for one in paths),
        files=files,
        num_samples=sum(index.num_rows for index in indexes),
        rows_per_file=tuple(index.num_rows for index in indexes),
        columns={name: entry["type"] for name, entry in schema["schema"].items()},
        blob_columns=tuple(schema.get("blob_fields") or ()),
        index_columns=tuple(_index_fields(headers[0])),
        description=_parse_description(schema.get("desc")),
        fingerprint=digest.hexdigest(),
        format_version=", ".join(sorted({str(header.get("version")) for header in headers})),
        row_indexes=indexes,
        blob_starts=starts,
        blob_bytes=sizes,
        file_states=file_states,
    )


def file_state(status: os.stat_result) -> FileState:
    """By which a change of a file is noticed."""
    return status.st_size, status.st_mtime_ns


def _in_one_piece(
    indexes: Sequence[RowIndex],
) -> tuple[tuple[RowIndex, ...], IntArray, IntArray]:
    """The same indexes as parts of one array of starts and one of sizes, and these."""
    if len(indexes) == 1:
        return tuple(indexes), indexes[0].blob_starts, indexes[0].blob_bytes
    starts = np.concatenate([index.blob_starts for index in indexes])
    sizes = np.concatenate([index.blob_bytes for index in indexes])
    for array in (starts, sizes):
        array.flags.writeable = False
    ends = np.cumsum([index.num_rows for index in indexes]).tolist()
    parts = [slice(end - index.num_rows, end) for index, end in zip(indexes, ends, strict=True)]
    cut = tuple(
        replace(index, blob_starts=starts[part], blob_bytes=sizes[part])
        for index, part in zip(indexes, parts, strict=True)
    )
    return cut, starts, sizes


def require_columns(dataset: MindRecordSet, columns: Sequence[str]) -> None:
    """Check that the columns are there.

    Raises:
        BadInputError: Naming the missing column and the columns there are, nearest first.
    """
    for column in columns:
        if column not in dataset.columns:
            near = difflib.get_close_matches(column, dataset.columns, n=len(dataset.columns))
            names = near + [name for name in sorted(dataset.columns) if name not in near]
            raise BadInputError(
                f"{dataset.path} has no column '{column}'",
                fix=f"its columns are: {', '.join(names)}",
            )


def read_index_column(dataset: MindRecordSet, column: str) -> IntArray:
    """Values of an integer index column, int64 [N] in row order; the rows are not read.

    Raises:
        BadInputError: If the index holds no integers under that name.
    """
    try:
        values = [index.index_values[column] for index in dataset.row_indexes]
        return np.concatenate(values)
    except (KeyError, ValueError) as error:
        raise BadInputError(
            f"the index of {dataset.path} holds no integers called '{column}'",
            fix=f"its columns are: {', '.join(dataset.index_columns) or 'none'}",
        ) from error


def index_path(file: Path) -> Path:
    """The index that belongs to a MindRecord file."""
    return file.with_name(file.name + ".db")


def _find_files(path: str) -> list[Path]:
    if os.path.isdir(path):
        return _find_in_folder(Path(path))
    if os.path.exists(path):
        return [Path(path)]
    shards = find_shards(Path(path))
    if shards:
        return shards
    matches = [Path(match) for match in glob.glob(path) if not match.endswith(".db")]
    if matches:
        return sorted(matches, key=_natural_order)
    raise BadInputError(f"no such MindRecord file: {path}", fix="check the path")


def find_shards(path: Path) -> list[Path]:
    """The files `data.mindrecord0`, `data.mindrecord1`, ... that were written as one set.

    Raises:
        BadInputError: If the set has lost one of them.
    """
    pattern = re.compile(re.escape(path.name) + r"\d+")
    candidates = path.parent.iterdir() if path.parent.is_dir() else iter(())
    for candidate in sorted(file for file in candidates if pattern.fullmatch(file.name)):
        names = _names_in_set(candidate)
        # `data.mindrecord2` may also be a file of its own that happens to end in a digit.
        if len(names) < 2 or candidate.name not in names:
            continue
        lost = [name for name in names if not path.with_name(name).exists()]
        if lost:
            raise BadInputError(
                f"{path}: the shard {lost[0]} is missing",
                fix="put it back, or name the shards that you want one by one",
            )
        return [path.with_name(name) for name in names]
    return []


def _names_in_set(file: Path) -> list[str]:
    try:
        return [Path(name).name for name in _read_header(file).get("shard_addresses") or ()]
    except BadInputError:
        return []


def _find_in_folder(folder: Path) -> list[Path]:
    files = [
        file
        for file in folder.iterdir()
        if file.is_file()
        and not file.name.startswith(".")
        and file.suffix != ".db"
        and (index_path(file).exists() or ".mindrecord" in file.name)
    ]
    if not files:
        raise BadInputError(
            f"no MindRecord file in the folder {folder}",
            fix="name a file that `varseq-data prepare` wrote, with its .db index beside it",
        )
    return sorted(files, key=_natural_order)


def _natural_order(file: Path) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", file.name)]


def _read_header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            text = stream.read(header_bytes) if header_bytes <= MAX_HEADER_BYTES else b""
        header = json.loads(text)
        if "schema" in header and "page_size" in header and "header_size" in header:
            return dict(header)
    except OSError as error:
        raise BadInputError(f"cannot read {file}: {error.strerror}", fix="check it") from error
    except (ValueError, TypeError):
        pass
    reason = "is empty" if file.stat().st_size == 0 else "is not a MindRecord file"
    raise BadInputError(f"{file} {reason}", fix="make one with `varseq-data prepare`")


def _schema_of(header: Mapping[str, Any], file: Path) -> dict[str, Any]:
    try:
        schema = dict(header["schema"][0])
        if all("type" in entry for entry in schema["schema"].values()):
            return schema
    except (IndexError, KeyError, TypeError, AttributeError):
        pass
    raise BadInputError(f"the header of {file} has no columns", fix="write the file again")


def _parse_description(text: object) -> dict[str, Any]:
    try:
        parsed = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        return {}
    ours = parsed.get(DESCRIPTION_KEY) if isinstance(parsed, dict) else None
    return dict(ours) if isinstance(ours, dict) else {}


def _index_fields(header: Mapping[str, Any]) -> dict[str, int]:
    """Index field -> number of its schema, in the order of the index."""
    fields = header.get("index_fields") or ()
    return {entry["index_field"]: entry["schema_id"] for entry in fields}


def _index_source(file: Path, header: Mapping[str, Any]) -> IndexSource:
    types = _schema_of(header, file)["schema"]
    try:
        return IndexSource(
            path=index_path(file),
            header_bytes=int(header["header_size"]),
            page_bytes=int(header["page_size"]),
            fields=tuple(
                (name, f"{name}_{schema_id}", types[name]["type"])
                for name, schema_id in _index_fields(header).items()
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(
            f"the header of {file} does not fit its columns", fix="write the file again"
        ) from error


def _check_and_digest(
    file: Path, header: Mapping[str, Any], index: RowIndex, digest: hashlib._Hash
) -> None:
    """Check one file against its index and add its content to the digest."""
    schema = _schema_of(header, file)
    digest.update(json.dumps([schema, header["page_size"]], sort_keys=True).encode())
    digest.update(index.fingerprint.encode())
    _check_name_and_size(file, index.file_name, index.end)
    _check_and_digest_rows(file, index, digest)


def _check_name_and_size(file: Path, name_in_index: str, end: int) -> None:
    # MindSpore refuses to read a file under another name than it was written with.
    if name_in_index != file.name:
        raise BadInputError(
            f"{file} was written as {name_in_index} and does not open under another name",
            fix="rename it and its .db back",
        )
    size = file.stat().st_size
    if size < end:
        raise BadInputError(
            f"{file} is cut off: {size} bytes, its index points to byte {end}",
            fix="copy it again or write it again",
        )


def _check_and_digest_rows(file: Path, index: RowIndex, digest: hashlib._Hash) -> None:
    """Each row starts with a little-endian uint64, the number of bytes that follow."""
    step = max(1, index.num_rows // SAMPLED_ROWS)
    with file.open("rb") as stream:
        for row in range(0, index.num_rows, step):
            start, num_bytes = int(index.blob_starts[row]), int(index.blob_bytes[row])
            stream.seek(start)
            data = stream.read(min(SAMPLED_BYTES, num_bytes))
            if int.from_bytes(data[:8], "little") != num_bytes - 8:
                raise BadInputError(
                    f"{file} is damaged at row {row} (byte {start})",
                    fix="copy it again or write it again",
                )
            digest.update(data)

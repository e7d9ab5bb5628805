"""Small MindRecord sets made on the spot; the shared text where a checkout has it beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuner.data.mindrecord import TOKEN_SCHEMA, MindRecordWriter, RowSchema

os.environ.setdefault("GLOG_v", "4")

WriteRows = Callable[..., Path]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = Path(__file__).resolve().parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared text is not beside this checkout")
    return folder


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Write a set whose row `i` holds `lengths[i]` times the token id `i`."""

    def write(lengths: Sequence[int], name: str = "data.mindrecord", **options: Any) -> Path:
        options = {"description": {"length_of": "input_ids"}, **options}
        with MindRecordWriter(tmp_path / name, **options) as writer:
            for i, length in enumerate(lengths):
                ids = np.full(length, i, np.int32)
                writer.write([{"input_ids": ids, "labels": ids, "length": length}])
        return tmp_path / name

    return write


@pytest.fixture
def write_foreign(tmp_path: Path) -> WriteRows:
    """Write a set as somebody else's script would: no description, columns as given."""

    def write(rows: Sequence[dict[str, Any]], schema: RowSchema = TOKEN_SCHEMA) -> Path:
        with MindRecordWriter(
            tmp_path / "foreign.mindrecord", description={}, schema=schema
        ) as writer:
            writer.write(rows)
        return tmp_path / "foreign.mindrecord"

    return write


@pytest.fixture
def write_plainly(tmp_path: Path) -> WriteRows:
    """Write with MindSpore's FileWriter and nothing of ours, in pages as small as it allows."""

    def write(
        schema: dict[str, Any],
        rows: Sequence[dict[str, Any]],
        name: str = "plain.mindrecord",
        num_shards: int = 1,
        index: Sequence[str] = (),
        parts: int = 1,
    ) -> Path:
        from mindspore.mindrecord import FileWriter

        writer = FileWriter(str(tmp_path / name), shard_num=num_shards)
        writer.set_header_size(128 << 10)
        writer.set_page_size(32 << 10)
        writer.add_schema(schema)
        if index:
            writer.add_index(list(index))
        for part in range(parts):
            if part:
                writer = FileWriter.open_for_append(str(tmp_path / name))
            writer.write_raw_data(list(rows[part::parts]))
            writer.commit()
        return tmp_path / name

    return write

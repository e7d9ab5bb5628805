"""Sets of millions of rows in many files, written fast.

MindSpore writes a few files; the others are copies of these under names of their own, with an
index that names them and headers that name all. To whoever reads the set, MindDataset included,
these are the files that FileWriter would have written, were it given the same rows for several.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np

NUM_ORIGINALS = 4
LONGEST = 4096
VOCABULARY = 32_000
ROWS_PER_WRITE = 5000
HEADER_BYTES, PAGE_BYTES = 256 << 10, 1 << 20


def write_many(
    path: Path, num_rows: int, num_shards: int, *, mean_tokens: int, times_longer: int = 1
) -> None:
    """Files path0, path1, ... of equal numbers of rows.

    Two int32 columns, no index; log-normal lengths of the given mean; with `times_longer` every
    row has so many times the tokens.
    """
    names = [f"{path.name}{number:0{len(str(num_shards - 1))}}" for number in range(num_shards)]
    originals = []
    for seed in range(min(NUM_ORIGINALS, num_shards)):
        originals.append(path.with_name(f"original{seed}"))
        write_one(originals[-1], num_rows // num_shards, seed, mean_tokens, times_longer)
    for number, name in enumerate(names):
        copy_as(originals[number % len(originals)], path.with_name(name), names)
    for original in originals:
        original.unlink()
        original.with_name(original.name + ".db").unlink()


def write_one(path: Path, num_rows: int, seed: int, mean_tokens: int, times_longer: int) -> None:
    from mindspore.mindrecord import FileWriter

    random = np.random.default_rng(seed)
    writer = FileWriter(str(path), shard_num=1)
    writer.set_header_size(HEADER_BYTES)
    writer.set_page_size(PAGE_BYTES)
    array = {"type": "int32", "shape": [-1]}
    writer.add_schema({"input_ids": array, "labels": array})
    lengths = random.lognormal(np.log(mean_tokens) - 0.5, 1, num_rows).astype(int)
    lengths = np.clip(lengths, 1, LONGEST) * times_longer
    starts = random.integers(0, LONGEST, num_rows)
    ids = random.integers(0, VOCABULARY, LONGEST * (times_longer + 1)).astype(np.int32)
    cuts = np.stack([starts, starts + lengths], axis=1).tolist()
    for start in range(0, num_rows, ROWS_PER_WRITE):
        rows = [ids[begin:end] for begin, end in cuts[start : start + ROWS_PER_WRITE]]
        writer.write_raw_data([{"input_ids": row, "labels": row} for row in rows])
    writer.commit()


def copy_as(original: Path, path: Path, names: list[str]) -> None:
    """Copy a file and its index as one of the set with these names."""
    shutil.copyfile(original, path)
    with path.open("r+b") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        text = json.dumps({**header, "shard_addresses": names}).encode()
        assert 8 + len(text) <= header["header_size"]
        stream.seek(0)
        stream.write(len(text).to_bytes(8, "little") + text)
    index = path.with_name(path.name + ".db")
    shutil.copyfile(original.with_name(original.name + ".db"), index)
    with closing(sqlite3.connect(index)) as connection, connection:
        connection.execute("UPDATE SHARD_NAME SET NAME = ?", [path.name])

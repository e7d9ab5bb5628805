from __future__ import annotations

import os

import numpy as np
import pytest

from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import open_mindrecord, read_rows
from tuner.errors import BadInputError

ARRAY = {"type": "int32", "shape": [-1]}


@pytest.fixture
def plain(write_plainly):
    def write(lengths, name="plain.mindrecord"):
        rows = [{"input_ids": np.ones(n, np.int32), "more": np.ones(2, np.int32)} for n in lengths]
        return open_mindrecord(write_plainly({"input_ids": ARRAY, "more": ARRAY}, rows, name))

    return write


def kept_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_second_scan_reads_no_row_and_finds_the_same(plain, tmp_path):
    cache = tmp_path / "new" / "folder"
    dataset = plain([3, 4, 5])
    first = scan_lengths(dataset, cache=cache)
    for file in dataset.files:
        file.unlink()
    second = scan_lengths(dataset, cache=cache)
    assert (first.is_from_cache, second.is_from_cache) == (False, True)
    assert second.tokens.tolist() == first.tokens.tolist() == [3, 4, 5]
    assert second.tokens.dtype == np.int32
    assert second.source == first.source == "headers"
    assert second.fingerprint == dataset.fingerprint
    assert second.source_text.endswith("(taken from the cache)")
    assert len(kept_in(cache)) == 1


def test_columns_and_sets_have_files_of_their_own(plain, tmp_path):
    cache = tmp_path / "cache"
    dataset = plain([3, 4, 5])
    for _ in range(2):
        assert scan_lengths(dataset, cache=cache).tokens.tolist() == [3, 4, 5]
        assert scan_lengths(dataset, "more", cache=cache).tokens.tolist() == [2, 2, 2]
    assert len(kept_in(cache)) == 2
    for file in dataset.files:
        file.unlink()
        file.with_name(file.name + ".db").unlink()
    other = plain([5, 4, 3])
    assert other.path == dataset.path
    found = scan_lengths(other, cache=cache)
    assert (found.is_from_cache, found.tokens.tolist()) == (False, [5, 4, 3])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"no JSON\n" + data,
        lambda data: b"[]\n" + data,
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:-4] + b"\x09\0\0\0",
        lambda data: data.replace(b"headers", b"index"),
        lambda data: data.replace(b"headers", b"nowhere"),
        lambda data: data.replace(b'"column": "input_ids"', b'"column": "more"'),
        lambda data: data.replace(b"lengths 1", b"lengths 0"),
        lambda data: b"\xff" * len(data),
    ],
)
def test_a_file_that_is_damaged_or_foreign_is_written_again(plain, tmp_path, damage):
    dataset = plain([3, 4, 5])
    scan_lengths(dataset, cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    found = scan_lengths(dataset, cache=tmp_path / "cache")
    assert not found.is_from_cache
    assert file.read_bytes() == good
    assert found.tokens.tolist() == [3, 4, 5]
    assert kept_in(tmp_path / "cache") == [file.name]


@pytest.mark.parametrize("obstacle", ["a file", "below a file", "a folder of that name"])
def test_a_folder_that_cannot_be_written_to_is_a_notice(plain, tmp_path, obstacle):
    dataset = plain([3, 4, 5])
    cache = tmp_path / "cache"
    if obstacle == "a folder of that name":
        scan_lengths(dataset, cache=cache)
        (file,) = cache.iterdir()
        file.unlink()
        file.mkdir()
    else:
        cache.write_text("")
        cache = cache / "deeper" if obstacle == "below a file" else cache
    said = []
    assert scan_lengths(dataset, cache=cache, notice=said.append).tokens.tolist() == [3, 4, 5]
    assert len(said) == 1 and "the lengths are not kept" in said[0]
    if obstacle == "a folder of that name":
        assert kept_in(cache) == [file.name]


@pytest.mark.skipif(os.geteuid() == 0, reason="everything is writable to root")
def test_a_read_only_folder_is_a_notice(plain, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    said = []
    dataset = plain([3, 4, 5])
    scan_lengths(dataset, cache=tmp_path / "cache", notice=said.append)
    assert len(said) == 1


def test_what_fails_is_not_kept(plain, tmp_path):
    with pytest.raises(BadInputError, match="no column"):
        scan_lengths(plain([3]), "ids", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_rows_read_through_are_kept_too(write_plainly, tmp_path):
    rows = [{"input_ids": np.ones(n, np.float32)} for n in (3, 5)]
    schema = {"input_ids": {"type": "float32", "shape": [-1]}}
    dataset = open_mindrecord(write_plainly(schema, rows))
    said = []
    for _ in range(2):
        found = scan_lengths(dataset, cache=tmp_path / "cache", notice=said.append)
        assert found.source == "rows"
        assert found.tokens.tolist() == [row[0].size for row in read_rows(dataset, ["input_ids"])]
    assert len(said) == 1


def test_lengths_of_the_index_need_no_copy(write_rows, tmp_path):
    dataset = open_mindrecord(write_rows([3, 4, 5]))
    for _ in range(2):
        found = scan_lengths(dataset, cache=tmp_path / "cache")
        assert (found.source, found.is_from_cache) == ("index", False)
    assert not (tmp_path / "cache").exists()

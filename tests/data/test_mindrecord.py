"""The reader and writer against MindSpore itself, plain Python, and broken files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tuner.data.mindrecord import (
    MindRecordWriter,
    RowSchema,
    open_mindrecord,
    read_rows,
    require_columns,
)
from tuner.errors import BadInputError

LENGTHS = [int(n) for n in np.random.default_rng(3).integers(1, 90, 50)]


def ids_of(rows):
    return [int(row[0][0]) for row in rows]


def visible_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("num_shards", [1, 3, 12])
def test_rows_come_back_in_the_order_asked_for_over_all_shards(write_rows, num_shards):
    dataset = open_mindrecord(write_rows(LENGTHS, num_shards=num_shards))
    in_order = ids_of(read_rows(dataset, ["input_ids"]))
    assert sorted(in_order) == list(range(50))
    wanted = np.array([49, 3, 3, 17, 0, 25, 33, 3, 49])
    assert ids_of(read_rows(dataset, ["input_ids"], wanted)) == [in_order[i] for i in wanted]
    shuffled = np.random.default_rng(0).permutation(50)
    assert ids_of(read_rows(dataset, ["input_ids"], shuffled)) == [in_order[i] for i in shuffled]


def test_columns_come_in_the_order_asked_for(write_rows):
    dataset = open_mindrecord(write_rows([4]))
    length, labels, ids = next(read_rows(dataset, ["length", "labels", "input_ids"]))
    assert (length.shape, int(length)) == ((), 4)
    assert labels.dtype == ids.dtype == np.int32
    assert labels.tolist() == ids.tolist() == [0, 0, 0, 0]


def test_header_says_what_was_written(write_rows):
    path = write_rows(LENGTHS, num_shards=3, description={"tokenizer": 'ü "x" \\', "pad_id": 0})
    dataset = open_mindrecord(path)
    assert dataset.num_samples == 50
    assert sum(dataset.rows_per_file) == 50
    assert [file.name for file in dataset.files] == [f"data.mindrecord{i}" for i in range(3)]
    assert dataset.columns == {"input_ids": "int32", "labels": "int32", "length": "int32"}
    assert dataset.index_columns == ("length",)
    assert dataset.description == {"tokenizer": 'ü "x" \\', "pad_id": 0}


def test_small_sets_make_small_files(write_rows):
    path = write_rows([3])
    assert path.stat().st_size < 400_000


def test_opening_does_not_import_mindspore(write_rows):
    path = write_rows([3])
    code = (
        "import sys; from tuner.data.mindrecord import open_mindrecord;"
        f"open_mindrecord({str(path)!r}); print('mindspore' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"


def test_empty_and_one_token_rows_keep_their_dimension(write_foreign):
    ids = [np.zeros(0, np.int32), np.array([7], np.int32)]
    dataset = open_mindrecord(
        write_foreign([{"input_ids": i, "labels": i, "length": len(i)} for i in ids])
    )
    assert [row[0].shape for row in read_rows(dataset, ["input_ids"])] == [(0,), (1,)]


def test_a_row_larger_than_the_smallest_page_is_written(write_foreign):
    ids = np.random.default_rng(0).integers(0, 2**31 - 1, 85_046).astype(np.int32)
    small = np.array([1, 2], np.int32)
    rows = [{"input_ids": i, "labels": -i, "length": len(i)} for i in (small, ids, small)]
    dataset = open_mindrecord(write_foreign(rows))
    back = list(read_rows(dataset, ["input_ids", "labels"]))
    np.testing.assert_array_equal(back[1][0], ids)
    np.testing.assert_array_equal(back[1][1], -ids)


def test_a_set_beyond_the_held_back_bytes_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("tuner.data.mindrecord.BYTES_HELD_BACK", 20_000)
    with MindRecordWriter(tmp_path / "big.mindrecord", description={}, num_shards=2) as writer:
        for i in range(100):
            ids = np.full(200, i, np.int32)
            writer.write([{"input_ids": ids, "labels": ids, "length": 200}])
    dataset = open_mindrecord(tmp_path / "big.mindrecord")
    assert sorted(ids_of(read_rows(dataset, ["input_ids"]))) == list(range(100))


def test_fingerprint_follows_the_content_and_not_the_name(write_rows, tmp_path):
    first = open_mindrecord(write_rows(LENGTHS, name="a.mindrecord")).fingerprint
    again = open_mindrecord(write_rows(LENGTHS, name="b c.mindrecord")).fingerprint
    other = open_mindrecord(write_rows(LENGTHS[::-1], name="d.mindrecord")).fingerprint
    (tmp_path / "moved").mkdir()
    for name in ("a.mindrecord", "a.mindrecord.db"):
        shutil.move(tmp_path / name, tmp_path / "moved" / name)
    assert open_mindrecord(tmp_path / "moved" / "a.mindrecord").fingerprint == first
    assert first == again != other


def test_fingerprint_sees_other_values_in_rows_of_the_same_shape(tmp_path):
    prints = []
    for value in (5, 6):
        ids = np.full(20, value, np.int32)
        with MindRecordWriter(tmp_path / f"{value}.mindrecord", description={}) as writer:
            writer.write([{"input_ids": ids, "labels": ids, "length": 20}])
        prints.append(open_mindrecord(tmp_path / f"{value}.mindrecord").fingerprint)
    assert prints[0] != prints[1]


def test_every_way_to_name_a_set_opens_it(write_rows, tmp_path):
    base = write_rows(LENGTHS, num_shards=12)
    whole = open_mindrecord(base)
    assert open_mindrecord(tmp_path).fingerprint == whole.fingerprint
    assert open_mindrecord(f"{base}*").fingerprint == whole.fingerprint
    assert open_mindrecord(list(whole.files)).fingerprint == whole.fingerprint
    assert open_mindrecord(str(base) + "[0-9]*").num_samples == 50


def test_one_shard_means_exactly_that_shard(write_rows):
    base = write_rows(LENGTHS, num_shards=3)
    whole = open_mindrecord(base)
    second = open_mindrecord(f"{base}1")
    assert second.num_samples == whole.rows_per_file[1]
    rows = list(read_rows(second, ["input_ids"]))
    start = whole.rows_per_file[0]
    stop = start + whole.rows_per_file[1]
    assert ids_of(rows) == ids_of(read_rows(whole, ["input_ids"]))[start:stop]


def test_a_file_that_ends_in_a_digit_is_not_taken_for_a_shard(write_rows, tmp_path):
    write_rows([1, 2], name="data.mindrecord2")
    with pytest.raises(BadInputError, match="no such MindRecord file"):
        open_mindrecord(tmp_path / "data.mindrecord")


def test_more_shards_than_rows(write_rows):
    dataset = open_mindrecord(write_rows([3, 4], num_shards=5))
    assert sorted(dataset.rows_per_file) == [0, 0, 0, 1, 1]
    assert ids_of(read_rows(dataset, ["input_ids"], np.array([1, 0, 1]))) == [1, 0, 1]


def test_names_with_spaces_and_other_scripts(write_rows, tmp_path):
    (tmp_path / "dé r 'q&;#?%").mkdir()
    path = write_rows(LENGTHS, name="dé r 'q&;#?%/数据 ü#%.mindrecord")
    dataset = open_mindrecord(path)
    assert ids_of(read_rows(dataset, ["input_ids"])) == list(range(50))


class TestBrokenFiles:
    def break_it(self, path: Path, how: str) -> Path:
        index = Path(f"{path}.db")
        breakers = {
            "no index": lambda: index.unlink(),
            "text": lambda: path.write_text("just a text, longer than eight bytes"),
            "empty": lambda: path.write_bytes(b""),
            "cut off": lambda: os.truncate(path, 140_000),
            "cut in the header": lambda: os.truncate(path, 100),
            "index is text": lambda: index.write_text("not sqlite " * 100),
            "index is empty": lambda: index.write_bytes(b""),
        }
        if how == "renamed":
            index.rename(path.with_name("new.mindrecord.db"))
            return path.rename(path.with_name("new.mindrecord"))
        if how == "empty folder":
            path.with_name("empty").mkdir()
            return path.with_name("empty")
        if how == "missing":
            return path.with_name("nothing.mindrecord")
        breakers[how]()
        return path

    @pytest.mark.parametrize(
        ("how", "says"),
        [
            ("missing", "no such MindRecord file"),
            ("no index", r"the index .*\.db is missing"),
            ("text", "is not a MindRecord file"),
            ("empty", "is empty"),
            ("cut off", "is cut off"),
            ("cut in the header", "is not a MindRecord file"),
            ("index is text", "is not the index of a MindRecord file"),
            ("index is empty", "is not the index of a MindRecord file"),
            ("renamed", "was written as data.mindrecord"),
            ("empty folder", "no MindRecord file in the folder"),
        ],
    )
    def test_each_is_said_in_one_line(self, write_rows, how, says):
        path = write_rows(LENGTHS * 20)
        with pytest.raises(BadInputError, match=says) as caught:
            open_mindrecord(self.break_it(path, how))
        assert "\n" not in str(caught.value)

    def test_a_file_named_twice_is_refused(self, write_rows):
        path = write_rows([1])
        with pytest.raises(BadInputError, match="is named twice"):
            open_mindrecord([path, path])

    def test_a_missing_shard_is_named(self, write_rows):
        base = write_rows(LENGTHS, num_shards=3)
        Path(f"{base}1").unlink()
        with pytest.raises(BadInputError, match=r"shard data\.mindrecord1 is missing"):
            open_mindrecord(base)
        assert open_mindrecord([f"{base}0", f"{base}2"]).num_samples > 0

    def test_files_of_different_columns_do_not_open_together(self, write_rows, write_foreign):
        other = write_foreign(
            [{"text": "a"}], schema=RowSchema(columns={"text": {"type": "string"}})
        )
        with pytest.raises(BadInputError, match="different columns"):
            open_mindrecord([write_rows([1]), other])

    @pytest.mark.parametrize("hole", [b"\0", b"\xff"])
    def test_a_hole_in_the_rows_is_found_before_mindspore_crashes_on_it(self, write_rows, hole):
        path = write_rows(LENGTHS * 20)
        header_bytes = 131_072
        with path.open("r+b") as stream:
            stream.seek(header_bytes + 40_000)
            stream.write(hole * 20_000)
        with pytest.raises(BadInputError, match=r"is damaged at row \d+"):
            open_mindrecord(path)

    def test_what_mindspore_cannot_read_is_one_line(self, write_rows, tmp_path):
        dataset = open_mindrecord(write_rows(LENGTHS))
        Path(f"{tmp_path}/data.mindrecord.db").unlink()
        with pytest.raises(BadInputError, match="MindSpore cannot read") as caught:
            list(read_rows(dataset, ["input_ids"]))
        assert "\n" not in str(caught.value)

    def test_a_missing_column_names_the_nearest_first(self, write_rows):
        with pytest.raises(BadInputError, match="no column 'label'; its columns are: labels"):
            require_columns(open_mindrecord(write_rows([1])), ["label"])

    def test_a_row_number_out_of_range_is_named(self, write_rows):
        dataset = open_mindrecord(write_rows([1, 2]))
        with pytest.raises(BadInputError, match="no row 2 "):
            read_rows(dataset, ["input_ids"], np.array([0, 2]))


class TestWriterLeavesNothingHalfDone:
    def test_an_exception_removes_what_was_written(self, tmp_path):
        ids = np.zeros(3, np.int32)
        with (
            pytest.raises(KeyboardInterrupt),
            MindRecordWriter(tmp_path / "new" / "deep" / "x.mindrecord", description={}) as writer,
        ):
            writer.write([{"input_ids": ids, "labels": ids, "length": 3}] * 10)
            raise KeyboardInterrupt
        assert visible_files(tmp_path) == []

    def test_no_rows_is_an_error(self, tmp_path):
        with (
            pytest.raises(BadInputError, match="no row"),
            MindRecordWriter(tmp_path / "x.mindrecord", description={}),
        ):
            pass
        assert visible_files(tmp_path) == []

    def test_rows_that_mindspore_drops_are_an_error(self, tmp_path):
        ids = np.zeros(3, np.int64)
        good = ids.astype(np.int32)
        with (
            pytest.raises(BadInputError, match="1 of 2 rows"),
            MindRecordWriter(tmp_path / "x.mindrecord", description={}) as writer,
        ):
            writer.write([{"input_ids": ids, "labels": ids, "length": 3}])
            writer.write([{"input_ids": good, "labels": good, "length": 3}])
        assert visible_files(tmp_path) == []

    def test_existing_output_is_kept_unless_overwriting(self, write_rows, tmp_path):
        path = write_rows([1, 2, 3], num_shards=3)
        with pytest.raises(BadInputError, match="exists already"):
            write_rows([4])
        assert open_mindrecord(path).num_samples == 3
        write_rows([4], overwrite=True)
        assert visible_files(tmp_path) == ["data.mindrecord", "data.mindrecord.db"]
        write_rows([5, 5], overwrite=True, num_shards=2)
        assert open_mindrecord(path).num_samples == 2
        assert visible_files(tmp_path) == [
            f"data.mindrecord{i}{end}" for i in range(2) for end in ("", ".db")
        ]

    def test_overwriting_leaves_a_neighbour_that_ends_in_a_digit(self, write_rows, tmp_path):
        write_rows([1, 2], name="data.mindrecord2")
        write_rows([4])
        write_rows([4, 4], overwrite=True)
        assert open_mindrecord(tmp_path / "data.mindrecord2").num_samples == 2

    def test_a_failed_overwrite_keeps_the_old_files(self, write_rows, tmp_path):
        path = write_rows([1, 2, 3])
        with (
            pytest.raises(RuntimeError, match="ours"),
            MindRecordWriter(path, description={}, overwrite=True),
        ):
            raise RuntimeError("ours")
        assert open_mindrecord(path).num_samples == 3
        assert visible_files(tmp_path) == ["data.mindrecord", "data.mindrecord.db"]

    @pytest.mark.parametrize("name", ["a:b.mindrecord", "a|b", " a", "x.db", "q'"])
    def test_names_that_mindspore_refuses_are_refused_first(self, tmp_path, name):
        with pytest.raises(BadInputError, match="cannot be called"):
            MindRecordWriter(tmp_path / name, description={})

    def test_a_folder_below_a_file_is_not_writable(self, tmp_path):
        (tmp_path / "file").write_text("")
        with (
            pytest.raises(BadInputError, match="cannot write to the folder"),
            MindRecordWriter(tmp_path / "file" / "x.mindrecord", description={}),
        ):
            pass

    def test_sigkill_leaves_only_a_hidden_folder_that_the_next_run_removes(self, tmp_path):
        target = tmp_path / "x.mindrecord"
        code = (
            "import sys, time, numpy as np\n"
            "from tuner.data.mindrecord import MindRecordWriter\n"
            f"with MindRecordWriter({str(target)!r}, description={{}}) as writer:\n"
            "    writer.write([{'input_ids': np.zeros(2, np.int32)}])\n"
            "    print('ready', flush=True); time.sleep(60)\n"
        )
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert [name[:14] for name in visible_files(tmp_path)] == [".x.mindrecord."]
        ids = np.zeros(3, np.int32)
        with MindRecordWriter(target, description={}) as writer:
            writer.write([{"input_ids": ids, "labels": ids, "length": 3}])
        assert visible_files(tmp_path) == ["x.mindrecord", "x.mindrecord.db"]

    def test_a_full_disk_is_one_line(self, tmp_path):
        code = (
            "import resource, sys, numpy as np\n"
            "from tuner.data.mindrecord import MindRecordWriter\n"
            "import mindspore.mindrecord\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
            f"with MindRecordWriter({str(tmp_path / 'x.mindrecord')!r}, description={{}}) as w:\n"
            "    for i in range(300):\n"
            "        ids = np.full(1000, i, np.int32)\n"
            "        w.write([{'input_ids': ids, 'labels': ids, 'length': 1000}])\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 1
        assert "BadInputError: cannot write" in done.stderr
        assert visible_files(tmp_path) == []


def test_reading_a_few_rows_of_many_is_fast(write_rows):
    dataset = open_mindrecord(write_rows([5] * 3000, num_shards=2))
    start = time.perf_counter()
    assert len(list(read_rows(dataset, ["input_ids"], np.arange(10)))) == 10
    assert time.perf_counter() - start < 5

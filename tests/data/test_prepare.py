from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tuner.data.content import check_content
from tuner.data.demo import DemoOptions, make_demo, sample_rows
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import open_mindrecord, read_rows
from tuner.data.prepare import PrepareOptions, prepare
from tuner.errors import BadInputError


def no_progress(stage, done, total):
    assert 0 <= done <= total


@pytest.fixture
def options(tmp_path):
    lines = [
        {"text": "abcdefgh"},
        {"prompt": "q", "completion": "a"},
        {"what": 1},
        {"text": " "},
        {"messages": [{"role": "user", "content": "u"}]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return PrepareOptions(
        inputs=(str(tmp_path / "in.jsonl"),),
        out=tmp_path / "out" / "data.mindrecord",
        tokenizer="bytes",
        max_length=6,
    )


def rows_of(path):
    rows = read_rows(open_mindrecord(path), ["input_ids", "labels", "length"])
    return [(ids.tolist(), labels.tolist(), int(length)) for ids, labels, length in rows]


def test_rows_are_cut_counted_and_written(options):
    summary = prepare(options, no_progress)
    assert rows_of(options.out) == [
        ([*b"abcdef"], [*b"abcdef"], 6),
        ([*b"q\na", 256], [-100, -100, ord("a"), 256], 4),
        ([ord("u"), 256], [-100, -100], 2),
    ]
    assert (summary.rows_read, summary.rows_written, summary.rows_truncated) == (5, 3, 1)
    assert summary.skipped == {"unknown format, keys: what": 1, "no text": 1}
    assert (summary.num_tokens, summary.num_label_tokens, summary.longest) == (12, 8, 6)
    assert summary.rows_without_labels == 1
    assert summary.files[0].formats == {"text": 1, "prompt+completion": 1, "messages": 1}


def test_the_header_tells_trainers_what_they_need(options):
    prepare(options, no_progress)
    description = open_mindrecord(options.out).description
    expected = {
        "vocab_size": 258,
        "pad_id": 257,
        "end_id": 256,
        "max_length": 6,
        "ignored_label": -100,
        "tokenizer": "bytes",
        "length_of": "input_ids",
    }
    assert expected.items() <= description.items()


def test_prompts_are_trained_on_when_asked(options):
    summary = prepare(replace(options, train_on_prompt=True), no_progress)
    assert summary.num_label_tokens == summary.num_tokens == 12


def test_shards_hold_all_rows(options):
    prepare(replace(options, num_shards=2), no_progress)
    assert sorted(length for _, _, length in rows_of(options.out)) == [2, 4, 6]
    assert len(open_mindrecord(options.out).files) == 2


def test_folding_keeps_lengths_and_frequent_ids(options):
    plain = PrepareOptions(**{**vars(options), "out": options.out.with_name("plain.mindrecord")})
    prepare(plain, no_progress)
    summary = prepare(replace(options, vocab_limit=4), no_progress)
    # Bytes of the cut input: the end comes twice, "a" twice, all others once; the smallest of
    # those ("\n") is the third. Everything else is id 3.
    new = {256: 1, ord("a"): 0, ord("\n"): 2}
    for (old_ids, old_labels, _), (ids, labels, _) in zip(
        rows_of(plain.out), rows_of(options.out), strict=True
    ):
        assert ids == [new.get(i, 3) for i in old_ids]
        assert labels == [-100 if i == -100 else new.get(i, 3) for i in old_labels]
    assert (summary.vocab_size, summary.num_folded_tokens) == (4, 12 - 5)
    description = open_mindrecord(options.out).description
    assert description["kept_token_ids"] == [97, 256, 10]
    assert (description["unknown_id"], description["end_id"]) == (3, 1)
    assert 0 <= description["pad_id"] < 4


def test_a_trained_tokenizer_is_saved_beside_the_output(options):
    prepare(replace(options, tokenizer="train:270"), no_progress)
    names = sorted(path.name for path in options.out.parent.iterdir())
    assert names == ["data.mindrecord", "data.mindrecord.db", "tokenizer.json"]
    with pytest.raises(BadInputError, match=r"tokenizer\.json exists already"):
        prepare(
            replace(options, tokenizer="train:270", out=options.out.with_name("b.mindrecord")),
            no_progress,
        )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_length": 1}, "--max-length must be at least 2"),
        ({"vocab_limit": 2}, "--vocab-limit must be at least 3"),
        ({"num_shards": 0}, "number of shards must be 1 to 1000"),
        ({"num_shards": 1001}, "number of shards must be 1 to 1000"),
        ({"tokenizer": "train:x"}, "'x' is not a number of ids"),
        ({"tokenizer": "train:9"}, "at least 258 ids"),
        ({"tokenizer": "nothing.json"}, "cannot read the tokenizer nothing.json"),
        ({"inputs": ("nothing.jsonl",)}, "no such file: nothing.jsonl"),
        ({"end_token": "</s>"}, "has no token '</s>'"),
    ],
)
def test_bad_options_leave_nothing_behind(options, change, says):
    with pytest.raises(BadInputError, match=says):
        prepare(replace(options, **change), no_progress)
    assert not options.out.parent.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        (b"", "no usable row .it is empty"),
        (b'{"x": 1}\n{"x": 2}\n', "no usable row .2 x unknown format, keys: x"),
    ],
)
def test_bad_files_leave_nothing_behind(options, tmp_path, content, says):
    (tmp_path / "bad.jsonl").write_bytes(content)
    inputs = (*options.inputs, str(tmp_path / "bad.jsonl"))
    with pytest.raises(BadInputError, match=says):
        prepare(replace(options, inputs=inputs), no_progress)
    assert not options.out.parent.exists()


def test_bad_input_keeps_an_older_output(options, tmp_path):
    prepare(options, no_progress)
    before = rows_of(options.out)
    (tmp_path / "in.jsonl").write_text("{")
    with pytest.raises(BadInputError):
        prepare(replace(options, overwrite=True), no_progress)
    assert rows_of(options.out) == before


def test_one_giant_row_without_a_limit(options, tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "word " * 200_000}))
    summary = prepare(replace(options, max_length=None), no_progress)
    assert summary.longest == 1_000_001
    assert scan_lengths(open_mindrecord(options.out)).tokens.tolist() == [1_000_001]


def test_part_of_the_shared_mix(shared_data, tmp_path):
    """Real rows in all four formats, checked against the library called directly."""
    from tokenizers import Tokenizer

    names = ["chat", "pairs", "instructions", "documents"]
    texts = []
    for name in names:
        with gzip.open(shared_data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in islice(lines, 40)]
        texts += map(plain_text, rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = shared_data / "tokenizers" / "gpt2-bpe" / "tokenizer.json"
    options = PrepareOptions(
        inputs=tuple(str(tmp_path / f"{name}.jsonl") for name in names),
        out=tmp_path / "mix.mindrecord",
        tokenizer=str(tokenizer),
        max_length=512,
    )
    summary = prepare(options, no_progress)
    assert summary.rows_written == 160
    reference = Tokenizer.from_file(str(tokenizer)).encode_batch(texts)
    for (ids, _, _), encoding in zip(rows_of(options.out), reference, strict=True):
        assert ids == [*encoding.ids, 50256][:512]
    check_content(open_mindrecord(options.out), vocab_size=50257)


def plain_text(row):
    if "messages" in row:
        parts = [turn["content"] for turn in row["messages"]]
    else:
        keys = ("prompt", "completion", "instruction", "input", "output", "text")
        parts = [row.get(key, "") for key in keys]
    text = ""
    for part in filter(None, parts):
        seam_is_open = text and not text[-1].isspace() and not part[0].isspace()
        text += ("\n" if seam_is_open else "") + part
    return text


SOURCE = '''"""About this module: it has a docstring of its own."""
import os

class Thing(object):
    """A thing that is documented here."""

    def method(self, value):
        """Say what the method does."""
        if value:
            return value + 1
        return None

def undocumented(first, second):
    return first + second + len(os.sep)

def tiny(): pass
'''


class TestDemo:
    def test_rows_come_from_functions_classes_and_docstrings(self, tmp_path):
        (tmp_path / "a.py").write_text(SOURCE)
        (tmp_path / "test").mkdir()
        (tmp_path / "test" / "b.py").write_text(SOURCE.replace("value", "other"))
        (tmp_path / "broken.py").write_text("def f(:")
        rows = sorted(sample_rows(tmp_path, 100), key=lambda row: "".join(row.values()))
        assert rows == [
            {"text": "About this module: it has a docstring of its own."},
            {"text": 'class Thing(object):\n    """A thing that is documented here."""'},
            {
                "prompt": 'def method(self, value):\n    """Say what the method does."""\n',
                "completion": "    if value:\n        return value + 1\n    return None",
            },
            {"text": "def undocumented(first, second):\n    return first + second + len(os.sep)"},
        ]

    def test_the_demo_is_complete_and_the_same_each_time(self, tmp_path, monkeypatch):
        library = tmp_path / "library"
        library.mkdir()
        for i in range(30):
            (library / f"m{i}.py").write_text(SOURCE.replace("value", f"value{i}"))
        monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
        prints = set()
        for name in ("one", "two"):
            folder = tmp_path / name
            options = DemoOptions(folder=folder, num_rows=20, max_length=30, vocab_size=300)
            summary = make_demo(options, no_progress)
            assert sorted(path.name for path in folder.iterdir()) == [
                "data.mindrecord",
                "data.mindrecord.db",
                "rows.jsonl",
                "tokenizer.json",
            ]
            assert summary.rows_written == 20
            dataset = open_mindrecord(folder)
            check_content(dataset, vocab_size=dataset.description["vocab_size"])
            prints.add((dataset.fingerprint, (folder / "tokenizer.json").read_bytes()))
        assert len(prints) == 1
        with pytest.raises(BadInputError, match="exists already"):
            make_demo(DemoOptions(folder=tmp_path / "one"), no_progress)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"num_rows": 0}, "--rows must be at least 1"),
            ({"max_length": 1}, "--max-length must be at least 2"),
            ({"folder": Path(__file__)}, "is not a folder"),
        ],
    )
    def test_bad_options_are_named(self, tmp_path, change, says):
        with pytest.raises(BadInputError, match=says):
            make_demo(DemoOptions(**{"folder": tmp_path / "demo", **change}), no_progress)
        assert not (tmp_path / "demo").exists()


def test_labels_equal_ids_where_they_are_trained_on(options):
    prepare(options, no_progress)
    for ids, labels, _ in rows_of(options.out):
        ids, labels = np.array(ids), np.array(labels)
        assert ((labels == ids) | (labels == -100)).all()

from __future__ import annotations

import gzip
import json

import pytest

from tuner.data.input_files import FileRows, find_input_files
from tuner.data.rows import SkippedRow, TextRow, parse_row, parse_text
from tuner.errors import BadInputError


def parts(row: TextRow) -> list[tuple[str, bool]]:
    starts = (0, *row.part_ends[:-1])
    texts = [row.text[a:b] for a, b in zip(starts, row.part_ends, strict=True)]
    return list(zip(texts, row.part_is_trained, strict=True))


@pytest.mark.parametrize(
    ("value", "row_format", "expected"),
    [
        ({"text": "a b"}, "text", [("a b", True)]),
        (
            {"prompt": "q?", "completion": "a"},
            "prompt+completion",
            [("q?\n", False), ("a", True)],
        ),
        (
            {"prompt": "def f():\n", "completion": "    return"},
            "prompt+completion",
            [("def f():\n", False), ("    return", True)],
        ),
        (
            {"instruction": "do", "input": "", "output": "done"},
            "instruction+input+output",
            [("do\n", False), ("done", True)],
        ),
        (
            {"instruction": "do", "input": "it", "output": "done"},
            "instruction+input+output",
            [("do\n", False), ("it\n", False), ("done", True)],
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "u"},
                    {"role": "assistant", "content": "a"},
                    {"role": "user", "content": "v"},
                    {"role": "assistant", "content": None},
                ]
            },
            "messages",
            [("s\n", False), ("u\n", False), ("a\n", True), ("v", False)],
        ),
        (
            {"text": "x", "messages": [{"role": "user", "content": "u"}]},
            "messages",
            [("u", False)],
        ),
        ({"text": "half \ud83d"}, "text", [("half ?", True)]),
    ],
)
def test_formats_and_their_parts(value, row_format, expected):
    row = parse_row(value)
    assert isinstance(row, TextRow)
    assert row.row_format == row_format
    assert parts(row) == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": 1, "b": 2}, "unknown format, keys: a, b"),
        ({}, "unknown format, keys: none"),
        ({str(i): i for i in range(9)}, "unknown format, keys: 0, 1, 2, 3, 4, 5, ..."),
        ([1], "not an object but a list"),
        (None, "not an object but null"),
        (3, "not an object but a number"),
        ({"text": 3}, "text is not text but a number"),
        ({"text": "  \n"}, "no text"),
        ({"prompt": None, "completion": None}, "no text"),
        ({"messages": "hi"}, "messages is not a list of objects"),
        (
            {"messages": [{"role": "user", "content": [{}]}]},
            "the content of a message is not text",
        ),
    ],
)
def test_rows_that_cannot_be_used_say_why(value, reason):
    assert parse_row(value) == SkippedRow(reason=reason)


LINES = ["first row", "second ü row"]


def write_file(folder, name, data):
    (folder / name).write_bytes(data)
    return folder / name


def texts_of(file, **options):
    return [row.text for row in FileRows(file, **options) if isinstance(row, TextRow)]


JSON_LINES = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in LINES)
AS_LIST = json.dumps([{"text": text} for text in LINES])
BOM = b"\xef\xbb\xbf"


def zipped(data: bytes) -> bytes:
    """The same bytes at any time: they become test names, which all workers must agree on."""
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", JSON_LINES.encode()),
        ("a.JSONL", BOM + JSON_LINES.replace("\n", "\r\n\r\n").encode()),
        ("a.jsonl", JSON_LINES.rstrip("\n").encode()),
        ("a.jsonl.gz", zipped(JSON_LINES.encode())),
        ("a.json", BOM + AS_LIST.encode()),
        ("a.json", b'{"version": 1, "data": ' + AS_LIST.encode() + b"}"),
        ("a.txt", BOM + "\r\n".join(LINES).encode() + b"\r\n\r\n"),
    ],
)
def test_every_kind_of_file_gives_its_rows(tmp_path, name, data):
    assert texts_of(write_file(tmp_path, name, data)) == LINES


def test_units_of_text_files(tmp_path):
    file = write_file(tmp_path, "a.txt", b"one\r\ntwo\r\n\r\n \r\nthree\n")
    assert texts_of(file) == ["one", "two", "three"]
    assert texts_of(file, text_unit="paragraph") == ["one\ntwo", "three"]
    assert texts_of(file, text_unit="file") == ["one\ntwo\n\n \nthree"]


def test_an_unusual_line_separator_does_not_break_a_json_line(tmp_path):
    file = write_file(tmp_path, "a.jsonl", '{"text": "a\u2028b\x85c"}\n'.encode())
    assert texts_of(file) == ["a\u2028b\x85c"]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', r"a\.jsonl, line 3 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl, line 2 is not UTF-8"),
        ("a.json", b'[{"text": "a"},\n {"text"}]', r"a\.json, line 2 is not JSON"),
        ("a.json", b'{"text": "a"}', "neither a list of rows"),
        ("a.jsonl.gz", JSON_LINES.encode(), "cannot read .*a.jsonl.gz: Not a gzipped file"),
        ("a.jsonl.gz", zipped(JSON_LINES.encode() * 99)[:-9], "not a whole gzip file"),
        ("a.jsonl.gz", zipped(b"x" * 9999)[:12] + b"\xff" * 99, "not a whole gzip file"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON: nested too deeply"),
        ("a.txt", b"good\n\xfe\n", "line 2 is not UTF-8"),
    ],
)
def test_unreadable_files_name_file_and_line(tmp_path, name, data, says):
    with pytest.raises(BadInputError, match=says) as caught:
        texts_of(write_file(tmp_path, name, data))
    assert "\n" not in str(caught.value)


def test_folders_are_searched_below_and_sorted(tmp_path):
    for name in ("b.jsonl", "sub/a.txt", "sub/.hidden.txt", "x.csv", ".git/a.txt", "ü z.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = find_input_files([str(tmp_path)])
    names = [file.relative_to(tmp_path).as_posix() for file in found.files]
    assert names == ["b.jsonl", "sub/a.txt", "ü z.json"]
    assert found.num_ignored == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no.jsonl", "no such file"),
        ("x.csv", "unknown kind"),
        ("empty", "holds no file that ends"),
    ],
)
def test_inputs_that_are_not_there_or_unknown(tmp_path, name, says):
    (tmp_path / "x.csv").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInputError, match=says):
        find_input_files([str(tmp_path / name)])


def test_plain_text_without_text_is_skipped():
    assert parse_text(" \n") == SkippedRow(reason="no text")

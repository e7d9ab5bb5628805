"""Reading and writing YAML: round trips, the strict dialect, files that cannot be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from strategies import SMALLEST, configs, make_config

from tuner.config.codec import (
    format_config,
    load_config,
    parse_model,
    parse_yaml,
    read_yaml,
    to_plain,
    write_text,
)
from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError


@given(configs())
@settings(max_examples=80)
def test_config_survives_yaml(config):
    text = format_config(config, header="two lines\nof comment")
    assert parse_model(TrainConfig, parse_yaml(text), source="test") == config


@given(configs())
@settings(max_examples=20)
def test_config_survives_plain_data(config):
    assert parse_model(TrainConfig, to_plain(config), source="test") == config


def test_config_survives_a_file(tmp_path):
    config = make_config({"data.path": "数据/1e5", "batching.boundaries": [64, 128]})
    path = tmp_path / "best.yaml"
    write_text(path, format_config(config, header="written by a test"))
    assert load_config(path) == load_config(str(path)) == config


@pytest.mark.parametrize("text", ["1e5", "12e4", "-1E+3", ".5e1", "5.e-2", "9e99"])
def test_text_that_looks_like_a_float_stays_text(text):
    config = make_config({"data.path": text, "train.out": text})
    assert parse_model(TrainConfig, parse_yaml(format_config(config)), source="test") == config


@pytest.mark.parametrize(
    "end", ["\n", "\r\n", "\x85", "\u2028", "\u2029", "\ufeff", "\x00", "\x1b"]
)
@pytest.mark.parametrize("form", ["{}", "a{}b", "{} a", "a {}", "a b " * 30 + "{}"])
def test_line_ends_and_control_characters_in_a_text_stay(end, form):
    config = make_config({"data.path": form.format(end)})
    assert parse_model(TrainConfig, parse_yaml(format_config(config)), source="test") == config


def test_text_form_is_plain_yaml_with_lists_on_one_line():
    text = format_config(make_config({"batching.boundaries": [64, 128]}), header="a\nb")
    assert text.startswith("# a\n# b\ndata:\n")
    assert "\n  boundaries: [64, 128]\n" in text
    assert yaml.safe_load(text)["batching"]["boundaries"] == [64, 128]
    sections = [line[:-1] for line in text.splitlines() if line.endswith(":")]
    assert sections == [
        "data", "batching", "graph", "precision", "model", "optimizer", "schedule", "train",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-2E5", -200000.0),
        ("+1e+2", 100.0),
        ("1.5e-3", 0.0015),
        (".5e1", 5.0),
        ("5.e1", 50.0),
        ("3.25", 3.25),
    ],
)
def test_exponent_without_a_point_is_a_float(text, value):
    read = parse_yaml(text)
    assert isinstance(read, float)
    assert read == value


@pytest.mark.parametrize("text", ["e5", "1e", "1e-", "1e5x", "x1e5", "--1e5", "'1e5'"])
def test_what_is_no_number_stays_text(text):
    assert parse_yaml(text) == text.strip("'")


def test_learning_rate_without_a_point_is_read_from_a_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "data: {path: d}\nmodel: {vocab_size: 9}\noptimizer:\n  learning_rate: 1e-3\n  eps: 1e-9\n"
    )
    assert load_config(path).optimizer.learning_rate == 0.001
    assert load_config(path).optimizer.eps == 1e-9


@pytest.mark.parametrize(
    "text",
    [
        "train: {epochs: 1, epochs: 2}",
        "data:\n  path: a\ndata:\n  path: b",
        "a:\n- b: 1\n  b: 1",
        "1: x\n1: y",
    ],
)
def test_repeated_key_is_refused(text):
    with pytest.raises(ValueError, match="stands twice"):
        parse_yaml(text)


def test_same_key_in_two_sections_is_fine():
    assert parse_yaml("a: {x: 1}\nb: {x: 2}\nc: [{x: 3}, {x: 4}]")["c"] == [{"x": 3}, {"x": 4}]


NOT_YAML = {
    "open list": "a: [1, 2",
    "tab": "a:\n\t- 1",
    "no such alias": "a: *b",
    "unsafe tag": "a: !!python/object/apply:os.getcwd []",
    "list for a key": "? [a]\n: 1",
    "mapping for a key": "? {a: 1}\n: 1",
    "month 13": "a: 2024-13-45",
    "hex without digits": "a: 0x_",
    "bits without digits": "a: 0b_",
    "value sign": "a: =",
    "two documents": "a: 1\n---\nb: 2",
    "deep": "[" * 1200,
    "repeated key": "a: 1\na: 1",
    "control characters": "a: \x01\x02",
}


@pytest.mark.parametrize("text", NOT_YAML.values(), ids=NOT_YAML)
def test_what_is_not_yaml_is_one_line_with_the_path(text, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(BadInputError) as error:
        load_config(path)
    assert str(error.value).startswith(f"{path} is not YAML: ")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
        parse_yaml(text)


def test_error_says_which_line_is_broken(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("data: {path: a}\nmodel:\n  width: 8\n  width: 16\n")
    with pytest.raises(BadInputError, match=r"'width' stands twice.* line 4"):
        load_config(path)


def _missing(folder: Path) -> Path:
    return folder / "none.yaml"


def _is_folder(folder: Path) -> Path:
    return folder


def _under_a_file(folder: Path) -> Path:
    (folder / "file").write_text("x")
    return folder / "file" / "c.yaml"


def _binary(folder: Path) -> Path:
    (folder / "c.yaml").write_bytes(bytes(range(256)) * 4)
    return folder / "c.yaml"


def _zeros(folder: Path) -> Path:
    (folder / "c.yaml").write_bytes(b"\x00" * 100)
    return folder / "c.yaml"


def _utf16(folder: Path) -> Path:
    (folder / "c.yaml").write_text("data: {path: x}", encoding="utf-16")
    return folder / "c.yaml"


def _long_name(folder: Path) -> Path:
    return folder / ("x" * 300)


@pytest.mark.parametrize(
    "make", [_missing, _is_folder, _under_a_file, _binary, _zeros, _utf16, _long_name]
)
def test_unreadable_file_is_bad_input_that_names_it(make, tmp_path):
    path = make(tmp_path)
    with pytest.raises(BadInputError) as error:
        read_yaml(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("- a\n- b", "list"), ("", "NoneType"), ("# only a comment", "NoneType"), ("7", "int"),
     ("text", "str"), ("2024-01-01", "date")],
)  # fmt: skip
def test_top_level_must_be_a_mapping(text, kind, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(BadInputError, match=rf"must be a mapping of sections \(got {kind}\)"):
        load_config(path)


@pytest.mark.parametrize("text", ["data: &a {x: *a}", "data: {path: &a [*a]}"])
def test_alias_that_holds_itself_is_bad_input(text, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(BadInputError):
        load_config(path)


def test_file_with_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(format_config(make_config()), encoding="utf-8-sig")
    assert load_config(path) == make_config()


def test_alias_and_merge_key_work(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "data: {path: &p here}\nmodel: {vocab_size: 9}\ntrain: {<<: {epochs: 3}, out: *p}\n"
    )
    assert load_config(path).train.epochs == 3
    assert load_config(path).train.out == "here"


def visible_and_hidden(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_write_makes_the_folder_and_replaces_the_file(tmp_path):
    path = tmp_path / "a" / "b" / "best.yaml"
    write_text(path, "old")
    write_text(path, "new é\n")
    assert path.read_bytes() == "new é\n".encode()
    assert visible_and_hidden(path.parent) == ["best.yaml"]


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    """The file system gives out half way: a limit on file size stands for a full disk."""
    path = tmp_path / "best.yaml"
    path.write_text("old")
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from tuner.config.codec import write_text\n"
        "from tuner.errors import BadInputError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    write_text(Path(sys.argv[1]), 'x' * 100_000)\n"
        "except BadInputError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"cannot write {path}: ")
    assert done.stdout.count("\n") == 1
    assert path.read_text() == "old"
    assert visible_and_hidden(tmp_path) == ["best.yaml"]


def test_text_that_has_no_bytes_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "best.yaml"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half of a pair: \ud800")
    assert path.read_text() == "old"
    assert visible_and_hidden(tmp_path) == ["best.yaml"]


def test_folder_in_the_way_is_bad_input_and_stays(tmp_path):
    path = tmp_path / "best.yaml"
    path.mkdir()
    with pytest.raises(BadInputError, match="cannot write"):
        write_text(path, "new")
    assert visible_and_hidden(tmp_path) == ["best.yaml"]
    assert path.is_dir()


def test_file_for_a_folder_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInputError, match="cannot write"):
        write_text(tmp_path / "file" / "best.yaml", "new")
    assert (tmp_path / "file").read_text() == "x"


def test_written_file_can_be_read_by_others(tmp_path):
    write_text(tmp_path / "best.yaml", "x")
    assert (tmp_path / "best.yaml").stat().st_mode & 0o777 == 0o644


def test_parse_model_leaves_its_input_alone():
    content = {**SMALLEST, "batching": {"boundaries": [8, 16]}}
    parse_model(TrainConfig, content, source="test")
    assert content == {**SMALLEST, "batching": {"boundaries": [8, 16]}}

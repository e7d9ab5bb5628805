"""Overrides by dotted name and the `--set` arguments that carry them."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import configs, make_config

from tuner.config.codec import to_plain
from tuner.config.override import override_config, override_plain, parse_assignments
from tuner.errors import BadInputError


@given(configs(), st.integers(1, 99))
@settings(max_examples=25)
def test_override_changes_one_value_and_leaves_the_original(config, epochs):
    before = copy.deepcopy(to_plain(config))
    changed = override_config(config, {"train.epochs": epochs})
    assert changed.train.epochs == epochs
    assert to_plain(config) == before
    assert to_plain(changed) == {**before, "train": {**before["train"], "epochs": epochs}}


def test_override_sets_sections_lists_and_top_level_values():
    config = override_config(
        make_config(),
        {"batching.boundaries": (64, 128), "device": "cpu", "graph": {"mode": "dynamic"}},
    )
    assert config.batching.boundaries == (64, 128)
    assert config.device == "cpu"
    assert config.graph.mode == "dynamic"


def test_override_takes_an_align_table():
    table = [{"up_to": 128, "multiple": 8}, {"multiple": 64}]
    align = override_config(make_config(), {"batching.align": table}).batching.align
    assert [(rule.up_to, rule.multiple) for rule in align] == [(128, 8), (None, 64)]


def test_no_override_is_the_same_config():
    assert override_config(make_config(), {}) == make_config()


def test_whole_config_is_validated_again():
    with pytest.raises(BadInputError, match=r"\A--set: batching: exactly one of"):
        override_config(make_config(), {"batching.samples_per_batch": 8})
    both = {"batching.samples_per_batch": 8, "batching.tokens_per_batch": None}
    assert override_config(make_config(), both).batching.samples_per_batch == 8


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("batching.algin", "unknown key batching.algin; did you mean align?"),
        ("device.kind", "device: "),
        ("train.epochs.x", "train.epochs: "),
        ("nothing.here", "unknown key nothing;"),
        ("batching.", "unknown key batching."),
        (".x", "unknown key "),
    ],
)
def test_wrong_name_is_refused_in_one_line(name, words):
    with pytest.raises(BadInputError) as error:
        override_config(make_config(), {name: 1}, source="space.yaml")
    assert str(error.value).startswith(f"space.yaml: {words}")
    assert "\n" not in str(error.value)


def test_plain_override_leaves_its_input_and_makes_missing_sections():
    plain = {"a": {"b": 1}, "c": 2}
    kept = copy.deepcopy(plain)
    assert override_plain(plain, {"a.d": 3, "e.f.g": 4, "c": 5}) == {
        "a": {"b": 1, "d": 3},
        "c": 5,
        "e": {"f": {"g": 4}},
    }
    assert plain == kept


def test_later_override_of_a_section_wins_over_an_earlier_value():
    assert override_plain({}, {"a.b": 1, "a": {"c": 2}}) == {"a": {"c": 2}}
    assert override_plain({}, {"a": {"c": 2}, "a.b": 1}) == {"a": {"c": 2, "b": 1}}


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("train.max_steps=50", "train.max_steps", 50),
        (" train.max_steps =50", "train.max_steps", 50),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate", 0.001),
        ("batching.boundaries=[64, 128]", "batching.boundaries", [64, 128]),
        ("data.label_column=null", "data.label_column", None),
        ("data.label_column=", "data.label_column", None),
        ("data.path=a=b", "data.path", "a=b"),
        ("data.path='50'", "data.path", "50"),
        ("batching.align=[{up_to: 8}]", "batching.align", [{"up_to": 8}]),
    ],
)
def test_set_argument_is_read_as_yaml(argument, name, value):
    parsed = parse_assignments([argument])
    assert parsed == {name: value}
    assert type(parsed[name]) is type(value)


def test_last_of_equal_names_wins():
    assert parse_assignments(["a=1", "b=2", "a=3"]) == {"a": 3, "b": 2}


@pytest.mark.parametrize("argument", ["", "train.epochs", "=5", "  =5", "epochs 5"])
def test_set_argument_without_name_or_value_is_refused(argument):
    with pytest.raises(BadInputError) as error:
        parse_assignments(["a=1", argument])
    assert str(error.value).startswith(f"--set needs name=value (got {argument!r})")


@pytest.mark.parametrize(
    "text", ["[1", "{a: 1, a: 2}", "*x", "2024-13-45", "0x_", "'", "{[a]: 1}"]
)
def test_set_value_that_is_not_yaml_is_refused(text):
    with pytest.raises(BadInputError) as error:
        parse_assignments([f"data.path={text}"])
    assert str(error.value).startswith(f"--set needs a YAML value (got {f'data.path={text}'!r})")


@pytest.mark.parametrize("argument", ["a\nb=[1", "\na=1\n2", "a\nb"])
def test_odd_set_argument_is_still_one_line(argument):
    with pytest.raises(BadInputError) as error:
        override_config(make_config(), parse_assignments([argument]))
    assert "\n" not in str(error.value)

"""The config that a study starts from where the user gave none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strategies import make_config, make_lengths

from tuner.data.mindrecord import MindRecordSet, MindRecordWriter, RowSchema, open_mindrecord
from tuner.errors import BadInputError
from tuner.study.base import (
    check_base,
    describe_fitted,
    fitted_base,
    in_tokens_per_update,
    real_tokens_per_update,
)

ONE_COLUMN = RowSchema(columns={"tokens": {"type": "int32", "shape": [-1]}})


def foreign(tmp_path: Path, **description: Any) -> MindRecordSet:
    """A set of somebody else's: one column, ids up to 20."""
    path = tmp_path / "foreign.mindrecord"
    with MindRecordWriter(path, description=description, schema=ONE_COLUMN) as writer:
        writer.write([{"tokens": np.array(ids, np.int32)} for ids in ([1, 2, 20], [3], [4, 4])])
    return open_mindrecord(path)


def test_the_vocabulary_is_the_one_that_was_recorded(tmp_path):
    dataset = foreign(tmp_path, vocab_size=77, pad_id=3)
    base = fitted_base(dataset, "somewhere")
    assert (base.model.vocab_size, base.data.pad_id, base.data.path) == (77, 3, "somewhere")
    assert base.data.label_column is None
    assert "vocabulary 77" in describe_fitted(base)


def test_else_it_is_looked_up_in_the_column_that_the_user_names(tmp_path):
    base = fitted_base(foreign(tmp_path), "x", {"data.input_column": "tokens"})
    assert base.model.vocab_size == 24  # ids 0 to 20, up to a multiple of 8
    assert base.data.input_column == "tokens"


@pytest.mark.parametrize(
    "overrides",
    [{"model.vocab_size": 50}, {"model": {"vocab_size": 50}}],
    ids=["field", "section"],
)
def test_a_vocabulary_that_the_user_sets_is_kept(tmp_path, overrides):
    dataset = foreign(tmp_path, vocab_size=77)
    assert fitted_base(dataset, "x", overrides).model.vocab_size == 50


def test_other_fields_are_taken_and_the_path_stays(tmp_path):
    overrides = {"train.epochs": 9, "data.path": "elsewhere", "batching.align": 32}
    base = fitted_base(foreign(tmp_path, vocab_size=21), "here", overrides)
    assert (base.train.epochs, base.data.path, base.batching.align) == (9, "here", 32)


@pytest.mark.parametrize("as_section", [False, True], ids=["field", "section"])
def test_a_source_gives_the_sizes(tmp_path, as_section):
    sizes = {
        "model_type": "qwen2", "vocab_size": 600, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    source = {"source": str(tmp_path)}
    overrides = {"model": source} if as_section else {"model.source": str(tmp_path)}
    base = fitted_base(foreign(tmp_path, vocab_size=21), "here", overrides)
    assert (base.model.vocab_size, base.model.width, base.model.num_layers) == (600, 64, 3)
    assert (base.model.attention_bias, base.data.path) == ("qkv", "here")
    assert f"the model of {tmp_path}" in describe_fitted(base)


def test_the_vocabulary_of_a_users_own_cell_is_the_datas(tmp_path):
    overrides = {"model.factory": "package.module:function"}
    base = fitted_base(foreign(tmp_path, vocab_size=21), "here", overrides)
    assert base.model.vocab_size == 21
    assert "the Cell of package.module:function (vocabulary 21," in describe_fitted(base)


def test_a_column_that_is_not_there(tmp_path):
    with pytest.raises(BadInputError, match="input_ids"):
        fitted_base(foreign(tmp_path), "x")


def test_ids_outside_a_smaller_vocabulary_are_refused(tmp_path):
    dataset = foreign(tmp_path)
    overrides = {"data.input_column": "tokens", "model.vocab_size": 20}
    with pytest.raises(BadInputError, match="row 0") as caught:
        check_base(dataset, fitted_base(dataset, "x", overrides))
    assert "20" in caught.value.problem


def test_updates_counted_in_steps_become_the_tokens_that_these_hold():
    """10 rows of 6 tokens, one a batch: windows of 4, 4 and 2 steps hold 60 / 3 tokens."""
    batching = {"batching.strategy": "fixed", "batching.samples_per_batch": 1,
                "batching.tokens_per_batch": None}  # fmt: skip
    base = make_config({**batching, "train.steps_per_update": 4})
    converted = in_tokens_per_update(base, make_lengths([6] * 10))
    assert (converted.train.tokens_per_update, converted.train.steps_per_update) == (20, 1)
    assert converted.batching == base.batching


def test_what_an_update_of_the_base_holds():
    """Windows of 4, 4 and 2 of 10 batches of 6 tokens; one batch each; two of 30 tokens."""
    batching = {"batching.strategy": "fixed", "batching.samples_per_batch": 1,
                "batching.tokens_per_batch": None}  # fmt: skip
    lengths = make_lengths([6] * 10)
    for train, held in (
        ({"train.steps_per_update": 4}, 20),
        ({}, 6),
        ({"train.tokens_per_update": 29}, 30),
    ):
        assert real_tokens_per_update(make_config({**batching, **train}), lengths) == held


def test_updates_counted_in_tokens_or_single_steps_stay_as_they_are():
    for overrides in ({}, {"train.tokens_per_update": 7}):
        base = make_config(overrides)
        assert in_tokens_per_update(base, make_lengths([6] * 10)) is base

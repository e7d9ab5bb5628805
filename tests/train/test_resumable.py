"""What a checkpoint is refused for, and how the refusal names it."""

from __future__ import annotations

import dataclasses

import pytest
from strategies import make_config, make_lengths

from tuner.batching.plan import plan_batches
from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.train.provenance import check_resumable, deciding_fields, planned_world_size
from tuner.train.state import TrainState

LENGTHS = make_lengths([5, 9, 3, 12, 7])


def state(overrides=None, **changes):
    config = make_config(overrides or {})
    plan = plan_batches(LENGTHS, config)
    new = TrainState(
        config=deciding_fields(config),
        data_fingerprint="d" * 64,
        plan_fingerprint=plan.fingerprint,
        world_size=plan.world_size,
        shapes=plan.shapes,
    )
    return dataclasses.replace(new, **changes)


def refusal(saved, now):
    with pytest.raises(BadInputError) as error:
        check_resumable(saved, now, "rows.mindrecord")
    return str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"data.read_workers": 1, "data.read_ahead_batches": 9},
        {"train.epochs": 9, "train.max_steps": 3, "train.out": "elsewhere"},
        {"train.checkpoint_every_steps": 2, "train.keep_last": 9, "train.async_checkpoint": False},
        {"data.path": "moved.mindrecord", "graph.compile_cache": True, "train.tensorboard": False},
        {"evaluation": {"path": "other.mindrecord", "every_steps": 7}, "train.keep_best": 2},
    ],
)
def test_what_may_change(overrides):
    check_resumable(state(), state(overrides), "rows.mindrecord")


@pytest.mark.parametrize(
    ("overrides", "phrase"),
    [
        (
            {"optimizer.learning_rate": 0.02},
            "another config: optimizer.learning_rate 0.02, the checkpoint has 0.001;",
        ),
        ({"model.width": 64}, "model.width 64, the checkpoint has 128;"),
        ({"schedule.kind": "wsd"}, 'schedule.kind "wsd", the checkpoint has "cosine";'),
        ({"train.clip_quantile": 0.9}, "train.clip_quantile 0.9, the checkpoint has null;"),
        (
            {"train.tokens_per_update": 7, "train.clip_norm": None, "optimizer.beta1": 0.5},
            "optimizer.beta1 0.5, the checkpoint has 0.9; "
            "train.tokens_per_update 7, the checkpoint has null; "
            "train.clip_norm null, the checkpoint has 1.0;",
        ),
        (
            {"evaluation": {"fraction": 0.1}},
            "evaluation.fraction 0.1, the checkpoint has not set; "
            "evaluation.seed 0, the checkpoint has not set;",
        ),
    ],
)
def test_other_configs_are_refused_by_field(overrides, phrase):
    assert phrase in refusal(state(), state(overrides))


def test_many_differences_are_counted():
    overrides = {f"optimizer.{name}": 0.5 for name in ("learning_rate", "beta1", "beta2", "eps")}
    assert "and 1 more fields; give the same config" in refusal(state(), state(overrides))


def test_every_field_of_a_config_decides_or_is_known_to_be_free():
    """A new field is looked at before it is left out."""
    config = make_config()
    deciding = deciding_fields(config)
    left_out = {
        f"{section}.{name}"
        for section, fields in config.model_dump().items()
        if isinstance(fields, dict)
        for name in fields
        if name not in deciding.get(section, {})
    }
    assert left_out == {
        "data.path", "graph.compile_cache", "train.epochs", "train.max_steps", "train.out",
        "train.checkpoint_every_steps", "train.keep_last", "train.keep_best",
        "train.async_checkpoint", "train.tensorboard", "model.source",
    }  # fmt: skip
    unread = set(TrainConfig.model_fields) - set(deciding)
    # The memory pool changes where values lie, not what they are.
    assert unread == {"evaluation", "device", "memory", "provenance"}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 12])
def test_ranks_that_divide_the_plan_keep_it(num_ranks):
    assert planned_world_size(state(world_size=12), num_ranks) == 12


def test_a_new_run_is_planned_for_its_ranks():
    assert planned_world_size(None, 3) == 3


@pytest.mark.parametrize(
    ("planned", "num_ranks", "fix"),
    [(6, 4, "go on with one of 1, 2, 3, 6, or"), (2, 3, "one of 1, 2, or"), (1, 2, "with 1, or")],
)
def test_ranks_that_do_not_divide_the_plan_are_refused(planned, num_ranks, fix):
    with pytest.raises(BadInputError) as error:
        planned_world_size(state(world_size=planned), num_ranks)
    assert f"a run on {planned} devices, this one has {num_ranks}" in str(error.value)
    assert fix in str(error.value)


def test_other_data_and_another_plan_are_refused():
    now = state()
    line = refusal(state(data_fingerprint="e" * 64), now)
    assert "other data (fingerprint eeeeeeeeeeee, rows.mindrecord has dddddddddddd)" in line

    assert "another plan of the same data" in refusal(state(plan_fingerprint="f" * 64), now)

"""Every rule of the schema: one line that names the source, the field, the rule and the value."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from strategies import SMALLEST, make_config

from tuner.config.codec import parse_model, to_plain
from tuner.config.override import override_plain
from tuner.config.schema import (
    AlignRule,
    BatchingConfig,
    ModelConfig,
    TrainConfig,
)
from tuner.errors import BadInputError


def refusal(changes: dict[str, Any]) -> str:
    """The line that a config with these changes is refused with."""
    with pytest.raises(BadInputError) as error:
        parse_model(TrainConfig, override_plain(SMALLEST, changes), source="c.yaml")
    line = str(error.value)
    assert line.startswith("c.yaml: ")
    assert "\n" not in line
    return line


AT_LEAST_ONE = [
    "data.max_length", "batching.num_buckets", "batching.align", "batching.tokens_per_batch",
    "batching.samples_per_batch", "model.vocab_size", "model.width", "model.num_layers",
    "model.num_heads", "model.num_kv_heads", "model.ffn_width", "train.epochs", "train.max_steps",
    "train.tokens_per_update", "train.checkpoint_every_steps", "train.keep_last",
    "train.steps_per_update", "optimizer.reference_tokens_per_update", "model.max_positions",
    "evaluation.every_steps", "evaluation.max_rows", "model.lora.rank",
]  # fmt: skip


@pytest.mark.parametrize("field", AT_LEAST_ONE)
@pytest.mark.parametrize("value", [0, -3])
def test_count_must_be_at_least_one(field, value):
    line = refusal({field: value})
    assert f"{field}: " in line
    assert "greater than or equal to 1" in line
    assert f"(got {value})" in line


@pytest.mark.parametrize("field", ["data.pad_id", "batching.seed", "train.seed"])
def test_number_from_zero_must_not_be_negative(field):
    assert make_config({field: 0})
    line = refusal({field: -1})
    assert f"{field}: " in line
    assert "(got -1)" in line


POSITIVE = [
    "model.rope_theta", "model.norm_eps", "model.init_std", "optimizer.learning_rate",
    "optimizer.eps", "train.clip_norm",
]  # fmt: skip


@pytest.mark.parametrize("field", POSITIVE)
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_float_must_be_positive_and_finite(field, value):
    line = refusal({field: value})
    assert f"{field}: " in line
    assert f"(got {value})" in line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schedule.warmup_fraction", -0.1),
        ("schedule.warmup_fraction", 1.1),
        ("schedule.warmup_fraction", float("nan")),
        ("schedule.min_learning_rate_fraction", 2.0),
        ("optimizer.beta1", 1.0),
        ("optimizer.beta2", -0.5),
        ("optimizer.weight_decay", -0.1),
        ("optimizer.weight_decay", float("inf")),
    ],
)
def test_share_must_be_in_its_range(field, value):
    line = refusal({field: value})
    assert f"{field}: " in line
    assert f"(got {value})" in line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train.epochs", 1.0),
        ("train.epochs", True),
        ("train.epochs", "3"),
        ("train.epochs", None),
        ("data.path", 7),
        ("data.path", None),
        ("optimizer.learning_rate", "1e-3"),
        ("optimizer.learning_rate", False),
        ("batching.align", "8"),
        ("batching.align", True),
        ("batching.boundaries", 64),
        ("batching.boundaries", "64"),
        ("device", "gpu"),
        ("device", ""),
        ("graph.mode", "Static"),
        ("graph.jit_level", "O3"),
        ("graph.attention", "sdpa"),
        ("memory.optimize_level", "O2"),
        ("memory.enable_vmm", "true"),
        ("data.overflow", "cut"),
        ("batching.strategy", "sorted"),
    ],
)
def test_wrong_type_or_choice_is_named_with_its_value(field, value):
    line = refusal({field: value})
    assert f"{field}: " in line
    assert f"(got {value!r})" in line


@pytest.mark.parametrize("choice", ["'auto'", "'cpu'", "'ascend'"])
def test_wrong_choice_lists_the_choices(choice):
    assert choice in refusal({"device": "gpu"})


@pytest.mark.parametrize("field", ["data.path", "model.vocab_size"])
def test_missing_field_is_named(field):
    section, name = field.split(".")
    content = {**SMALLEST, section: {}}
    with pytest.raises(BadInputError) as error:
        parse_model(TrainConfig, content, source="c.yaml")
    assert str(error.value) == f"c.yaml: {field} is missing; add {field}"
    assert name in str(error.value)


@pytest.mark.parametrize("section", ["data", "model"])
def test_missing_section_is_named(section):
    content = {name: value for name, value in SMALLEST.items() if name != section}
    with pytest.raises(BadInputError, match=rf"\Ac.yaml: {section} is missing; add {section}\Z"):
        parse_model(TrainConfig, content, source="c.yaml")


@pytest.mark.parametrize("value", [None, 5, "x", [1]])
def test_section_that_is_not_a_mapping_is_named(value):
    assert "c.yaml: batching: " in refusal({"batching": value})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("batching.algin", "align"),
        ("batching.token_per_batch", "tokens_per_batch"),
        ("train.epoch", "epochs"),
        ("optimiser", "optimizer"),
        ("model.num_head", "num_heads"),
        ("data.pad", "pad_id"),
        ("graph.jitlevel", "jit_level"),
    ],
)
def test_unknown_key_names_the_nearest(name, nearest):
    line = refusal({name: 1})
    assert line.startswith(f"c.yaml: unknown key {name}; did you mean {nearest}")


def test_unknown_key_lists_all_that_are_known_nearest_first():
    line = refusal({"schedule.warmup": 1})
    known = "warmup_fraction, kind, progress, decay_fraction, min_learning_rate_fraction"
    assert line.endswith(f"known here: {known}")


def test_key_far_from_all_gets_no_guess():
    line = refusal({"zzzz": 1})
    assert "did you mean" not in line
    assert line.endswith(
        "known here: data, batching, graph, precision, model, optimizer, schedule, train, "
        "evaluation, device, memory, provenance"
    )


def test_unknown_key_inside_an_align_rule_is_named():
    line = refusal({"batching.align": [{"multple": 8}]})
    assert "unknown key batching.align.0.multple; did you mean multiple?" in line


def test_unknown_key_is_told_before_what_else_is_wrong():
    line = refusal({"train.epochs": 0, "train.epoch": 3, "data.pad_id": -1})
    assert "unknown key train.epoch" in line


def test_unknown_key_inside_optional_sections_is_named():
    line = refusal({"provenance.trail": 1})
    assert "unknown key provenance.trail; did you mean trial?" in line


@pytest.mark.parametrize("name", ["int", "float", "str", "tuple[", "function-x"])
@pytest.mark.parametrize("section", ["", "data.", "batching."])
def test_unknown_key_may_be_called_like_a_type(name, section):
    assert f"unknown key {section}{name};" in refusal({section + name: 5})


@pytest.mark.parametrize("key", ["a\nb", "\r\n", "", " ", 5, None, 1.5, True])
def test_odd_key_is_still_one_line(key):
    with pytest.raises(BadInputError) as error:
        parse_model(TrainConfig, {**SMALLEST, key: 1}, source="c.yaml")
    assert str(error.value).splitlines() == [str(error.value)]


@pytest.mark.parametrize("boundaries", [[64, 64], [128, 64], [8, 16, 12]])
def test_boundaries_must_rise_strictly(boundaries):
    line = refusal({"batching.boundaries": boundaries})
    before, after = boundaries[-2:]
    assert f"batching: boundaries must rise strictly (got {before} before {after})" in line


@pytest.mark.parametrize("bad", [0, -8, 64.0, "64", None, True])
def test_bad_boundary_is_named_by_its_place(bad):
    line = refusal({"batching.boundaries": [32, bad]})
    assert "batching.boundaries.1: " in line
    assert f"(got {bad!r})" in line


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([], "the last rule of align must have no up_to"),
        ([{"multiple": 8, "up_to": 64}], "the last rule of align must have no up_to"),
        ([{"multiple": 8}, {"multiple": 64}], "only the last rule of align may have no up_to"),
        (
            [{"multiple": 8, "up_to": 64}, {"multiple": 8, "up_to": 64}, {"multiple": 8}],
            "align up_to must rise strictly (got 64 before 64)",
        ),
        (
            [{"multiple": 8, "up_to": 64}, {"multiple": 8, "up_to": 32}, {"multiple": 8}],
            "align up_to must rise strictly (got 64 before 32)",
        ),
        (
            [{"multiple": 8, "up_to": 60}, {"multiple": 8}],
            "up_to must be a multiple of multiple (got 60 and 8)",
        ),
        ([{"multiple": 0}], "batching.align.0.multiple"),
        ([{"up_to": 8}], "batching.align.0.multiple is missing"),
        ([8], "batching.align.0"),
    ],
)
def test_align_table_rules(table, words):
    assert words in refusal({"batching.align": table})


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"tokens_per_batch": None}, "none"),
        ({"samples_per_batch": 8}, "tokens_per_batch and samples_per_batch"),
        ({"boundaries": [8], "batch_sizes": [4]}, "tokens_per_batch and batch_sizes"),
        (
            {"boundaries": [8], "batch_sizes": [4], "samples_per_batch": 2,
             "tokens_per_batch": None},
            "samples_per_batch and batch_sizes",
        ),
    ],
)  # fmt: skip
def test_exactly_one_rule_sets_the_batch_size(changes, got):
    line = refusal({f"batching.{name}": value for name, value in changes.items()})
    assert "exactly one of tokens_per_batch, samples_per_batch and batch_sizes" in line
    assert f"(got {got})" in line


@pytest.mark.parametrize("num_sizes", [1, 3])
def test_batch_sizes_need_one_entry_for_each_boundary(num_sizes):
    line = refusal(
        {
            "batching.tokens_per_batch": None,
            "batching.boundaries": [8, 16],
            "batching.batch_sizes": [4] * num_sizes,
        }
    )
    assert (
        f"batch_sizes needs one entry for each of the boundaries (got {num_sizes} for 2)" in line
    )


@pytest.mark.parametrize("strategy", ["fixed", "dynamic"])
def test_batch_sizes_belong_to_buckets(strategy):
    line = refusal(
        {
            "batching.strategy": strategy,
            "batching.tokens_per_batch": None,
            "batching.boundaries": [8, 16],
            "batching.batch_sizes": [4, 2],
        }
    )
    assert "batch_sizes needs strategy bucketed" in line
    assert f"(got {strategy})" in line


@pytest.mark.parametrize(
    ("width", "num_heads"),
    [(128, 3), (12, 4), (4, 4), (10, 4)],
)
def test_heads_must_have_a_whole_even_size(width, num_heads):
    line = refusal({"model.width": width, "model.num_heads": num_heads, "model.num_kv_heads": 1})
    assert "model: width / num_heads must be a whole even number" in line
    assert f"(got width {width}, num_heads {num_heads})" in line


def test_heads_must_share_their_keys_evenly():
    line = refusal({"model.num_heads": 4, "model.num_kv_heads": 3})
    assert "model: num_heads must be a multiple of num_kv_heads (got 4 and 3)" in line


def test_shape_in_provenance_is_a_pair_of_counts():
    provenance = {
        "data_fingerprint": "f", "num_samples": 1, "device": "CPU", "versions": {}, "study": "s",
        "trial": 0, "shapes": [[4, 64], [2, 0]],
        "prediction": {"estimated_run_s": 1.0, "estimated_real_tokens_per_s": 1.0,
                       "estimated_steady_real_tokens_per_s": 1.0, "estimated_compile_s": 1.0,
                       "effective_token_fraction": 0.5, "peak_bytes": 1},
    }  # fmt: skip
    assert "provenance.shapes.1.1: " in refusal({"provenance": provenance})
    assert "provenance.shapes.0" in refusal({"provenance": {**provenance, "shapes": [[1, 2, 3]]}})


def test_whole_number_is_taken_for_a_float():
    assert make_config({"optimizer.learning_rate": 1}).optimizer.learning_rate == 1.0


def test_config_cannot_be_changed_in_place():
    config = make_config()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.train.epochs = 2
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.device = "cpu"


def test_equal_configs_are_equal_and_hash_alike():
    one, other = BatchingConfig(boundaries=(8, 16)), BatchingConfig(boundaries=(8, 16))
    assert one == other
    assert hash(one) == hash(other)
    assert ModelConfig(vocab_size=5) != ModelConfig(vocab_size=6)
    assert AlignRule(multiple=8) == AlignRule(multiple=8, up_to=None)


def test_fp32_ops_of_fp32_are_refused():
    line = refusal({"precision.fp32_ops": ["norms"]})
    assert "fp32_ops has a meaning below fp32 only (got norms with compute_dtype fp32)" in line


def test_fp32_ops_out_of_order_or_twice_are_refused_with_the_order():
    for written in (["loss", "norms"], ["norms", "loss", "norms"]):
        line = refusal({"precision.compute_dtype": "fp16", "precision.fp32_ops": written})
        assert "name each group once, in this order: norms, loss" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.tokens_per_update": 9, "train.steps_per_update": 2}, "other (got 9 and 2)"),
        ({"train.clip_quantile": 1.0}, "train.clip_quantile: "),
        ({"train.clip_quantile": 0.0}, "train.clip_quantile: "),
        ({"train.clip_window": 9}, "train.clip_window: "),
        ({"train.keep_best": 1}, "keep_best needs an evaluation"),
        ({"optimizer.rate_scaling": "sqrt"}, "belong together (got sqrt and None)"),
        ({"optimizer.reference_tokens_per_update": 5}, "belong together (got none and 5)"),
        (
            {"optimizer.rate_scaling": "linear", "optimizer.reference_tokens_per_update": 5},
            "follows train.tokens_per_update",
        ),
        ({"optimizer.no_decay": ["biases", "norms"]}, "in this order: norms, biases"),
        ({"schedule.kind": "wsd", "schedule.warmup_fraction": 0.5, "schedule.decay_fraction": 0.6},
         "at most 1 (got 0.5 and 0.6)"),
        ({"evaluation": {}}, "exactly one of path and fraction"),
        ({"evaluation": {"path": "a", "fraction": 0.1}}, "exactly one of path and fraction"),
        ({"evaluation": {"fraction": 1.0}}, "evaluation.fraction: "),
        ({"model.positions": "learned"}, "positions learned needs max_positions"),
        ({"model.head_size": 7}, "model.head_size: "),
        ({"model.factory": "no colon"}, "package.module:function (got 'no colon')"),
        ({"model.factory": "a:b", "model.source": "c"}, "source and lora must be null"),
        ({"model.factory": "a:b", "model.lora": {}}, "source and lora must be null"),
        ({"model.lora": {"projections": []}}, "at least one projection"),
        ({"model.lora": {"projections": ["q_proj", "q_proj"]}}, "each once"),
        ({"model.lora": {"projections": ["k"]}}, "model.lora.projections.0: "),
        ({"model.rope_scaling": {"kind": "yarn", "factor": 2.0}}, "model.rope_scaling.kind: "),
        (
            {"model.rope_scaling": {"kind": "llama3", "factor": 2.0, "high_freq_factor": 1.0}},
            "high_freq_factor must be above low_freq_factor",
        ),
    ],
)  # fmt: skip
def test_rules_between_the_fields_of_training(changes, words):
    assert words in refusal(changes)


def test_a_head_may_have_a_size_of_its_own():
    assert make_config({"model.width": 128}).model.size_of_head == 32
    odd = {"model.width": 100, "model.num_heads": 8, "model.head_size": 64}
    assert make_config(odd).model.size_of_head == 64
    assert "whole even number" in refusal({"model.width": 100, "model.num_heads": 8})


def test_lists_of_a_provenance_belong_to_its_shapes():
    plain = to_plain(make_config({}))
    record = {
        "data_fingerprint": "f", "num_samples": 1, "device": "CPU", "versions": {}, "study": "s",
        "trial": 0, "shapes": [[1, 8], [2, 8]],
        "prediction": {
            "estimated_run_s": 1.0, "estimated_real_tokens_per_s": 1.0,
            "estimated_steady_real_tokens_per_s": 1.0, "estimated_compile_s": 1.0,
            "effective_token_fraction": 0.5, "peak_bytes": 1,
        },
    }  # fmt: skip
    assert parse_model(TrainConfig, plain | {"provenance": record}, source="c").provenance
    assert "101 or none (got 2)" in refusal(
        {"provenance": record | {"length_percentiles": [1, 2]}}
    )
    prediction = record["prediction"] | {"step_s": [0.1]}
    assert "(got 1 for 2)" in refusal({"provenance": record | {"prediction": prediction}})


def test_o3_is_refused_with_the_reason():
    assert "O3 is gone: MindSpore had it in 2.0 and 2.1 only" in refusal({"graph.jit_level": "O3"})


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ({}, "memory sets nothing; leave it out or set it to null"),
        ({"max_size_gb": 2, "init_size_gb": 4}, "at most max_size_gb (got 4 and 2)"),
        ({"max_size_gb": 0.0}, "memory.max_size_gb: "),
        ({"increase_size_gb": float("inf")}, "memory.increase_size_gb: "),
        ({"init_size_gb": 1025}, "memory.init_size_gb: "),
        ({"max_size": 3}, "did you mean max_size_gb"),
    ],
)
def test_rules_of_the_memory_pool(memory, words):
    assert words in refusal({"memory": memory})


def test_fields_that_are_not_set_leave_plain_data_as_it_was():
    """So that studies and checkpoints from before these fields keep their fingerprints."""
    plain = to_plain(make_config({}))
    assert "memory" not in plain
    assert list(plain["graph"]) == ["mode", "jit_level", "compile_cache"]
    assert to_plain(make_config({"graph.attention": "auto", "memory": None})) == plain


def test_fields_that_are_set_survive_plain_data():
    config = make_config({"graph.attention": "math", "memory": {"max_size_gb": 57.5}})
    plain = to_plain(config)
    assert plain["graph"]["attention"] == "math"
    assert plain["memory"] == {
        "max_size_gb": 57.5, "init_size_gb": None, "increase_size_gb": None,
        "optimize_level": None, "enable_vmm": None,
    }  # fmt: skip
    assert parse_model(TrainConfig, plain, source="c") == config

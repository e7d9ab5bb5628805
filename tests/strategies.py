"""What the tests are made of: tiny builders, Hypothesis strategies, and slow plain-Python rules.

The slow rules say again, without NumPy and without the product's code, what a row's padded length
and fate must be; tests compare the product with them.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tuner.batching.boundary_rules import BOUNDARY_RULES
from tuner.batching.plan import BatchPlan, PlannedBatch
from tuner.config.codec import parse_model
from tuner.config.override import override_plain
from tuner.config.schema import AlignRule, TrainConfig
from tuner.data.lengths import Lengths

# The same examples on every machine, and no failure because a machine is slow.
settings.register_profile(
    "stable",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("stable")

Align = int | tuple[AlignRule, ...]

SMALLEST: dict[str, Any] = {"data": {"path": "data.mindrecord"}, "model": {"vocab_size": 100}}
TABLE = (
    AlignRule(up_to=128, multiple=8),
    AlignRule(up_to=512, multiple=32),
    AlignRule(multiple=64),
)


def make_lengths(tokens: Sequence[int]) -> Lengths:
    return Lengths(tokens=np.array(tokens, dtype=np.int32), fingerprint="test")


def make_config(changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """The smallest valid config with some dotted names set."""
    return parse_model(TrainConfig, override_plain(SMALLEST, changes or {}), source="test")


def skewed_tokens(num_samples: int, seed: int = 0, longest: int = 2048) -> list[int]:
    """Lengths as chat data has them: many short rows, few long ones."""
    drawn = np.random.default_rng(seed).lognormal(5.0, 1.0, num_samples)
    return [int(value) for value in np.clip(drawn, 1, longest)]


# Slow rules


def align_slowly(length: int, align: Align) -> int:
    """The smallest padded length >= length that the rule allows, found by counting up."""
    return next(n for n in itertools.count(length) if _is_aligned(n, align))


def _is_aligned(length: int, align: Align) -> bool:
    if isinstance(align, int):
        return length % align == 0
    rule = next(rule for rule in align if rule.up_to is None or length <= rule.up_to)
    return length % rule.multiple == 0


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What the overflow rule makes of a set: row -> its tokens, and what is left out."""

    tokens_of_row: dict[int, int]
    num_empty: int
    num_over_long: int
    num_truncated: int


def admit_slowly(tokens: Sequence[int], config: TrainConfig) -> Fate:
    limit = config.data.max_length or 10**9
    if config.batching.strategy in ("bucketed", "packed") and config.batching.boundaries:
        limit = min(limit, config.batching.boundaries[-1])
    kept, empty, over_long, truncated = {}, 0, 0, 0
    for row, length in enumerate(tokens):
        if length == 0:
            empty += 1
        elif length <= limit:
            kept[row] = length
        elif config.data.overflow == "drop":
            over_long += 1
        else:
            truncated += 1
            kept[row] = limit
    return Fate(
        tokens_of_row=kept,
        num_empty=empty,
        num_over_long=over_long,
        num_truncated=truncated,
    )


def first_boundary(length: int, boundaries: Sequence[int]) -> int:
    return min(boundary for boundary in boundaries if boundary >= length)


def rows_of(plan: BatchPlan) -> list[int]:
    """Rows of all ranks and steps."""
    return [
        row
        for rank in range(plan.world_size)
        for batch in plan.steps_of_rank(rank)
        for row in batch.row_indices.tolist()
    ]


def slots_of(batch: PlannedBatch) -> list[list[int]]:
    """The rows of every slot of a step."""
    rows = iter(batch.row_indices.tolist())
    return [list(itertools.islice(rows, count)) for count in batch.rows_per_slot.tolist()]


# Strategies


def lengths(
    *, min_rows: int = 1, max_rows: int = 80, longest: int = 200, min_tokens: int = 0
) -> st.SearchStrategy[list[int]]:
    """Row lengths in tokens: any, around multiples of 8, few values with many ties."""
    near_multiples = st.builds(
        lambda multiple, off: max(min_tokens, multiple * 8 + off),
        st.integers(1, max(1, longest // 8 - 1)),
        st.sampled_from([-1, 0, 1]),
    )
    row = st.integers(min_tokens, longest) | near_multiples | st.sampled_from([1, 7, 8, longest])
    return st.lists(row, min_size=min_rows, max_size=max_rows)


@st.composite
def align_rules(draw: st.DrawFn) -> Align:
    if draw(st.booleans()):
        return draw(st.integers(1, 40))
    rules, end = [], 0
    for _ in range(draw(st.integers(0, 3))):
        multiple = draw(st.integers(1, 24))
        end = (end // multiple + draw(st.integers(1, 6))) * multiple
        rules.append(AlignRule(multiple=multiple, up_to=end))
    rules.append(AlignRule(multiple=draw(st.integers(1, 64))))
    return tuple(rules)


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """A set of rows and a config that can be planned."""

    tokens: list[int]
    config: TrainConfig
    world_size: int

    @property
    def lengths(self) -> Lengths:
        return make_lengths(self.tokens)


@st.composite
def plan_cases(
    draw: st.DrawFn,
    strategy: str,
    *,
    max_rows: int = 80,
    size_rule: str | None = None,
    one_size: bool | None = None,
    slabs: bool = False,
) -> PlanCase:
    """Rows and a config of one strategy.

    size_rule: budget, samples, list or any of them; one_size: what the config says, or any;
    slabs: whether there may be several.
    """
    boundary_rules = ["least_padding"] * 3 + sorted(BOUNDARY_RULES)
    tokens = draw(lengths(max_rows=max_rows))
    tokens.insert(draw(st.integers(0, len(tokens))), draw(st.integers(1, 8)))
    align = draw(align_rules())
    changes: dict[str, Any] = {
        "batching.strategy": strategy,
        "batching.align": align
        if isinstance(align, int)
        else [rule.model_dump() for rule in align],
        "batching.num_buckets": draw(st.integers(1, 6)),
        "batching.rows_per_slab": draw(st.sampled_from([1, 4, 25, 1000])) if slabs else 1000,
        "batching.boundary_rule": draw(st.sampled_from(boundary_rules)),
        "batching.seed": draw(st.integers(0, 5)),
        "batching.one_size_per_length": draw(st.booleans()) if one_size is None else one_size,
        "data.max_length": draw(st.none() | st.integers(8, 220)),
        "data.overflow": draw(st.sampled_from(["truncate", "drop"])),
    }
    has_boundaries = strategy in ("bucketed", "packed")
    rules = ["budget", "samples", *(["list"] if has_boundaries else [])]
    rule = size_rule or draw(st.sampled_from(rules))
    if has_boundaries and (rule == "list" or draw(st.booleans())):
        ends = st.lists(st.integers(8, 210), min_size=1, max_size=5, unique=True)
        changes["batching.boundaries"] = sorted(draw(ends))
    changes |= _size_rule(draw, rule, len(changes.get("batching.boundaries", ())), align)
    return PlanCase(
        tokens=tokens,
        config=make_config(changes),
        world_size=draw(st.sampled_from([1, 1, 2, 3, 8])),
    )


def _size_rule(draw: st.DrawFn, rule: str, num_boundaries: int, align: Align) -> dict[str, Any]:
    longest_padded = max(210, align_slowly(200, align))
    changes: dict[str, Any] = {"batching.tokens_per_batch": None}
    if rule == "budget":
        changes["batching.tokens_per_batch"] = longest_padded + draw(st.integers(0, 2000))
    elif rule == "samples":
        changes["batching.samples_per_batch"] = draw(st.integers(1, 12))
    else:
        sizes = st.lists(st.integers(1, 12), min_size=num_boundaries, max_size=num_boundaries)
        changes["batching.batch_sizes"] = draw(sizes)
    return changes


def texts() -> st.SearchStrategy[str]:
    """Texts that YAML could take for something else, and any other."""
    tricky = [
        "", "1e-3", "12e4", ".5e1", "null", "~", "yes", "0x1f", "1_000", "2024-01-01", "1:30",
        "=", "<<", "- a", "a: b", "# no", "'", '"', "a\nb", " x ", "数据", "&a", "*a", "!t", "%",
        "@", "`", "|", ">", "{", "[", "\u2028", "\x85", "\ufeff", "\x00", "\t", "\r\n",
    ]  # fmt: skip
    hexes = st.text("0123456789e", min_size=1, max_size=8)
    printable = st.text(string.printable, max_size=12)
    return st.sampled_from(tricky) | hexes | printable | st.text(max_size=12)


def _positive(top: float = 1e3) -> st.SearchStrategy[float]:
    return st.floats(1e-12, top)


def _shares() -> st.SearchStrategy[float]:
    return st.floats(0.0, 1.0)


@st.composite
def _batching(draw: st.DrawFn) -> dict[str, Any]:
    ends = st.lists(st.integers(1, 4096), min_size=1, max_size=6, unique=True)
    boundaries = sorted(draw(ends)) if draw(st.booleans()) else []
    align = draw(align_rules())
    section: dict[str, Any] = {
        "strategy": draw(st.sampled_from(["fixed", "dynamic", "bucketed", "packed"])),
        "num_buckets": draw(st.integers(1, 64)),
        "boundary_rule": draw(st.sampled_from(sorted(BOUNDARY_RULES))),
        "boundaries": boundaries,
        "align": align if isinstance(align, int) else [rule.model_dump() for rule in align],
        "tokens_per_batch": None,
        "one_size_per_length": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**64)),
    }
    count = len(boundaries)
    if count and section["strategy"] in ("bucketed", "packed") and draw(st.booleans()):
        sizes = st.lists(st.integers(1, 99), min_size=count, max_size=count)
        return section | {"batch_sizes": draw(sizes)}
    rule = draw(st.sampled_from(["tokens_per_batch", "samples_per_batch"]))
    return section | {rule: draw(st.integers(1, 10**6))}


@st.composite
def _provenance(draw: st.DrawFn) -> dict[str, Any]:
    shapes = draw(st.lists(st.tuples(st.integers(1, 999), st.integers(1, 9999)), max_size=5))
    return {
        "data_fingerprint": draw(texts()),
        "num_samples": draw(st.integers(0, 10**9)),
        "device": draw(texts()),
        "versions": draw(st.dictionaries(texts(), texts(), max_size=4)),
        "study": draw(texts()),
        "trial": draw(st.integers(0, 10**5)),
        "shapes": shapes,
        "prediction": {
            "estimated_run_s": draw(_positive(1e9)),
            "estimated_real_tokens_per_s": draw(_positive(1e9)),
            "estimated_steady_real_tokens_per_s": draw(_positive(1e9)),
            "estimated_compile_s": draw(_positive(1e9)),
            "effective_token_fraction": draw(_shares()),
            "peak_bytes": draw(st.integers(0, 2**40)),
            "step_s": draw(st.just([]) | st.just([0.25] * len(shapes))),
        },
        "length_percentiles": draw(st.just([]) | st.just(list(range(101)))),
        "cost": draw(st.none() | st.just({"step_s": [0.02, 1e-4, 0.0], "compile_s": [5.0, 0.9]})),
    }


@st.composite
def _model(draw: st.DrawFn) -> dict[str, Any]:
    num_kv_heads, groups = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    num_heads = num_kv_heads * groups
    origin = draw(
        st.sampled_from(
            [
                {},
                {"source": "qwen"},
                {"factory": "my.models:make"},
                {"source": "qwen", "lora": {"rank": 4, "projections": ["q_proj", "up_proj"]}},
            ]
        )
    )
    scaling = {"kind": "llama3", "factor": 8.0, "high_freq_factor": 4.5}
    return {
        "vocab_size": draw(st.integers(1, 10**6)),
        "width": num_heads * 2 * draw(st.integers(1, 64)),
        "num_layers": draw(st.integers(1, 100)),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": draw(st.none() | st.just(64)),
        "ffn_width": draw(st.integers(1, 10**5)),
        "positions": draw(st.sampled_from(["rotary", "learned"])),
        "max_positions": draw(st.integers(1, 10**6)),
        "rope_theta": draw(_positive(1e9)),
        "rope_scaling": draw(st.none() | st.just(scaling)),
        "norm_eps": draw(_positive()),
        "qk_norm": draw(st.booleans()),
        "attention_bias": draw(st.sampled_from(["none", "qkv", "qkvo"])),
        "tie_embedding": draw(st.booleans()),
        "init_std": draw(_positive()),
        **origin,
    }


@st.composite
def _loop(draw: st.DrawFn) -> dict[str, Any]:
    maybe_int = st.none() | st.integers(1, 10**9)
    window = draw(
        st.fixed_dictionaries({"tokens_per_update": maybe_int})
        | st.fixed_dictionaries({"steps_per_update": st.integers(1, 99)})
    )
    return window | {
        "epochs": draw(st.integers(1, 1000)),
        "max_steps": draw(maybe_int),
        "clip_norm": draw(st.none() | _positive()),
        "clip_quantile": draw(st.none() | st.just(0.9)),
        "clip_window": draw(st.integers(10, 10_000)),
        "out": draw(texts()),
        "checkpoint_every_steps": draw(st.integers(1, 10**6)),
        "keep_last": draw(st.integers(1, 100)),
        "async_checkpoint": draw(st.booleans()),
        "tensorboard": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32)),
    }


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    """Any valid config, every field drawn."""
    maybe_int = st.none() | st.integers(1, 10**9)
    content = {
        "data": {
            "path": draw(texts()),
            "input_column": draw(texts()),
            "label_column": draw(st.none() | texts()),
            "pad_id": draw(st.integers(0, 10**6)),
            "max_length": draw(maybe_int),
            "overflow": draw(st.sampled_from(["truncate", "drop", "error"])),
        },
        "batching": draw(_batching()),
        "graph": {
            "mode": draw(st.sampled_from(["static", "dynamic"])),
            "jit_level": draw(st.sampled_from(["O0", "O1", "O2"])),
            "compile_cache": draw(st.booleans()),
        },
        "model": draw(_model()),
        "optimizer": {
            "learning_rate": draw(_positive()),
            "beta1": draw(st.floats(0.0, 1.0, exclude_max=True)),
            "beta2": draw(st.floats(0.0, 1.0, exclude_max=True)),
            "eps": draw(_positive()),
            "weight_decay": draw(st.floats(0.0, 10.0)),
            "no_decay": draw(st.sampled_from([[], ["norms"], ["norms", "biases", "embeddings"]])),
        },
        "schedule": {
            "kind": draw(st.sampled_from(["cosine", "linear", "constant"])),
            "progress": draw(st.sampled_from(["steps", "tokens"])),
            "decay_fraction": draw(_shares()),
            "warmup_fraction": draw(_shares()),
            "min_learning_rate_fraction": draw(_shares()),
        },
        "train": draw(_loop()),
        "evaluation": draw(
            st.none()
            | st.just({"path": "held_out.mindrecord", "every_steps": 50, "max_rows": 1000})
            | st.just({"fraction": 0.05, "seed": 3})
        ),
        "device": draw(st.sampled_from(["auto", "cpu", "ascend"])),
        "provenance": draw(st.none() | _provenance()),
    }
    return parse_model(TrainConfig, content, source="test")

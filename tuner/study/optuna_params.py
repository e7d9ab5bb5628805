"""A point of the space as Optuna's parameters, and back.

Whether an op group stays in fp32 is a parameter of its own, so that the sampler learns about each
group. They exist only below fp32, and only for the groups that are worth asking about there. A
study of an earlier version has neither them nor a compute dtype: it is fp32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from optuna.trial import Trial

from tuner.config.codec import to_plain
from tuner.config.schema import OP_GROUPS, AlignRule
from tuner.study.space import Align, Choice, SearchSpace

GROUP_PREFIX = "fp32_"
NEEDED = {"strategy", "align", "longest_rows_per_batch", "graph_mode", "jit_level"}

Sensitive = Mapping[str, tuple[str, ...]]
"""Compute dtype -> op groups whose precision is worth asking about there."""


def suggest_choice(
    trial: Trial, space: SearchSpace, sensitive: Sensitive, fixed: Mapping[str, Any]
) -> Choice:
    """Let Optuna fill a point of the space.

    Args:
        trial: A trial that runs.
        space: What may be chosen.
        sensitive: Op groups to ask about; the others run in the compute dtype.
        fixed: Parameters that were enqueued with the trial; empty if there were none.
    """
    strategy = trial.suggest_categorical("strategy", list(space.strategy))
    buckets = None
    if strategy == "bucketed":
        buckets = trial.suggest_int("num_buckets", space.num_buckets.low, space.num_buckets.high)
    lengths = 1
    if strategy == "packed":
        allowed = space.packed_lengths
        lengths = trial.suggest_int("packed_lengths", allowed.low, allowed.high)
    align = trial.suggest_categorical("align", [_format_align(align) for align in space.align])
    rows = trial.suggest_categorical("longest_rows_per_batch", list(space.longest_rows_per_batch))
    mode = trial.suggest_categorical("graph_mode", list(space.graph_mode))
    level = trial.suggest_categorical("jit_level", list(space.jit_level))
    dtype = trial.suggest_categorical("compute_dtype", list(space.compute_dtype))
    return Choice(
        strategy=strategy,
        num_buckets=buckets,
        packed_lengths=lengths,
        align=_parse_align(align),
        longest_rows_per_batch=rows,
        graph_mode=mode,
        jit_level=level,
        compute_dtype=dtype,
        fp32_ops=tuple(
            group
            for group in _groups_asked(dtype, sensitive, fixed)
            if trial.suggest_categorical(GROUP_PREFIX + group, [False, True])
        ),
    )


def to_params(choice: Choice) -> dict[str, Any]:
    """All parameters of a point; the inverse of `to_choice`.

    Below fp32 every op group is among them, so that none is left to the sampler whatever groups
    are asked about when the point comes up.
    """
    params: dict[str, Any] = {
        "strategy": choice.strategy,
        "align": _format_align(choice.align),
        "longest_rows_per_batch": choice.longest_rows_per_batch,
        "graph_mode": choice.graph_mode,
        "jit_level": choice.jit_level,
        "compute_dtype": choice.compute_dtype,
    }
    if choice.num_buckets is not None:
        params["num_buckets"] = choice.num_buckets
    if choice.strategy == "packed":
        params["packed_lengths"] = choice.packed_lengths
    if choice.compute_dtype != "fp32":
        params |= {GROUP_PREFIX + group: group in choice.fp32_ops for group in OP_GROUPS}
    return params


def to_choice(params: Mapping[str, Any]) -> Choice:
    """The point of parameters that hold all of `NEEDED`."""
    return Choice(
        strategy=params["strategy"],
        num_buckets=params.get("num_buckets"),
        packed_lengths=params.get("packed_lengths", 1),
        align=_parse_align(params["align"]),
        longest_rows_per_batch=params["longest_rows_per_batch"],
        graph_mode=params["graph_mode"],
        jit_level=params["jit_level"],
        compute_dtype=params.get("compute_dtype", "fp32"),
        fp32_ops=tuple(group for group in OP_GROUPS if params.get(GROUP_PREFIX + group)),
    )


def _groups_asked(dtype: str, sensitive: Sensitive, fixed: Mapping[str, Any]) -> list[str]:
    if dtype == "fp32":
        return []
    return [
        group
        for group in OP_GROUPS
        if group in sensitive.get(dtype, ()) or fixed.get(GROUP_PREFIX + group)
    ]


def _format_align(align: Align) -> str:
    """Optuna's categories are plain values: a number as it is, a table as JSON."""
    plain = align if isinstance(align, int) else [to_plain(rule) for rule in align]
    return json.dumps(plain)


def _parse_align(text: str) -> Align:
    plain = json.loads(text)
    return plain if isinstance(plain, int) else tuple(AlignRule(**rule) for rule in plain)

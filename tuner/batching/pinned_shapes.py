"""The same batching with none but given shapes, for rows that they were not made for.

The number of rows in a batch follows from the number of rows in its bucket, and some padded
lengths from the longest row: other data would have other shapes. Here both are written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner.batching.grouping import Shape
from tuner.config.override import override_config
from tuner.config.schema import TrainConfig


def pin_shapes(config: TrainConfig, shapes: Sequence[Shape]) -> TrainConfig:
    """A config whose plan has a subset of these shapes on one rank, whatever the rows are.

    Rows longer than all of them meet the overflow rule. `fixed` is written as one bucket,
    `dynamic` as a table of alignment whose every rule has one multiple.

    Args:
        config: The config whose plan they are of.
        shapes: (B, L), at least one. Of several B of one L the largest is kept, and of strategy
            `dynamic` the largest of all.
    """
    largest = {length: size for size, length in sorted(shapes)}
    lengths = sorted(largest)
    sizes = [largest[length] for length in lengths]
    pinned: dict[str, Any] = {
        "batching.tokens_per_batch": None,
        "batching.one_size_per_length": True,
    }
    if config.batching.strategy == "dynamic":
        pinned |= _any_of(lengths, config.data.max_length)
        pinned |= {"batching.samples_per_batch": max(sizes)}
    else:
        pinned |= {
            "batching.strategy": "packed" if config.batching.strategy == "packed" else "bucketed",
            "batching.boundaries": lengths,
            "batching.num_buckets": len(lengths),
            "batching.samples_per_batch": None,
            "batching.batch_sizes": sizes,
        }
    return override_config(config, pinned, source="tuned shapes")


def _any_of(lengths: list[int], max_length: int | None) -> dict[str, Any]:
    """Alignment to the first of these lengths; rows longer than the last meet the overflow rule.

    Up to the length of a rule its only multiple is that length; the last one is the limit.
    """
    longest = lengths[-1]
    rules = [{"multiple": length, "up_to": length} for length in lengths[:-1]]
    return {
        "batching.align": [*rules, {"multiple": longest}],
        "data.max_length": longest if max_length is None else min(max_length, longest),
    }

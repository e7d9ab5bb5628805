"""What `varseq-data` prints: values in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tabulate import tabulate

from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.waste import LengthProfile

Edges = npt.NDArray[np.int64]

NUM_BINS = 16
BAR_COLUMNS = 40
# Beyond this spread, bins of equal width would put nearly all rows into the first.
LINEAR_SPREAD = 8


def format_profile(
    title: Sequence[tuple[str, str]],
    rows_by_length: LengthHistogram,
    profile: LengthProfile,
    bar: str = "█",
) -> str:
    """What the lengths are and what simple padding wastes.

    Args:
        title: (name, value) lines about the file.
        rows_by_length: The lengths.
        profile: Of these lengths.
        bar: The character that histogram bars are made of.
    """
    batches = f"random batches of {profile.batch_size}, each padded to its longest (expected)"
    waste = [
        ("all rows padded to the longest", profile.fraction_when_padded_to_longest),
        (batches, profile.fraction_of_random_batches),
    ]
    return "\n\n".join(
        [
            tabulate(title, tablefmt="plain", disable_numparse=True),
            _format_percentiles(profile),
            format_histogram(rows_by_length, bar),
            tabulate(
                [(name, f"{share:.3f}", f"{1 - share:.1%}") for name, share in waste],
                headers=["padding", "effective token fraction", "padding tokens"],
                disable_numparse=True,
            ),
        ]
    )


def profile_values(profile: LengthProfile) -> dict[str, Any]:
    """The same for machines: JSON values."""
    return {
        "num_samples": profile.num_samples,
        "total_tokens": profile.total_tokens,
        "shortest": profile.shortest,
        "longest": profile.longest,
        "num_distinct_lengths": profile.num_distinct_lengths,
        "percentiles": {f"p{percent}": size for percent, size in profile.percentiles.items()},
        "batch_size": profile.batch_size,
        "effective_token_fraction": {
            "pad_to_longest": profile.fraction_when_padded_to_longest,
            "random_batches_padded_to_longest": profile.fraction_of_random_batches,
        },
    }


def format_histogram(rows_by_length: LengthHistogram, bar: str = "█") -> str:
    """Rows by length; equal bins for narrow data, growing ones for a long tail."""
    edges = _choose_edges(rows_by_length)
    counts, _ = np.histogram(
        rows_by_length.lengths,
        np.append(edges[:-1], edges[-1] + 1),
        weights=rows_by_length.counts,
    )
    scale = BAR_COLUMNS / int(counts.max())
    rows = []
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        is_last = high == edges[-1]
        name = f"{low}-{high if is_last else high - 1}"
        columns = max(round(int(count) * scale), int(count > 0))
        rows.append((name, int(count), bar * columns))
    return tabulate(
        rows,
        headers=["tokens", "rows", ""],
        colalign=("right", "right", "left"),
        tablefmt="simple",
    )


def format_table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """A table; numbers to the right, with thousands marked. No headers, no lines."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
    align = ["right" if isinstance(cell, int) else "left" for cell in rows[0]] if rows else None
    style = "simple" if headers else "plain"
    return tabulate(cells, headers, tablefmt=style, colalign=align, disable_numparse=True)


def format_counts(counts: Mapping[str, int]) -> str:
    """`3 x no text, 1 x unknown format`, most frequent first; `-` for none."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} x {name}" for name, count in ordered) or "-"


def _choose_edges(rows_by_length: LengthHistogram) -> Edges:
    """Ascending bin edges; each bin holds its lower edge, the last bin both."""
    lengths, counts = rows_by_length.lengths, rows_by_length.counts
    low, high = int(lengths[0]), int(lengths[-1])
    median = lengths[np.searchsorted(np.cumsum(counts), -(-counts.sum() // 2))]
    middle = max(int(median), 1)
    if high <= LINEAR_SPREAD * middle and high <= LINEAR_SPREAD * max(low, high // LINEAR_SPREAD):
        edges = np.linspace(low, high, NUM_BINS + 1)
    else:
        edges = np.geomspace(max(low, 1), high, NUM_BINS + 1)
        edges[0] = low
    distinct: Edges = np.unique(np.round(edges).astype(np.int64))
    return distinct if len(distinct) > 1 else np.array([low, low])


def _format_percentiles(profile: LengthProfile) -> str:
    names = ["min", *(f"p{percent}" for percent in profile.percentiles), "max", "distinct"]
    values = [
        profile.shortest,
        *profile.percentiles.values(),
        profile.longest,
        profile.num_distinct_lengths,
    ]
    return tabulate([values], headers=names)

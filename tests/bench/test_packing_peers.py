"""Packed rows against TRL's, seqpacker's and plain first-fit decreasing: how full, how fast.

`python -m pytest -m slow -s tests/bench/test_packing_peers.py` prints a table of
results/benchmarks/plans.md. The peers are in the extra `peers`; without TRL all of it is skipped.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from length_sets import azure_tokens, lognormal_tokens, mix_tokens, uniform_tokens
from packers import TrlPacker, first_fit_decreasing, our_plan, our_rows, seqpacker_rows
from tabulate import tabulate
from turns import median_seconds

pytestmark = pytest.mark.slow

NUM_TURNS = 3
WORSE_AT_MOST = 0.001
CASES = {
    # Name -> lengths, tokens of a packed row.
    "lognormal 20,000": (lambda: lognormal_tokens(20_000), 4096),
    "uniform 20,000": (lambda: uniform_tokens(20_000), 4096),
    "shared mix, rows of 512": (mix_tokens, 512),
    "shared mix, rows of 2,048": (mix_tokens, 2048),
    "azure 2023 conversations": (azure_tokens, 14_096),
}
TRL_DEFAULT_ROWS = 1000
WHOLE_PLAN = "ours, whole plan"
PLACEMENT = "ours, placement"
FIRST_FIT = "first-fit decreasing"
TRL_PLACEMENT = "TRL bfd, placement"


def num_packed_rows(tokens, capacity, row_of_sample):
    """Rows of a placement that holds every sample and no row too many."""
    used = np.bincount(row_of_sample, weights=np.sort(tokens)[::-1])
    assert len(row_of_sample) == len(tokens)
    assert 0 < used.min() <= used.max() <= capacity
    return len(used)


def num_listed_rows(tokens, capacity, lengths_of_rows):
    """Rows of a peer, whose lengths must be those that it got."""
    assert max(map(sum, lengths_of_rows)) <= capacity
    assert sorted(itertools.chain.from_iterable(lengths_of_rows)) == sorted(tokens.tolist())
    return len(lengths_of_rows)


def num_planned_rows(tokens, capacity, plan):
    assert len(plan.row_indices) == len(tokens)
    starts = np.cumsum(plan.rows_per_slot) - plan.rows_per_slot
    assert np.add.reduceat(tokens[plan.row_indices], starts).max() <= capacity
    return len(plan.rows_per_slot)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_as_full_as_those_of_the_best_peer_and_sooner_packed(name):
    pytest.importorskip("trl.data_utils")
    read_tokens, capacity = CASES[name]
    tokens = read_tokens()
    trl = TrlPacker(tokens)
    works = {
        PLACEMENT: lambda: our_rows(tokens, capacity),
        WHOLE_PLAN: lambda: our_plan(tokens, capacity),
        FIRST_FIT: lambda: first_fit_decreasing(tokens, capacity),
        "TRL bfd, all at once": lambda: trl.pack(capacity, "bfd", None),
        "TRL bfd_split, all at once": lambda: trl.pack(capacity, "bfd_split", None),
        "TRL bfd, default (1,000)": lambda: trl.pack(capacity, "bfd", TRL_DEFAULT_ROWS),
    }
    count = dict.fromkeys(works, num_listed_rows) | {
        PLACEMENT: num_packed_rows,
        WHOLE_PLAN: num_planned_rows,
        FIRST_FIT: num_packed_rows,
    }
    num_rows = {way: count[way](tokens, capacity, work()) for way, work in works.items()}
    num_rows[TRL_PLACEMENT] = num_rows["TRL bfd, all at once"]
    works[TRL_PLACEMENT] = lambda: trl.placement_seconds(capacity)
    taken_s = median_seconds(works, num_turns=NUM_TURNS)
    show(name, tokens, capacity, num_rows, taken_s)
    filled = {way: tokens.sum() / (rows * capacity) for way, rows in num_rows.items()}
    assert filled[WHOLE_PLAN] >= max(filled.values()) - WORSE_AT_MOST
    peers = set(works) - {PLACEMENT, WHOLE_PLAN}
    assert taken_s[WHOLE_PLAN] < min(taken_s[way] for way in peers)


def show(name, tokens, capacity, num_rows, taken_s):
    lines = [
        (
            way,
            f"{rows:,}",
            f"{100 * tokens.sum() / (rows * capacity):.2f}",
            f"{taken_s[way]:.4f}",
            f"{taken_s[way] / taken_s[WHOLE_PLAN]:.1f}",
        )
        for way, rows in num_rows.items()
    ]
    # Room for all tokens, and no row can be shared by two samples of over half of it.
    least = max(-(-tokens.sum() // capacity), (2 * tokens > capacity).sum())
    print(f"\n\n{name}: {len(tokens):,} samples, at least {least:,} rows of {capacity:,} tokens\n")
    headers = ["way", "rows", "filled %", "CPU s", "x whole plan"]
    print(tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True))


@pytest.mark.parametrize("name", CASES)
def test_rows_are_as_full_as_those_of_seqpacker(name):
    pytest.importorskip("seqpacker")
    read_tokens, capacity = CASES[name]
    tokens = read_tokens()
    num_rows = len(our_plan(tokens, capacity).rows_per_slot)
    for strategy in ("ffd", "bfd", "mffd", "obfd"):
        peer_rows = len(seqpacker_rows(tokens, capacity, strategy))
        print(f"\n{name}: seqpacker {strategy} {peer_rows:,} rows, ours {num_rows:,}")
        utilisation = tokens.sum() / capacity
        assert utilisation / num_rows >= utilisation / peer_rows - WORSE_AT_MOST

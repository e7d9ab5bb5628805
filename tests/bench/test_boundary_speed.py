"""How long exact boundaries take, how much memory, and what they save over common rules.

`python -m pytest -m slow -s tests/bench` prints the tables of results/benchmarks/boundaries.md.
"""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from tabulate import tabulate

from tuner.batching.boundaries import solve_boundaries, solve_least_padding
from tuner.batching.boundary_rules import BOUNDARY_RULES

pytestmark = pytest.mark.slow

MAX_BUCKETS = 32


def seconds_of(work, repeats=3):
    """Best of some runs: other processes only ever add."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


def peak_mb_of(work):
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def problem(num_candidates, rises):
    rng = np.random.default_rng(0)
    candidates = np.arange(1, num_candidates + 1) * 8
    row_cost = candidates.astype(float)
    if not rises:
        row_cost += rng.random(num_candidates) * 100
    return {
        "candidates": candidates,
        "counts": rng.integers(1, 1000, num_candidates),
        "row_cost": row_cost,
        "shape_cost": rng.random(num_candidates) * 1e6,
    }


def test_every_number_of_buckets_up_to_32_is_solved_at_once():
    limits_s = {(1024, True): 0.3, (8192, True): 2.0, (16384, True): 4.0, (1024, False): 5.0}
    lines = []
    for (num_candidates, rises), limit_s in limits_s.items():
        given = problem(num_candidates, rises)

        def solve(given=given):
            solve_boundaries(**given, max_buckets=MAX_BUCKETS)

        taken_s, peak_mb = seconds_of(solve), peak_mb_of(solve)
        kind = "does not fall" if rises else "falls somewhere"
        lines.append((num_candidates, kind, f"{taken_s:.3f}", f"{peak_mb:.1f}", limit_s))
        assert taken_s <= limit_s
        assert peak_mb <= (48 if rises else 64)
    headers = ["candidates", "cost of a row", "s for K = 1..32", "peak MB", "limit s"]
    print("\n" + tabulate(lines, headers=headers, tablefmt="github"))


def test_least_padding_of_a_million_rows():
    tokens = np.clip(np.random.default_rng(0).lognormal(6, 1, 10**6), 1, 8192).astype(np.int32)
    lines = []
    for align in (8, 1):
        taken_s = seconds_of(lambda align=align: solve_least_padding(tokens, align, MAX_BUCKETS))
        lines.append((align, f"{taken_s:.3f}"))
        assert taken_s <= 2.0
    print("\n" + tabulate(lines, headers=["align", "s from 1,000,000 lengths"], tablefmt="github"))


def synthetic_sets():
    rng = np.random.default_rng(0)
    chat = rng.lognormal(np.log(120), 0.6, 140_000)
    documents = rng.lognormal(np.log(2000), 0.5, 60_000)
    return {
        "A": np.clip(rng.lognormal(np.log(300), 1.0, 200_000), 1, 4096).astype(int),
        "B": np.clip(np.concatenate([chat, documents]), 1, 8192).astype(int),
    }


def test_common_rules_pad_more():
    lines = []
    for name, tokens in synthetic_sets().items():
        for num_buckets in (4, 8, 16, 32):
            percent = {}
            for rule, choose in BOUNDARY_RULES.items():
                ends = np.array(choose(tokens, 8, num_buckets))
                padded = ends[np.searchsorted(ends, tokens)].sum()
                percent[rule] = 100 * (1 - tokens.sum() / padded)
            assert percent["least_padding"] == min(percent.values())
            lines.append([name, num_buckets, *(f"{value:.1f}" for value in percent.values())])
    print("\n" + tabulate(lines, headers=["set", "K", *BOUNDARY_RULES], tablefmt="github"))

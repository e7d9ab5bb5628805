"""What boundaries of least time save in seconds of a run, and how long they take to solve.

`python -m pytest -m slow -s tests/bench/test_least_time.py` prints tables of
results/benchmarks/boundaries.md.
"""

from __future__ import annotations

import numpy as np
import pytest
from length_sets import mix_tokens
from strategies import make_config
from tabulate import tabulate
from turns import median_seconds

from tuner.batching import boundaries
from tuner.batching.bucket_time import RunCost
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.screen import Screen

pytestmark = pytest.mark.slow

# Static graphs of a decoder of two layers on two cores, fitted within 8 %.
OVERHEAD_S, TOKEN_S, ATTENTION_S = 0.0208, 1.268e-4, 2.787e-7
COMPILE_S = 6.0
# A further shape of one dynamic graph only takes its memory.
VISIT_S = 0.02
BUDGETS = {512: 4096, 2048: 8192}
MAX_BUCKETS = 64
COMMON = {
    "least padding, 8": {"batching.num_buckets": 8},
    "least padding, 32": {"batching.num_buckets": 32},
    "ten quantiles": {"batching.num_buckets": 10, "batching.boundary_rule": "quantile"},
    "to the longest": {"batching.strategy": "fixed"},
}


def run_cost(epochs, shape_s):
    return RunCost(
        step_s=lambda shape: (
            OVERHEAD_S + TOKEN_S * shape[0] * shape[1] + ATTENTION_S * shape[0] * shape[1] ** 2
        ),
        compile_s=lambda shape: shape_s,
        epochs=epochs,
        world_size=1,
    )


def planned(screen, config, cost):
    """Shapes in use, and seconds of the run: whole steps, and every shape once."""
    counts = {shape: n for shape, n in screen.plan(config).shape_counts.items() if n}
    steps_s = sum(count * cost.step_s(shape) for shape, count in counts.items())
    return len(counts), cost.epochs * steps_s + sum(map(cost.compile_s, counts))


@pytest.mark.parametrize("is_static", [True, False], ids=["static", "dynamic"])
def test_no_other_boundaries_are_faster(is_static, monkeypatch):
    lines = []
    for longest, budget in BUDGETS.items():
        histogram = LengthHistogram.from_tokens(mix_tokens(longest))
        screen = Screen(histogram)
        sizes = {
            "batching.tokens_per_batch": budget,
            "batching.one_size_per_length": is_static,
        }
        config = make_config({**sizes, "batching.align": 8})
        for epochs in (1, 3, 10):
            cost = run_cost(epochs, COMPILE_S if is_static else VISIT_S)
            seconds = {}
            for name, limit in {"whole": 1024, "shared": 0}.items():
                monkeypatch.setattr(boundaries, "WHOLE_STEPS_UP_TO", limit)
                curve = boundaries.solve_least_time(
                    histogram.lengths, config.batching, cost, MAX_BUCKETS, histogram.counts
                )
                ends = {"batching.boundaries": list(curve.best(MAX_BUCKETS))}
                solved = make_config({**sizes, "batching.align": 8, **ends})
                num_shapes, seconds[name] = planned(screen, solved, cost)
                if name == "whole":
                    shapes = num_shapes
                    assert seconds[name] == pytest.approx(curve.cost.min(), rel=1e-9)
            for name, changes in COMMON.items():
                align = 8 if name.startswith("least") else 32
                plain = make_config({**sizes, "batching.align": align, **changes})
                seconds[name] = planned(screen, plain, cost)[1]
            assert seconds["whole"] == min(seconds.values())
            lines.append(
                [longest, epochs, shapes, *(f"{value:,.0f}" for value in seconds.values())]
            )
    headers = ["maximum", "epochs", "shapes", "whole steps", "shared steps", *COMMON]
    print("\n\n" + tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True))


def test_whole_steps_are_solved_in_a_moment():
    lines = []
    for num_candidates, limit_s in {64: 0.05, 256: 0.1, 640: 0.3, 1024: 1.0}.items():
        lengths = np.arange(1, num_candidates + 1) * 8
        counts = np.random.default_rng(0).integers(1, 1000, num_candidates)
        batching = make_config({"batching.tokens_per_batch": int(8 * lengths[-1])}).batching
        cost = run_cost(3, COMPILE_S)

        def solve(lengths=lengths, batching=batching, cost=cost, counts=counts):
            boundaries.solve_least_time(lengths, batching, cost, MAX_BUCKETS, counts)

        taken_s = median_seconds({"ours": solve}, num_turns=3)["ours"]
        lines.append((num_candidates, f"{1000 * taken_s:.1f}", f"{1000 * limit_s:.0f}"))
        assert taken_s <= limit_s
    headers = ["candidates", "CPU ms for K = 1..64", "limit ms"]
    print("\n\n" + tabulate(lines, headers=headers, tablefmt="github"))

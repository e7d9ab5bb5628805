"""A tuned config on other rows: the figures by hand from the plans, and what they advise."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import make_config, make_lengths, skewed_tokens

from tuner.batching.boundaries import solve_least_time
from tuner.batching.bucket_time import RunCost
from tuner.batching.pinned_shapes import pin_shapes
from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.config.schema import CostRecord, PredictionRecord, ProvenanceConfig
from tuner.errors import BadInputError
from tuner.simulate.cost import DEFAULT_SOURCE
from tuner.simulate.drift import find_drift
from tuner.simulate.length_shift import length_percentiles

STEP = (0.02, 1.3e-4, 2.8e-7)
COMPILE = (5.0, 2.0)
ROWS = 3000
MANY_ROWS = 12000
"""So many that boundaries solved for them fit others of their kind: steps are whole."""


def tuned_config(tokens, strategy="bucketed", **changes):
    """A config as a study leaves it: boundaries for these rows, and what it knows."""
    config = make_config(
        {
            "batching.strategy": strategy,
            "batching.num_buckets": 8,
            "batching.tokens_per_batch": 8192,
            "train.epochs": 30,
            **changes,
        }
    )
    lengths = make_lengths(tokens)
    config = resolve_boundaries(lengths, config)
    plan = plan_batches(lengths, config)
    tuned = ProvenanceConfig(
        data_fingerprint="f",
        num_samples=len(tokens),
        device="CPU",
        versions={},
        study="s",
        trial=0,
        shapes=plan.shapes,
        prediction=PredictionRecord(
            estimated_run_s=1.0,
            estimated_real_tokens_per_s=1.0,
            estimated_steady_real_tokens_per_s=1.0,
            estimated_compile_s=1.0,
            effective_token_fraction=1.0,
            peak_bytes=1,
        ),
        length_percentiles=length_percentiles(np.array(tokens)),
        cost=CostRecord(step_s=STEP, compile_s=COMPILE),
    )
    return config, tuned


def solved_config(tokens, num_buckets=8):
    """As tuned under these very costs."""
    cost = RunCost(
        step_s=lambda shape: step_s(*shape),
        compile_s=lambda shape: COMPILE[0] + COMPILE[1] * step_s(*shape),
        epochs=30,
        world_size=1,
    )
    batching = make_config({"batching.tokens_per_batch": 8192}).batching
    curve = solve_least_time(np.array(tokens), batching, cost, num_buckets)
    return tuned_config(tokens, **{"batching.boundaries": list(curve.boundaries[-1])})


def step_s(size, length):
    return STEP[0] + STEP[1] * size * length + STEP[2] * size * length**2


def tokens_per_s_by_hand(plan, config):
    """Steps counted one by one at a + b B L + c B L^2, a compile for every shape."""
    epoch_s = sum(step_s(*batch.shape) for batch in plan.steps_of_rank(0))
    compile_s = sum(COMPILE[0] + COMPILE[1] * step_s(*shape) for shape in plan.shapes)
    epochs = config.train.epochs
    return epochs * int(plan.real_tokens.sum()) / (epochs * epoch_s + compile_s)


@pytest.mark.parametrize("strategy", ["bucketed", "packed", "fixed"])
def test_the_tuned_plan_is_counted_and_costed_by_hand(strategy):
    config, tuned = tuned_config(skewed_tokens(ROWS), strategy)
    tokens = [min(2 * length, 2048) for length in skewed_tokens(2000, seed=5)]
    drift = find_drift(config, tuned, make_lengths(tokens))
    plan = plan_batches(make_lengths(tokens), pin_shapes(config, tuned.shapes))
    assert drift.tuned.real_tokens_per_s == pytest.approx(tokens_per_s_by_hand(plan, config))
    padded = sum(size * length for size, length in zip(
        plan.batch_sizes.tolist(), plan.padded_lengths.tolist(), strict=True
    ))  # fmt: skip
    real = int(plan.real_tokens.sum())
    assert drift.tuned.effective_token_fraction == pytest.approx(real / padded)
    assert set(drift.tuned.padded_lengths) == {length for _, length in plan.shapes}


def test_padded_lengths_solved_anew_are_a_plan_of_these_rows_and_no_slower_than_others():
    config, tuned = tuned_config(skewed_tokens(ROWS))
    lengths = make_lengths([min(2 * length, 2048) for length in skewed_tokens(2000, seed=5)])
    drift = find_drift(config, tuned, lengths)

    def speed(**batching):
        changes = {f"batching.{name}": value for name, value in batching.items()}
        base = {"batching.tokens_per_batch": 8192, "train.epochs": 30}
        other = make_config({**base, **changes})
        return tokens_per_s_by_hand(plan_batches(lengths, other), other)

    anew = drift.anew
    assert anew.real_tokens_per_s == pytest.approx(speed(boundaries=list(anew.padded_lengths)))
    for num_buckets in range(1, 9):
        for rule in ("least_padding", "quantile", "exponential"):
            tried = speed(num_buckets=num_buckets, boundary_rule=rule)
            assert anew.real_tokens_per_s > 0.998 * tried


def test_rows_of_the_same_source_keep_the_config():
    config, tuned = solved_config(skewed_tokens(MANY_ROWS))
    drift = find_drift(config, tuned, make_lengths(skewed_tokens(MANY_ROWS, seed=9)))
    assert drift.advice == "keep"
    assert abs(drift.speed_loss) < 0.03
    assert drift.shift is not None and drift.shift.statistic < 0.05


def test_much_shorter_rows_are_worth_another_study():
    config, tuned = tuned_config([1000] * 500 + [2000] * 500, **{"batching.num_buckets": 2})
    drift = find_drift(config, tuned, make_lengths(skewed_tokens(ROWS, longest=600)))
    assert drift.advice == "retune"
    assert drift.speed_loss > 0.5
    assert drift.tuned.effective_token_fraction < 0.5 < drift.anew.effective_token_fraction
    assert drift.shift is not None
    assert (drift.shift.statistic, drift.shift.share_before) == (1.0, 0.0)


def test_rows_that_fit_nowhere_are_counted_and_their_loss_is_worth_another_study():
    config, tuned = tuned_config([100, 200, 300] * 300, **{"batching.num_buckets": 3})
    tokens = [100, 200, 300] * 300 + [600] * 100
    drift = find_drift(config, tuned, make_lengths(tokens))
    assert drift.num_over_long == 100
    # Cut to 304: 296 of 600 tokens a row of 240,000 in all.
    assert drift.token_loss == pytest.approx(29_600 / 240_000)
    assert drift.advice == "retune"
    error = {"data.overflow": "error"}
    config, tuned = tuned_config([100, 200, 300] * 300, **error)
    with pytest.raises(BadInputError, match="overflow is error and 100 rows"):
        find_drift(config, tuned, make_lengths(tokens))


def test_a_dynamic_graph_loses_nothing_but_has_its_one_compile():
    config, tuned = tuned_config(
        skewed_tokens(ROWS), "dynamic", **{"graph.mode": "dynamic", "batching.align": 16}
    )
    drift = find_drift(config, tuned, make_lengths(skewed_tokens(ROWS, seed=3)))
    assert drift.advice == "keep"
    assert set(drift.tuned.padded_lengths) <= {length for _, length in tuned.shapes}


def test_a_larger_row_than_the_budget_still_has_a_plan_to_compare_with():
    config, tuned = tuned_config([100] * 50, **{"batching.tokens_per_batch": 208})
    drift = find_drift(config, tuned, make_lengths([100] * 50 + [900]))
    assert max(drift.anew.padded_lengths) == 904
    listed = make_config(
        {
            "batching.boundaries": [104],
            "batching.tokens_per_batch": None,
            "batching.batch_sizes": [2],
            "train.epochs": 30,
        }
    )
    assert find_drift(listed, tuned, make_lengths([100] * 50 + [900])).anew == drift.anew


def test_an_older_file_is_compared_under_the_default_costs_and_says_so():
    config, tuned = solved_config(skewed_tokens(MANY_ROWS))
    old = tuned.model_copy(update={"cost": None, "length_percentiles": ()})
    drift = find_drift(config, old, make_lengths(skewed_tokens(MANY_ROWS, seed=9)))
    assert drift.cost_source == DEFAULT_SOURCE
    assert drift.shift is None
    assert drift.advice == "keep"

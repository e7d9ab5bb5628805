"""Pinned shapes: whatever rows come, no shape but the tuned ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import admit_slowly, make_config, make_lengths, plan_cases, rows_of
from strategies import lengths as length_lists

from tuner.batching.pinned_shapes import pin_shapes
from tuner.batching.plan import STRATEGIES, plan_batches, resolve_boundaries
from tuner.errors import BadInputError


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
class TestPinnedShapes:
    @given(data=st.data())
    @settings(max_examples=60)
    def test_other_rows_have_a_subset_of_the_shapes(self, strategy, data):
        case = data.draw(plan_cases(strategy))
        config = resolve_boundaries(case.lengths, case.config)
        tuned = plan_batches(case.lengths, config).shapes
        pinned = pin_shapes(config, tuned)
        tokens = data.draw(length_lists(longest=600, max_rows=200))
        fate = admit_slowly(tokens, pinned)
        if not fate.tokens_of_row:
            with pytest.raises(BadInputError, match="no row is left"):
                plan_batches(make_lengths(tokens), pinned)
            return
        for epoch in (0, 1):
            plan = plan_batches(make_lengths(tokens), pinned, epoch=epoch)
            assert set(plan.shapes) <= set(tuned)
            assert {batch.shape for batch in plan.steps_of_rank(0)} <= set(tuned)
            assert sorted(rows_of(plan)) == sorted(fate.tokens_of_row)
            assert plan.num_truncated == fate.num_truncated
            assert sum(plan.dropped.values()) == len(tokens) - len(fate.tokens_of_row)

    @given(data=st.data())
    @settings(max_examples=40)
    def test_the_rows_that_they_were_made_for_have_all_of_them(self, strategy, data):
        case = data.draw(plan_cases(strategy, one_size=True))
        config = resolve_boundaries(case.lengths, case.config)
        tuned = plan_batches(case.lengths, config)
        again = plan_batches(case.lengths, pin_shapes(config, tuned.shapes))
        assert again.shapes == tuned.shapes
        assert again.shape_counts() == tuned.shape_counts()


def test_a_row_longer_than_all_is_cut_and_a_bucket_without_rows_has_no_steps():
    config = make_config({"batching.num_buckets": 2, "batching.tokens_per_batch": 64})
    tuned = plan_batches(make_lengths([8] * 5 + [30] * 4), config).shapes
    # 64 // 32 rows of 32 in two batches; 5 rows of 8 in one.
    assert set(tuned) == {(2, 32), (5, 8)}
    config = pin_shapes(config, tuned)
    plan = plan_batches(make_lengths([40, 31, 33]), config)
    assert plan.shapes == ((2, 32),)
    assert (plan.num_truncated, plan.num_steps) == (2, 2)
    assert plan.real_tokens.sum() == 32 + 31 + 32
    dropping = config.model_copy(
        update={"data": config.data.model_copy(update={"overflow": "drop"})}
    )
    plan = plan_batches(make_lengths([40, 31, 33]), dropping)
    assert plan.dropped == {"empty": 0, "over_long": 2}

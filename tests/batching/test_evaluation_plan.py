"""The rows of an evaluation: each once, padded to shapes that the run has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_config, make_lengths, plan_cases

from tuner.batching.evaluation_plan import plan_evaluation
from tuner.batching.plan import STRATEGIES, plan_batches, resolve_boundaries
from tuner.config.override import override_config
from tuner.errors import BadInputError

HELD = {"evaluation.path": "other.mindrecord"}


def evaluate(tokens, config, training_tokens=None, draws=None):
    training = plan_batches(make_lengths(training_tokens or tokens), config)
    draws = np.arange(len(tokens)) / len(tokens) if draws is None else draws
    return plan_evaluation(make_lengths(tokens), config, training.shapes, draws), training


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
class TestEvaluationPlan:
    @given(data=st.data())
    def test_every_row_stands_once_in_a_class_that_holds_it(self, strategy, data):
        case = data.draw(plan_cases(strategy))
        config = override_config(resolve_boundaries(case.lengths, case.config), HELD)
        other = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=120))
        training = plan_batches(case.lengths, config)
        longest = max(length for _, length in training.shapes)
        limit = min(longest, config.data.max_length or longest)
        is_dropping = config.data.overflow == "drop"
        fate = {
            row: min(length, limit)
            for row, length in enumerate(other)
            if 0 < length <= limit or (length and not is_dropping)
        }
        if not fate:
            with pytest.raises(BadInputError, match="no row is left"):
                evaluate(other, config, case.tokens)
            return
        plan, _ = evaluate(other, config, case.tokens)
        placed = [
            (row, item.up_to)
            for item in plan.classes
            for batch in item.batches()
            for row in batch.row_indices.tolist()
        ]
        assert sorted(row for row, _ in placed) == sorted(fate)
        ends = [item.up_to for item in plan.classes]
        assert ends == sorted(set(ends))
        for row, up_to in placed:
            # The class is that of the first upper end that holds the row.
            assert up_to == min(end for end in ends if end >= fate[row])
        for item in plan.classes:
            for batch in item.batches():
                assert batch.shape == item.shape
                assert len(batch.row_indices) == batch.rows_per_slot.sum() <= item.shape[0]
            assert item.shape[1] >= item.up_to
        assert plan.num_rows == len(fate)
        assert plan.num_rows + sum(plan.dropped.values()) == len(other)

    @given(data=st.data())
    def test_shapes_are_those_of_training_but_beside_packed_rows(self, strategy, data):
        case = data.draw(plan_cases(strategy))
        config = override_config(resolve_boundaries(case.lengths, case.config), HELD)
        plan, training = evaluate(case.tokens, config)
        budget = max(size * length for size, length in training.shapes)
        longest = max(length for _, length in training.shapes)
        if strategy == "packed":
            assert len(plan.shapes) <= 4
            for size, length in plan.shapes:
                assert size * length <= budget and length <= longest
        else:
            assert set(plan.shapes) <= set(training.shapes)
        sizes = [size * length for size, length in plan.shapes]
        assert sizes == sorted(sizes, reverse=True)


def test_buckets_are_those_of_training_also_where_one_has_no_row_to_train_on():
    config = make_config(
        {**HELD, "batching.boundaries": [8, 16, 32], "batching.tokens_per_batch": 64}
    )
    # Nothing to train on in (8, 16]: its rows go to the next bucket that has a graph.
    plan, _ = evaluate([3, 12, 20, 40], config, [8] * 8 + [32] * 2)
    assert [(item.up_to, item.shape) for item in plan.classes] == [(8, (8, 8)), (32, (2, 32))]
    assert [item.row_indices.tolist() for item in plan.classes] == [[0], [1, 2, 3]]
    assert plan.num_truncated == 1


def test_the_one_length_of_fixed_is_looked_at_in_classes():
    config = make_config({**HELD, "batching.strategy": "fixed", "batching.align": 8})
    plan, training = evaluate([5, 5, 30, 64], config)
    assert plan.shapes == training.shapes
    assert [item.up_to for item in plan.classes] == [8, 32, 64]


def test_few_rows_are_those_of_the_smallest_draws():
    config = make_config({**HELD, "evaluation.max_rows": 3})
    draws = np.array([0.9, 0.2, 0.4, 0.1, 0.3])
    plan, _ = evaluate([4] * 5, config, draws=draws)
    assert plan.classes[0].row_indices.tolist() == [1, 3, 4]


def test_a_row_over_the_limit_is_refused_where_the_rule_says_so():
    config = make_config({**HELD, "data.overflow": "error"})
    with pytest.raises(BadInputError, match=r"1 rows are longer than 8 tokens \(row 1 has 9\)"):
        evaluate([8, 9], config, [8, 8])

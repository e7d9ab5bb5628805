"""A step over all ranks."""

from __future__ import annotations

import math

import pytest
from ranks_case import KnownRanks
from tiny_model import random_batch

from tuner.errors import BadInputError
from tuner.train.ranks import OneRank, StepTotals, total_step

SHAPE = (3, 8)
BATCH = random_batch(SHAPE, (8, 5, 2))
"""15 tokens, of which 12 have a next one."""


def totals(ranks, loss_sum=1.5, stop=False):
    return total_step(ranks, [BATCH], loss_sum, step=7, stop_requested=stop)


def test_one_rank_is_its_own_total():
    assert totals(OneRank(), loss_sum=0.1) == StepTotals(
        loss_sum=0.1, label_tokens=12, real_tokens=15, padded_tokens=24, stop_requested=False
    )


def test_everything_is_added_up_and_one_stop_is_enough():
    others = [[7, 3, 8, 2.25, 95, 100, False], [7, 3, 8, 0.25, 2**25 + 1, 2**26 + 1, True]]
    assert totals(KnownRanks([others], size=3)) == StepTotals(
        loss_sum=4.0,
        label_tokens=12 + 95 + 2**25 + 1,
        real_tokens=15 + 100 + 2**26 + 1,
        padded_tokens=72,
        stop_requested=True,
    )


def test_several_batches_of_a_rank_are_added_up_before():
    found = total_step(
        KnownRanks([[[7, 3, 8, 0.5, 10, 20, False]]]), [BATCH, BATCH], 1.5,
        step=7, stop_requested=False,
    )  # fmt: skip
    assert found == StepTotals(
        loss_sum=2.0,
        label_tokens=24 + 10,
        real_tokens=30 + 20,
        padded_tokens=4 * 24,
        stop_requested=False,
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_on_one_rank_is_none_on_all(loss):
    assert not math.isfinite(totals(KnownRanks([[[7, 3, 8, loss, 1, 1, False]]])).loss_sum)


@pytest.mark.parametrize("theirs", [[8, 3, 8], [7, 2, 8], [7, 3, 16]])
def test_ranks_at_other_steps_or_shapes_are_named(theirs):
    with pytest.raises(BadInputError, match=r"rank 1 is at step . \(B=. L=.*rank 0 at step 7"):
        totals(KnownRanks([[[*theirs, 1.0, 1, 1, False]]]))

"""The stated interval of a sampled padding fraction holds the truth as often as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from strategies import skewed_tokens

from tuner.batching.boundaries import solve_least_padding
from tuner.errors import BadInputError
from tuner.simulate.sampling import estimate_padding

POPULATION = np.array(skewed_tokens(5000, longest=2048))
LONGEST = int(POPULATION.max())
TRIALS = 1000


def true_padding(boundaries):
    ends = np.array(boundaries)
    return 1 - POPULATION.sum() / ends[np.searchsorted(ends, POPULATION)].sum()


@pytest.mark.parametrize("num_sampled", [200, 1000, 4000])
@pytest.mark.parametrize(
    "boundaries",
    [(LONGEST,), solve_least_padding(POPULATION, 8, 8).best(8), (64, LONGEST)],
    ids=["longest", "least padding", "two"],
)
def test_interval_holds_the_truth_95_times_of_100(boundaries, num_sampled):
    rng = np.random.default_rng(num_sampled)
    truth = true_padding(boundaries)
    held, estimates, half_widths = 0, [], []
    for _ in range(TRIALS):
        sample = rng.choice(POPULATION, num_sampled, replace=False)
        found = estimate_padding(sample, boundaries, len(POPULATION))
        held += abs(found.padding_fraction - truth) <= found.half_width
        estimates.append(found.padding_fraction)
        half_widths.append(found.half_width)
    assert 0.90 <= held / TRIALS <= 0.99
    assert np.mean(half_widths) == pytest.approx(1.96 * np.std(estimates), rel=0.1)


def test_hand_calculated():
    """Four rows of 400, two to 8 and two to 24 tokens: 48 of 64 are real, R = 3/4.

    Residuals 4 - 6, 8 - 6, 12 - 18, 24 - 18: squares 4 + 4 + 36 + 36 = 80, s^2 = 80 / 3.
    """
    found = estimate_padding(np.array([4, 8, 12, 24]), (8, 24), 400)
    assert found.padding_fraction == pytest.approx(0.25)
    error = math.sqrt(0.99 * (80 / 3) / 4) / 16
    assert found.half_width == pytest.approx(1.959964 * error)


def test_whole_set_has_no_error():
    found = estimate_padding(POPULATION, (128, LONGEST), len(POPULATION))
    assert found.padding_fraction == pytest.approx(true_padding((128, LONGEST)))
    assert found.half_width == 0.0


def test_one_row_and_uncovered_rows_are_refused():
    with pytest.raises(BadInputError, match="at least 2 rows"):
        estimate_padding(np.array([5]), (8,), 10)
    with pytest.raises(BadInputError, match="got 8 and 9"):
        estimate_padding(np.array([5, 9]), (8,), 10)

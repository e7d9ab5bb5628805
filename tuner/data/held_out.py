"""Rows held out for evaluation: which they are follows from seed and row number alone.

Every row draws a number in [0, 1) of its own from (seed, row) by whole-number arithmetic, and is
held out if that is below the fraction. So the choice is the same on every machine, rows that are
appended change nothing for those before, and a larger fraction holds out the same rows and more.
The training part is a `Lengths` in which the held-out rows are left out, and the other way round:
whatever plans, simulates or tunes sees the part that it is given.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from tuner.config.schema import EvaluationConfig
from tuner.data.lengths import Lengths
from tuner.errors import BadInputError

HELD_OUT = "held_out"
TRAINED_ON = "trained_on"

UNIT_BITS = 53
"""Bits of a draw: as many as a float64 holds exactly."""


def row_draws(num_rows: int, seed: int) -> NDArray[np.float64]:
    """A number in [0, 1) for every row, float64 [num_rows].

    SplitMix64 at (seed, row), with the seed itself mixed first so that neighbouring seeds have
    nothing in common (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).

    Args:
        num_rows: Rows of the set.
        seed: >= 0; of larger ones than 64 bits hold the rest counts.
    """
    start = _mixed(np.array([seed % 2**64], dtype=np.uint64))
    mixed = _mixed(start + np.arange(num_rows, dtype=np.uint64))
    draws: NDArray[np.float64] = (mixed >> np.uint64(64 - UNIT_BITS)) * 2.0**-UNIT_BITS
    return draws


def is_held_out(num_rows: int, evaluation: EvaluationConfig) -> NDArray[np.bool_]:
    """Whether each row is held out, bool [num_rows]; none where no fraction is asked for."""
    if evaluation.fraction is None:
        return np.zeros(num_rows, dtype=bool)
    held_out: NDArray[np.bool_] = row_draws(num_rows, evaluation.seed) < evaluation.fraction
    return held_out


def training_part(lengths: Lengths, evaluation: EvaluationConfig | None) -> Lengths:
    """The rows to train on: all but those held out.

    Args:
        lengths: Of all rows of data.path.
        evaluation: The config's section; None or without a fraction holds nothing out.
    """
    if evaluation is None or evaluation.fraction is None:
        return lengths
    held_out = is_held_out(lengths.num_samples, evaluation)
    return dataclasses.replace(lengths, is_left_out=held_out, left_out_as=HELD_OUT)


def held_out_part(lengths: Lengths, evaluation: EvaluationConfig) -> Lengths:
    """The rows of data.path to evaluate on.

    Args:
        lengths: Of all rows of data.path.
        evaluation: With a fraction.

    Raises:
        BadInputError: no row is held out.
    """
    held_out = is_held_out(lengths.num_samples, evaluation)
    if not held_out.any():
        raise BadInputError(
            f"evaluation.fraction {evaluation.fraction} holds out none of the "
            f"{lengths.num_samples} rows",
            fix="raise it, or give rows of their own with evaluation.path",
        )
    return dataclasses.replace(lengths, is_left_out=~held_out, left_out_as=TRAINED_ON)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output for these states; wraps at 2^64."""
    z = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed

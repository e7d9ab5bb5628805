"""Who has won a confirmation, and by how much: pure, from repeated measurements.

Every candidate c is measured once in every round r, in a fresh process, in changing order. With
x_cr = log(run seconds), a model of two effects parts what the candidate is (mu_c), what the
machine was in that round (rho_r), and noise:
    x_cr = mu_c + rho_r + e_cr,   e_cr estimated by x_cr - mean_c - mean_r + mean.
The noise of all candidates is pooled, since two or three rounds of one alone say little, and the
residuals are scaled by sqrt(C R / ((C - 1)(R - 1))) to the size that they were estimated with. An
interval of a ratio is a bootstrap of residuals (Davison and Hinkley, Bootstrap Methods and their
Application, 1997, section 6.3): noise is drawn anew for both sides, as often as there are rounds;
its width is taken times t / z for the (C - 1)(R - 1) degrees of freedom, without which so few
residuals are too sure. Of equally fast candidates the simplest wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm
from scipy.stats import t as student_t

CONFIDENCE = 0.95
DRAWS = 10_000
LEAST_NOISE = 0.003
"""Standard deviation of log seconds that is assumed at least: two rounds may agree by chance."""

ASSUMED_NOISE = 0.03
"""The same where one round says nothing about it: medians of steps between fresh processes of a
quiet machine."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What is confirmed.

    Attributes:
        name: For people; each candidate has its own.
        simplicity: Of equally fast candidates the one that sorts first wins.
    """

    name: str
    simplicity: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A candidate against the fastest.

    Attributes:
        name: Of the candidate.
        run_s: Geometric mean of the run seconds over the rounds.
        speed_ratio: Its real tokens per second over those of the fastest, <= 1.
        low: Lower end of the 95 % interval of speed_ratio.
        high: Upper end.
        is_slower: The interval is below 1: beyond noise.
    """

    name: str
    run_s: float
    speed_ratio: float
    low: float
    high: float
    is_slower: bool


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Who has won.

    Attributes:
        winner: Name of the candidate to take.
        fastest: Name of the candidate of least mean seconds.
        is_significant: The fastest is ahead of all others beyond noise.
        compared: Against the fastest, the fastest first.
        num_rounds: Rounds that all of them have.
        noise: Standard deviation of log seconds between processes.
    """

    winner: str
    fastest: str
    is_significant: bool
    compared: tuple[Compared, ...]
    num_rounds: int
    noise: float

    def of(self, name: str) -> Compared:
        """One candidate's line."""
        return next(item for item in self.compared if item.name == name)


def judge(
    candidates: Sequence[Candidate], run_s: Mapping[str, Sequence[float]], seed: int = 0
) -> Verdict:
    """Compare.

    Args:
        candidates: At least one; those without a measurement of every round must be left out.
        run_s: Name -> seconds of each round, > 0, as many for each; at least one round. With one
            round nothing is known about noise: some is assumed, and nothing is significant.
        seed: Of the draws.
    """
    names = [item.name for item in candidates]
    logs = np.log(np.array([run_s[name] for name in names], dtype=np.float64))
    mean = logs.mean(axis=1)
    order = np.argsort(mean, kind="stable")
    first = int(order[0])
    half_widths, noise = _half_widths(logs, first, np.random.default_rng(seed))
    compared = tuple(
        _compare(names[index], mean[index], mean[first], half_widths[index]) for index in order
    )
    equal = [item for item in compared if not item.is_slower]
    by_name = {item.name: item for item in candidates}
    return Verdict(
        winner=min(equal, key=lambda item: (by_name[item.name].simplicity, item.run_s)).name,
        fastest=names[first],
        is_significant=len(equal) == 1 and logs.shape[1] > 1,
        compared=compared,
        num_rounds=logs.shape[1],
        noise=noise,
    )


def _compare(name: str, mean: float, least: float, half_width: float) -> Compared:
    ratio = least - mean
    return Compared(
        name=name,
        run_s=float(np.exp(mean)),
        speed_ratio=float(np.exp(ratio)),
        low=float(np.exp(ratio - half_width)),
        high=float(np.exp(ratio + half_width)),
        is_slower=bool(ratio + half_width < 0.0),
    )


def _half_widths(
    logs: FloatArray, first: int, rng: np.random.Generator
) -> tuple[FloatArray, float]:
    """Of the log ratio of each candidate to the first one; and the noise behind them."""
    num_candidates, num_rounds = logs.shape
    degrees = (num_candidates - 1) * (num_rounds - 1)
    tail = (1.0 - CONFIDENCE) / 2
    if degrees == 0:
        assumed = float(norm.ppf(1.0 - tail)) * ASSUMED_NOISE * np.sqrt(2.0 / num_rounds)
        half_widths = np.full(num_candidates, assumed)
        half_widths[first] = 0.0
        return half_widths, ASSUMED_NOISE
    residuals = (
        logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0, keepdims=True) + logs.mean()
    )
    residuals *= np.sqrt(logs.size / degrees)
    noise = float(np.sqrt(np.mean(residuals**2)))
    pool = residuals.ravel() * max(1.0, LEAST_NOISE / max(noise, 1e-12))
    if noise < 1e-9:
        # All alike to the last digit, as a made-up device may be.
        pool = np.tile([-LEAST_NOISE, LEAST_NOISE], logs.size)
    drawn = rng.choice(pool, size=(DRAWS, 2, num_rounds)).mean(axis=2)
    difference = drawn[:, 0] - drawn[:, 1]
    half_widths = np.zeros(num_candidates)
    low, high = np.quantile(difference, [tail, 1.0 - tail])
    widening = student_t.ppf(1.0 - tail, degrees) / norm.ppf(1.0 - tail)
    half_widths[np.arange(num_candidates) != first] = (high - low) / 2 * widening
    return half_widths, max(noise, LEAST_NOISE)

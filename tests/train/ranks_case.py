"""Ranks without processes: what each gives is known to the test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.train.world import World


@dataclass
class KnownRanks:
    """Rank 0 of several; the others' values are given for every gathering, in turn."""

    others: list
    size: int = 2

    @property
    def world(self):
        return World(rank=0, size=self.size)

    def gather(self, values):
        return np.array([values, *self.others.pop(0)], dtype=np.float64)

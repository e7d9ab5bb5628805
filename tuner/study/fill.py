"""The config whose batches are as large as memory allows: found by real steps, then measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tuner.batching.grouping import Shape
from tuner.config.override import override_config
from tuner.config.schema import TrainConfig
from tuner.simulate.cost_book import CostBook
from tuner.simulate.memory import MemoryCost
from tuner.study.baselines import OVERRIDES
from tuner.study.memory_search import FilledBucket, Room, fill_buckets_to
from tuner.study.outcome import NumberedOutcome, Outcome
from tuner.study.setup import StudySetup
from tuner.study.unit import Unit, measure_unit, plan_unit
from tuner.trial.record import TrialResult, TrialSpec
from tuner.trial.runner import TrialRunner

FILLED = "largest batches that fit in memory"

MAX_RETRIES = 3
SMALLER = 0.9
"""Share of the batch sizes that is tried next where all shapes together do not fit."""

GUESSED_TOKEN_BYTES = 100_000.0
"""Bytes a padded token where no memory was measured yet: within a factor of a few for small
models; the first try corrects it."""


def needs_filling(setup: StudySetup, outcomes: Sequence[NumberedOutcome]) -> bool:
    """Whether memory holds the study back: the space asks for it, or a plan did not fit."""
    if setup.space.fill_memory:
        return True
    if any(item.outcome.status == "oom" or item.outcome.is_over_memory for item in outcomes):
        return True
    # All baselines have one token budget, unless one of them would not have fitted.
    budgets = {
        item.outcome.config.batching.tokens_per_batch
        for item in outcomes
        if item.outcome.baseline in OVERRIDES
    }
    return len(budgets) > 1


def config_to_fill(outcomes: Sequence[NumberedOutcome]) -> TrainConfig | None:
    """The fastest static buckets so far; of those that did not fit the first if none did."""
    bucketed = [
        item.outcome
        for item in outcomes
        if item.outcome.config.batching.strategy == "bucketed"
        and item.outcome.config.graph.mode == "static"
        and item.outcome.config.batching.boundaries
    ]
    best = max(bucketed, key=lambda outcome: outcome.real_tokens_per_s or 0.0, default=None)
    return best.config if best else None


def measure_filled(setup: StudySetup, runner: TrialRunner, unit: Unit, book: CostBook) -> Outcome:
    """Find batch sizes for a unit's boundaries, and measure the plan that they make.

    Args:
        setup: Limits.
        runner: Runs the tries, one after the other.
        unit: Planned with its present batch sizes.
        book: What is known about memory.
    """
    memory = book.known(unit.key).memory
    tries = _Tries(setup, runner, unit)
    room = Room(
        bytes_for_shapes=setup.memory_limit_bytes - round(_fixed_bytes(memory, tries)),
        is_shared_out=unit.key.graph_mode == "static",
    )
    filled = fill_buckets_to(room, _max_batches(setup, unit), _guess(memory), tries.probe)
    if min(bucket.batch_size for bucket in filled) == 0:
        length = next(bucket.padded_length for bucket in filled if bucket.batch_size == 0)
        reason = f"not one row of {length} tokens fits in memory beside the other shapes"
        reason += tries.problem
        return unit.finish(TrialResult(status="oom", reason=reason))
    return _measure(setup, runner, unit, filled)


class _Tries:
    """Processes that each run one shape."""

    def __init__(self, setup: StudySetup, runner: TrialRunner, unit: Unit) -> None:
        self._setup = setup
        self._runner = runner
        self._unit = unit
        self.base_bytes = 0
        self.problem = ""

    def probe(self, shape: Shape) -> int | None:
        """Bytes that a shape and its update take above the bare process; None if it died."""
        spec = TrialSpec(
            config=self._unit.config,
            lengths_file=str(self._setup.folder.lengths.absolute()),
            shapes=(shape,),
            timed_steps=2,
            time_limit_s=self._setup.time_limit_s,
            memory_limit_bytes=self._setup.memory_limit_bytes,
            device_id=self._unit.device_id,
        )
        result = self._runner.run(spec, self._setup.folder.trial(self._unit.number))
        if result.status != "ok":
            if result.status != "oom":
                self.problem = (
                    f"; a try at {shape[0]} x {shape[1]}: {result.status}, {result.reason}"
                )
            return None
        self.base_bytes = result.base_bytes
        return max(1, result.peak_bytes - result.base_bytes)


def _fixed_bytes(memory: MemoryCost | None, tries: _Tries) -> float:
    """Of a process without a shape; where it is not known yet a smallest shape tells."""
    if memory is not None:
        return memory.fixed_bytes
    tries.probe((1, 8))
    return float(tries.base_bytes)


def _guess(memory: MemoryCost | None) -> Callable[[Shape], float]:
    if memory is None:
        return lambda shape: GUESSED_TOKEN_BYTES * shape[0] * shape[1]
    return lambda shape: max(1.0, memory.added_bytes(shape))


def _max_batches(setup: StudySetup, unit: Unit) -> list[Shape]:
    """(largest B, L) of each bucket, longest first: its rows, and one update's tokens."""
    ends = np.array(unit.config.batching.boundaries)
    tokens = setup.data.lengths.own_tokens
    if unit.config.data.overflow == "truncate":
        tokens = np.minimum(tokens, ends[-1])
    rows = np.bincount(np.searchsorted(ends, tokens), minlength=len(ends))
    budget = unit.config.train.tokens_per_update or ends[-1]
    return [
        (max(1, min(int(rows[index]), int(budget) // int(ends[index]))), int(ends[index]))
        for index in reversed(range(len(ends)))
    ]


def _measure(
    setup: StudySetup, runner: TrialRunner, unit: Unit, filled: Sequence[FilledBucket]
) -> Outcome:
    """All shapes together; what fitted alone may not fit beside the others."""
    share = 1.0
    for _ in range(MAX_RETRIES):
        sizes = [max(1, int(share * bucket.batch_size)) for bucket in reversed(filled)]
        overrides = {"batching.tokens_per_batch": None, "batching.batch_sizes": sizes}
        config = override_config(unit.config, overrides, source=FILLED)
        planned = plan_unit(setup, unit.number, config, CostBook(), FILLED)
        if planned.outcome is not None:
            return planned.outcome
        planned = dataclasses.replace(planned, device_id=unit.device_id)
        outcome = measure_unit(setup, runner, planned)
        if outcome.status != "oom":
            return outcome
        share *= SMALLER
    return outcome

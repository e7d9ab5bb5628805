"""How good a search is: its choice against the whole grid and random search, by hidden costs."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from search_case import search
from study_case import make_setup, make_space

from tuner.batching.boundaries import solve_least_time
from tuner.batching.bucket_time import RunCost
from tuner.batching.plan import plan_batches
from tuner.config.schema import TrainConfig
from tuner.simulate.cost_book import CostBook
from tuner.simulate.estimate import estimate_run
from tuner.simulate.measurement import CostKey
from tuner.simulate.stats import PlanStats, count_plan
from tuner.study.guide import configure, with_boundaries
from tuner.study.setup import StudySetup
from tuner.study.space import Choice, all_choices
from tuner.study.unit import measure_unit, plan_unit
from tuner.trial.fake import FakeRunner, HiddenCost

NOISE = 0.03
EPOCHS = 3
NUM_ROWS = 8_000
SPACE = make_space(
    strategy=["bucketed", "packed", "dynamic", "fixed"],
    num_buckets={"low": 2, "high": 16},
    align=[8, 32, 64],
    longest_rows_per_batch=[2, 4, 8],
    graph_mode=["static", "dynamic"],
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One seed: true run seconds of what each way of searching would take, over the grid's best.

    Attributes:
        ours: Of the search, baselines among its candidates.
        proposed: Of the search's proposals alone.
        random: Of as many random trials.
        random_by_shapes: Of random trials that together measure as many shapes.
        num_shapes: That the search measured.
        own_s: Seconds of the search itself, the made-up device's answers included.
        num_trials: Its trials, baselines included.
    """

    ours: float
    proposed: float
    random: float
    random_by_shapes: float
    num_shapes: int
    own_s: float
    num_trials: int


def hidden_of(seed: int) -> HiddenCost:
    """A row costs something that the fitted cost has no term for; packing pays for even seeds."""
    return HiddenCost(row_s=4e-4, packed_factor=1.05 if seed % 2 == 0 else 1.6)


def compare(folder: Path, seed: int, trials: int = 30) -> Compared:
    """Search once, and hold what was chosen against the rest."""
    rng = np.random.default_rng(seed)
    tokens = np.clip(np.exp(rng.normal(4.4, 1.0, NUM_ROWS)), 4, 512).astype(int).tolist()
    setup = make_setup(
        folder,
        tokens,
        SPACE,
        base={"train.epochs": EPOCHS},
        trials=trials,
        seed=seed,
        memory_limit_bytes=10**12,
    )
    hidden = hidden_of(seed)
    runner = FakeRunner(hidden, noise=NOISE, salt=(seed,))
    started = time.process_time()
    result = search(setup, runner)
    own_s = time.process_time() - started
    assert result.best is not None
    proposed = max(
        (item for item in result.outcomes if item.outcome.baseline is None),
        key=lambda item: item.outcome.real_tokens_per_s or 0.0,
    )
    configs = grid_of(setup)
    true_s = {config: true_run_s(setup, config) for config in set(configs)}
    best_s = min(true_s.values())
    num_shapes = sum(len(item.outcome.measured) for item in result.outcomes)
    tried = random_trials(setup, [config for config in configs if np.isfinite(true_s[config])])
    return Compared(
        ours=true_run_s(setup, result.best.outcome.config) / best_s,
        proposed=true_run_s(setup, proposed.outcome.config) / best_s,
        random=true_run_s(setup, best_of(tried[:trials])) / best_s,
        random_by_shapes=true_run_s(setup, best_of(within(tried, num_shapes))) / best_s,
        num_shapes=num_shapes,
        own_s=own_s,
        num_trials=len(result.outcomes),
    )


def figures_of(setup: StudySetup, config: TrainConfig) -> PlanStats:
    """One epoch of the plan, row by row."""
    return count_plan(plan_batches(setup.data.lengths, config), config.train.tokens_per_update)


def true_run_s(setup: StudySetup, config: TrainConfig) -> float:
    """Run seconds under the hidden cost without noise; infinite where it is refused."""
    hidden = hidden_of(setup.seed)
    figures, key = figures_of(setup, config), CostKey.of(config, "CPU")
    counts = {shape: count for shape, count in figures.shape_counts.items() if count}
    is_static = key.graph_mode == "static"
    if is_static and len(counts) > setup.space.max_static_shapes:
        return float("inf")
    compile_s = hidden.compile_s * (len(counts) if is_static else 1) + 0.99
    steps_s = sum(count * hidden.step_s(shape, key) for shape, count in counts.items())
    return compile_s + EPOCHS * (steps_s + 0.01 * figures.num_updates)


def grid_of(setup: StudySetup) -> list[TrainConfig]:
    """Every config of the space, boundaries solved under the hidden cost itself.

    As often as points lead to it: so random search finds it.
    """
    return [solved(setup, choice) for choice in all_choices(setup.space)]


def solved(setup: StudySetup, choice: Choice) -> TrainConfig:
    config = configure(setup, choice)
    if choice.num_buckets is None:
        return config
    hidden, key = hidden_of(setup.seed), CostKey.of(config, "CPU")
    compile_s = hidden.compile_s if key.graph_mode == "static" else 0.0
    cost = RunCost(
        step_s=lambda shape: hidden.step_s(shape, key),
        compile_s=lambda shape: compile_s,
        epochs=EPOCHS,
        world_size=1,
    )
    curve = solve_least_time(
        setup.data.lengths.tokens, config.batching, cost, max_buckets=choice.num_buckets
    )
    return with_boundaries(config, curve.best(choice.num_buckets))


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A random trial: its config, its run seconds as measured, and the shapes that it took."""

    config: TrainConfig
    measured_run_s: float
    num_shapes: int


def random_trials(setup: StudySetup, configs: Sequence[TrainConfig]) -> list[Tried]:
    """Configs in random order, each measured whole, by the same device on the same day."""
    runner = FakeRunner(hidden_of(setup.seed), noise=NOISE, salt=(setup.seed,))
    drawn = random.Random(setup.seed).sample(list(configs), len(configs))
    return [measured_whole(setup, runner, config) for config in drawn[:60]]


def measured_whole(setup: StudySetup, runner: FakeRunner, config: TrainConfig) -> Tried:
    unit = plan_unit(setup, 0, config, CostBook(), "whole")
    assert unit.figures is not None
    shapes = tuple(shape for shape, count in unit.figures.shape_counts.items() if count)
    # On one dynamic graph as many as ours takes of a plan.
    outcome = measure_unit(setup, runner, unit)
    costs = CostBook([outcome.process("CPU")]).known(unit.key)
    run_s = estimate_run(unit.figures, EPOCHS, costs).estimated_run_s
    return Tried(
        config=config, measured_run_s=run_s, num_shapes=min(len(shapes), len(outcome.measured))
    )


def best_of(tried: Sequence[Tried]) -> TrainConfig:
    return min(tried, key=lambda item: item.measured_run_s).config


def within(tried: Sequence[Tried], num_shapes: int) -> Sequence[Tried]:
    """The first trials that together measure no more shapes; one at least."""
    total = np.cumsum([item.num_shapes for item in tried])
    return tried[: max(1, int(np.searchsorted(total, num_shapes, side="right")))]

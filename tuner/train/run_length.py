"""How long a run is: its steps, and exactly its real tokens."""

from __future__ import annotations

from tuner.batching.plan import EpochPlan, plan_batches
from tuner.config.schema import TrainConfig
from tuner.data.lengths import Lengths


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Steps of the whole run: all epochs, or max_steps if that is less."""
    steps = config.train.epochs * steps_per_epoch
    return steps if config.train.max_steps is None else min(steps, config.train.max_steps)


def total_real_tokens(lengths: Lengths, config: TrainConfig, plan: EpochPlan) -> int:
    """Real tokens over all ranks in all steps of the run.

    Every epoch trains the same rows; of an epoch that max_steps cuts, its own plan says which
    steps come first.

    Args:
        lengths: Of all rows.
        config: Boundaries resolved.
        plan: Of any epoch.
    """
    epochs, rest = divmod(total_steps(config, plan.num_steps), plan.num_steps)
    tokens = epochs * int(plan.real_tokens.sum())
    if rest:
        last = plan_batches(lengths, config, epoch=epochs, world_size=plan.world_size)
        tokens += int(last.real_tokens[:rest].sum())
    return tokens

"""What a study says of the size of optimizer updates, which all candidates share."""

from __future__ import annotations

from collections.abc import Callable

from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.study.base import TunedData, in_tokens_per_update, real_tokens_per_update
from tuner.study.space import SearchSpace, tokens_per_update


def with_update_size(
    base: TrainConfig, data: TunedData, notice: Callable[[str], None]
) -> TrainConfig:
    """The base with its updates in real tokens; what that makes of steps is told.

    Args:
        base: As the user gave it.
        data: Whose rows its own batches hold.
        notice: Told in a line.

    Raises:
        BadInputError: the base counts steps, and its own batches cannot be planned.
    """
    converted = in_tokens_per_update(base, data.lengths)
    if converted != base:
        notice(
            f"train.steps_per_update {base.train.steps_per_update} of the config is "
            f"{converted.train.tokens_per_update:,} real tokens an update on its own batches; "
            "every candidate gathers as many (train.tokens_per_update)"
        )
    return converted


def tell_of_other_updates(
    base: TrainConfig, data: TunedData, space: SearchSpace, notice: Callable[[str], None]
) -> None:
    """Tell what a config that leaves its updates open, and so has those of its batches, gets.

    Args:
        base: The user's own config.
        data: Whose rows its batches hold.
        space: Whose largest batch every candidate's update holds.
        notice: Told in a line, if that is more than the config's own.
    """
    if base.train.tokens_per_update is not None:
        return
    try:
        own = round(real_tokens_per_update(base, data.lengths))
    except BadInputError:
        # As a baseline it meets the same error, which is an outcome there.
        return
    common = tokens_per_update(space, base, data.longest)
    if own < common:
        notice(
            f"train.tokens_per_update is not set: an update of the config holds {own:,} real "
            f"tokens on average, of every candidate {common:,}, what the largest batch of the "
            f"space holds; --set train.tokens_per_update={own} asks for updates as they are"
        )

"""How long rows may be for a model."""

from __future__ import annotations

from tuner.config.model_section import ModelConfig
from tuner.errors import BadInputError


def check_length(model: ModelConfig, longest: int) -> None:
    """Refuse rows that a model has no positions for.

    Args:
        model: The model section.
        longest: Tokens of the longest row, padded as planned.

    Raises:
        BadInputError: it is above max_positions.
    """
    limit = model.max_positions
    if limit is not None and longest > limit:
        raise BadInputError(
            f"the longest row has {longest} tokens as planned, but model.max_positions is {limit}",
            fix=f"set data.max_length so that rows padded to batching.align have at most {limit}",
        )

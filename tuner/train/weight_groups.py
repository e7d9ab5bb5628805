"""Which weights are norms, biases and embeddings, for what is not decayed.

Decided by what a weight is in its Cell: a table of an embedding Cell, or a table that a Cell looks
up itself under the name of one; of vectors and scalars, what is called a bias, else a norm's.
Matrices are none of these: projections, an lm_head of its own, and LoRA's pairs are decayed.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Parameter, nn

from tuner.config.training_sections import WeightGroup

EMBEDDING_SUFFIX = "embedding"
"""How the name of a table ends that a Cell holds as a weight of its own."""

# nn.LayerNorm and nn.BatchNorm call their bias beta.
BIAS_NAMES = ("bias", "beta")


def weight_groups(model: nn.Cell) -> dict[str, WeightGroup | None]:
    """The group of every weight by the weight's name; None: a matrix.

    A table that is shared (tied) with a product is an embedding.

    Args:
        model: The built-in decoder or any other Cell, with whatever stands around it.
    """
    groups: dict[str, WeightGroup | None] = {}
    for _, cell in model.cells_and_names():
        for name, weight in cell.parameters_and_names(expand=False):
            group = _group(cell, name.rpartition(".")[2], weight)
            if groups.get(weight.name) != "embeddings":
                groups[weight.name] = group
    return groups


def are_decayed(
    model: nn.Cell, weights: Sequence[Parameter], no_decay: Sequence[WeightGroup]
) -> tuple[bool, ...]:
    """For each of some weights of a model, whether weight decay applies to it."""
    groups = weight_groups(model)
    return tuple(groups[weight.name] not in no_decay for weight in weights)


def _group(cell: nn.Cell, name: str, weight: Parameter) -> WeightGroup | None:
    if weight.ndim < 2:
        return "biases" if name.endswith(BIAS_NAMES) else "norms"
    is_table = "Embedding" in type(cell).__name__ or name.endswith(EMBEDDING_SUFFIX)
    return "embeddings" if is_table else None

"""The model that a config asks for: built in, from a checkpoint, with adapters, or the user's."""

from __future__ import annotations

from mindspore import nn

from tuner.config.hf_config import check_against_source
from tuner.config.positions import check_length
from tuner.config.schema import ModelConfig, TrainConfig
from tuner.train.factory import build_from_factory
from tuner.train.flash import attention_of, chosen_device
from tuner.train.lora import prepare_adapters
from tuner.train.model import Decoder
from tuner.train.precision import dtypes_of
from tuner.train.source import load_source


def build_model(config: TrainConfig, max_length: int, *, reads_source: bool = True) -> nn.Cell:
    """Build the model with its initial weights; nothing is compiled.

    Args:
        config: The whole config.
        max_length: Longest padded row in tokens, inclusive.
        reads_source: False leaves the weights of a model.source at 0, for a checkpoint that holds
            them all.

    Returns:
        A Cell that takes int32 [B, T] ids, and of packed rows and of a factory segment ids and
        positions, and returns logits [B, T, vocab_size].

    Raises:
        BadInputError: the model takes no rows of that length, its source is missing, damaged or
            another model, its factory breaks the contract, or graph.attention is flash, which
            device, dtype or sizes do not allow.
    """
    check_length(config.model, max_length)
    if config.model.factory is not None:
        return build_from_factory(config, max_length)
    is_read = config.model.source is not None and reads_source
    if is_read:
        check_against_source(config.model)
    model = Decoder(
        config.model,
        max_length,
        config.train.seed,
        dtypes_of(config.precision),
        is_flash=attention_of(config, chosen_device(), max_length).name == "flash",
    )
    if config.model.lora is not None:
        prepare_adapters(model, config.train.seed)
    if is_read:
        load_source(model, config.model)
    return model


def saves_frozen_weights(model: ModelConfig) -> bool:
    """Whether checkpoints hold the weights that are not trained; a source has them already."""
    return model.source is None

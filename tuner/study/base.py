"""The config that the study starts from: the user's own, or a small decoder fitted to the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.config.codec import parse_model, to_plain
from tuner.config.override import override_config, override_plain
from tuner.config.schema import DataConfig, LoopConfig, ModelConfig, TrainConfig
from tuner.data.content import check_content
from tuner.data.lengths import Lengths
from tuner.data.mindrecord import MindRecordSet
from tuner.simulate.stats import count_plan

PLANNED_EPOCHS = 3
VOCABULARY_MULTIPLE = 8
CHECKED_ROWS = 20_000
# Stands where the size is still to be found in the data.
UNKNOWN_VOCABULARY = 1


@dataclass(frozen=True, kw_only=True)
class TunedData:
    """The data of a study.

    Attributes:
        dataset: The opened set.
        lengths: Of all its rows, those held out for evaluation left out.
        longest: Tokens of the longest row of these after truncation.
    """

    dataset: MindRecordSet
    lengths: Lengths
    longest: int


def fitted_base(
    dataset: MindRecordSet, path: str, overrides: Mapping[str, Any] | None = None
) -> TrainConfig:
    """A config with a small decoder whose vocabulary is the data's, or with a given model.

    Args:
        dataset: The opened set.
        path: Where it is, as the config shall name it.
        overrides: What the user sets, dotted name -> value; columns among them are looked at, and
            model.source gives the sizes.

    Raises:
        BadInputError: the rows are not fit for training, or an override is wrong.
    """
    plain = TrainConfig(
        data=DataConfig(
            path=path,
            label_column="labels" if "labels" in dataset.columns else None,
            pad_id=int(dataset.description.get("pad_id") or 0),
        ),
        model=ModelConfig(vocab_size=UNKNOWN_VOCABULARY),
        train=LoopConfig(epochs=PLANNED_EPOCHS),
    )
    given = {**(overrides or {}), "data.path": path}
    of_user = override_plain({**to_plain(plain), "model": {}}, given)
    if isinstance(of_user["model"], Mapping) and of_user["model"].get("source") is not None:
        # The sizes are those of the checkpoint.
        return parse_model(TrainConfig, of_user, source="--set")
    base = override_config(plain, given)
    if base.model.vocab_size != UNKNOWN_VOCABULARY:
        return base
    return override_config(base, {"model.vocab_size": _vocabulary(dataset, base.data)})


def describe_fitted(base: TrainConfig) -> str:
    """What was assumed where the user gave no config."""
    model = base.model
    if model.source is not None:
        what = f"the model of {model.source}"
    elif model.factory is not None:
        what = f"the Cell of {model.factory} (vocabulary {model.vocab_size}, fitted to the data)"
    else:
        what = (
            f"a small decoder ({model.num_layers} layers, width {model.width}, vocabulary "
            f"{model.vocab_size}, fitted to the data)"
        )
    return (
        f"no --config: trials use {what} and a planned run of {base.train.epochs} epochs; give "
        "--config to tune your own model"
    )


def check_base(dataset: MindRecordSet, config: TrainConfig) -> None:
    """Look into the rows before anything dear is done.

    Raises:
        BadInputError: a column is not there, labels and ids differ in length, or an id is outside
            the model's vocabulary.
    """
    check_content(
        dataset,
        config.data.input_column,
        config.data.label_column,
        config.model.vocab_size,
        limit_rows=CHECKED_ROWS,
    )


def in_tokens_per_update(base: TrainConfig, lengths: Lengths) -> TrainConfig:
    """The base with the size of its updates in real tokens, as every candidate shall train them.

    So many steps of one candidate hold other tokens than of another. What the base's own batches
    hold on average in an update is what all of them gather; a base without several steps an
    update is left as it is.

    Raises:
        BadInputError: the base's own batches cannot be planned.
    """
    steps_per_update = base.train.steps_per_update
    if steps_per_update == 1:
        return base
    return override_config(
        base,
        {
            "train.tokens_per_update": max(1, round(real_tokens_per_update(base, lengths))),
            "train.steps_per_update": 1,
        },
        source="train.steps_per_update",
    )


def real_tokens_per_update(base: TrainConfig, lengths: Lengths) -> float:
    """What the base's own batches hold on average in an update.

    Raises:
        BadInputError: the base's own batches cannot be planned.
    """
    stats = count_plan(
        plan_batches(lengths, resolve_boundaries(lengths, base)),
        base.train.tokens_per_update,
        base.train.steps_per_update,
    )
    return stats.real_tokens / stats.num_updates


def _vocabulary(dataset: MindRecordSet, data: DataConfig) -> int:
    """The size that `varseq-data prepare` recorded, else from the largest id of all rows."""
    recorded = dataset.description.get("vocab_size")
    if isinstance(recorded, int) and recorded > 0:
        return recorded
    content = check_content(
        dataset, data.input_column, data.label_column, None, limit_rows=dataset.num_samples
    )
    return -(-(content.max_token_id + 1) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

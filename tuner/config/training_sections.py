"""The sections of training: optimizer, schedule, loop, evaluation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from tuner.config.sections import Fraction, PositiveFloat, PositiveInt, Section

WeightGroup = Literal["norms", "biases", "embeddings"]
WEIGHT_GROUPS: tuple[WeightGroup, ...] = get_args(WeightGroup)


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""
    rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the rate follows tokens_per_update: times (it / reference_tokens_per_update), or times
    the square root of that."""
    reference_tokens_per_update: PositiveInt | None = None
    """Real tokens of an update for which learning_rate was found; null: no scaling."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of the mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.1
    """Share of the weight taken off each update, times the learning rate."""
    no_decay: tuple[WeightGroup, ...] = ("norms", "biases")
    """Weights that are not decayed; embeddings are both tables: tokens and learned positions."""
    sharded: bool = False
    """Of several ranks, whether each keeps the moments of a part of the weights and updates these
    alone: 8 bytes a weight are shared out, for one more exchange of the weights an update."""

    left_out_at_default: ClassVar[frozenset[str]] = frozenset({"sharded"})

    @model_validator(mode="after")
    def _is_written_one_way(self) -> OptimizerConfig:
        if (self.rate_scaling == "none") != (self.reference_tokens_per_update is None):
            raise ValueError(
                "rate_scaling and reference_tokens_per_update belong together "
                f"(got {self.rate_scaling} and {self.reference_tokens_per_update}); "
                "set both, or none and null"
            )
        ordered = tuple(group for group in WEIGHT_GROUPS if group in self.no_decay)
        if self.no_decay != ordered:
            raise ValueError(
                "no_decay must name each group once, in this order: "
                f"{', '.join(ordered)} (got {', '.join(self.no_decay)})"
            )
        return self


class ScheduleConfig(Section):
    """Learning rate over the run: linear warm-up, then as `kind` says."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """cosine, linear: down to the floor at the end; constant: the peak to the end; wsd: the peak,
    and linearly down to the floor in the last decay_fraction."""
    progress: Literal["steps", "tokens"] = "steps"
    """What the run's progress is counted in: steps (batches), or real tokens."""
    warmup_fraction: Fraction = 0.03
    """Share of the run in which the rate rises linearly from 0."""
    decay_fraction: Fraction = 0.2
    """wsd: share of the run in which the rate falls at its end."""
    min_learning_rate_fraction: Fraction = 0.1
    """The floor, as a share of the peak."""

    @model_validator(mode="after")
    def _fits_into_the_run(self) -> ScheduleConfig:
        if self.kind == "wsd" and self.warmup_fraction + self.decay_fraction > 1.0:
            raise ValueError(
                "warmup_fraction + decay_fraction must be at most 1 "
                f"(got {self.warmup_fraction} and {self.decay_fraction})"
            )
        return self


class LoopConfig(Section):
    """How long and with what the loop trains. A step is one batch; an update may take several."""

    epochs: PositiveInt = 1
    """Passes over the data."""
    max_steps: PositiveInt | None = None
    """Steps (batches) after which the run ends early; null: all epochs."""
    tokens_per_update: PositiveInt | None = None
    """Real tokens of an optimizer update, on average; null: steps_per_update decides."""
    steps_per_update: PositiveInt = 1
    """Steps of an optimizer update, for null tokens_per_update; an epoch's last may have fewer."""
    clip_norm: PositiveFloat | None = 1.0
    """Global gradient norm above which gradients are scaled down; null: no such threshold."""
    clip_quantile: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Instead: the threshold is this quantile of the norms of the last clip_window updates;
    clip_norm holds until there are enough of them. null: clip_norm alone."""
    clip_window: Annotated[int, Field(ge=10, le=10_000)] = 200
    """Updates whose norms clip_quantile looks at."""
    out: str = "runs/train"
    """Folder of metrics.jsonl and checkpoints; relative to the working folder."""
    checkpoint_every_steps: PositiveInt = 500
    """Steps between checkpoints; one more at the end."""
    keep_last: PositiveInt = 2
    """Checkpoints kept, the newest."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Checkpoints of the lowest evaluation loss kept besides; needs an evaluation."""
    async_checkpoint: bool = True
    """Whether checkpoints are written while the next steps run."""
    tensorboard: bool = True
    """Whether event files for TensorBoard are written beside metrics.jsonl."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the initial weights."""

    @model_validator(mode="after")
    def _has_one_window_rule(self) -> LoopConfig:
        if self.tokens_per_update is not None and self.steps_per_update > 1:
            raise ValueError(
                "tokens_per_update and steps_per_update exclude each other "
                f"(got {self.tokens_per_update} and {self.steps_per_update}); "
                "set tokens_per_update to null or steps_per_update to 1"
            )
        return self


class EvaluationConfig(Section):
    """Loss on rows that are not trained on, by length."""

    path: str | None = None
    """MindRecord file, glob or folder with the columns of data; null: a fraction of data.path."""
    fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the rows of data.path that is held out, drawn by seed; null: path is given."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the rows held out."""
    every_steps: PositiveInt | None = None
    """Steps between evaluations, made at the next update; null: only at the end."""
    max_rows: PositiveInt | None = None
    """Rows evaluated, drawn by seed, the same each time; null: all."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> EvaluationConfig:
        if (self.path is None) == (self.fraction is None):
            raise ValueError(
                "exactly one of path and fraction says which rows are evaluated "
                f"(got {self.path} and {self.fraction})"
            )
        return self

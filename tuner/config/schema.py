"""The schema of a run: everything `varseq-train` needs, as frozen values.

`TrainConfig` is the whole of best.yaml; its larger sections stand in modules of their own and are
named here, so that everyone imports them from here. Every field says its unit and range; a field
that is not here is an error that names its nearest neighbours. Reading and writing YAML is
`codec`'s job, changing a value by its dotted name is `override`'s.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator, model_validator

from tuner.config.memory_section import MemoryConfig
from tuner.config.model_section import LoraConfig, ModelConfig, RopeScalingConfig
from tuner.config.provenance_section import CostRecord, PredictionRecord, ProvenanceConfig
from tuner.config.sections import PositiveFloat, PositiveInt, Section
from tuner.config.training_sections import (
    EvaluationConfig,
    LoopConfig,
    OptimizerConfig,
    ScheduleConfig,
)

__all__ = [
    "OP_GROUPS",
    "AlignRule",
    "AttentionName",
    "BatchingConfig",
    "ComputeDtype",
    "CostRecord",
    "DataConfig",
    "EvaluationConfig",
    "GraphConfig",
    "LoopConfig",
    "LoraConfig",
    "MemoryConfig",
    "ModelConfig",
    "OpGroup",
    "OptimizerConfig",
    "PrecisionConfig",
    "PredictionRecord",
    "ProvenanceConfig",
    "RopeScalingConfig",
    "ScheduleConfig",
    "StrategyName",
    "TrainConfig",
]

StrategyName = Literal["fixed", "dynamic", "bucketed", "packed"]

ComputeDtype = Literal["fp32", "fp16", "bf16"]

AttentionName = Literal["auto", "math", "flash"]

OpGroup = Literal[
    "softmax", "norms", "rope", "logits", "loss", "embedding", "activations", "residual"
]
OP_GROUPS: tuple[OpGroup, ...] = get_args(OpGroup)
"""The parts of a model whose precision can be chosen, in the order in which they are written."""


def _check_rising(name: str, values: tuple[int, ...]) -> None:
    for before, after in itertools.pairwise(values):
        if after <= before:
            raise ValueError(f"{name} must rise strictly (got {before} before {after})")


def _check_align_table(align: int | tuple[AlignRule, ...]) -> None:
    if isinstance(align, int):
        return
    if not align or align[-1].up_to is not None:
        raise ValueError("the last rule of align must have no up_to, so that every length is met")
    upper_ends: list[Any] = [rule.up_to for rule in align[:-1]]
    if None in upper_ends:
        raise ValueError("only the last rule of align may have no up_to")
    _check_rising("align up_to", tuple(upper_ends))


def _check_batch_size_rule(batching: BatchingConfig) -> None:
    rules = [
        name
        for name in ("tokens_per_batch", "samples_per_batch", "batch_sizes")
        if getattr(batching, name)
    ]
    if len(rules) != 1:
        raise ValueError(
            "exactly one of tokens_per_batch, samples_per_batch and batch_sizes sets the batch "
            f"size (got {' and '.join(rules) or 'none'}); set the others to null or []"
        )
    if batching.batch_sizes and batching.strategy not in ("bucketed", "packed"):
        raise ValueError(
            "batch_sizes needs strategy bucketed or packed, whose boundaries they belong to "
            f"(got {batching.strategy}); use samples_per_batch"
        )
    if batching.batch_sizes and len(batching.batch_sizes) != len(batching.boundaries):
        raise ValueError(
            "batch_sizes needs one entry for each of the boundaries "
            f"(got {len(batching.batch_sizes)} for {len(batching.boundaries)})"
        )


class DataConfig(Section):
    """Where the rows come from."""

    path: str
    """MindRecord file, glob or folder; relative to the working folder."""
    input_column: str = "input_ids"
    """Column of token ids, int32 or int64, one array of varied length a row."""
    label_column: str | None = "labels"
    """Column of labels, as long as the ids and not shifted; -100 is ignored. null: the ids."""
    pad_id: Annotated[int, Field(ge=0)] = 0
    """Token id that fills a row up to its padded length; its label is always ignored."""
    max_length: PositiveInt | None = None
    """Tokens; longer rows meet `overflow`. null: no limit but the longest row."""
    overflow: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to rows longer than max_length or than the last boundary; always counted."""
    read_workers: PositiveInt = 2
    """Threads that read and unpack rows for the trainer."""
    read_ahead_batches: PositiveInt = 4
    """Padded batches that are kept ready ahead of the device."""

    left_out_at_default: ClassVar[frozenset[str]] = frozenset(
        {"read_workers", "read_ahead_batches"}
    )


class AlignRule(Section):
    """One line of an alignment table: lengths up to `up_to` are rounded up to `multiple`."""

    multiple: PositiveInt
    """Tokens; padded lengths under this rule are multiples of it."""
    up_to: PositiveInt | None = None
    """Tokens, inclusive, itself a multiple; null: no upper end, only in the last rule."""

    @model_validator(mode="after")
    def _is_closed_by_its_own_multiple(self) -> AlignRule:
        if self.up_to is not None and self.up_to % self.multiple:
            raise ValueError(
                f"up_to must be a multiple of multiple (got {self.up_to} and {self.multiple})"
            )
        return self


class BatchingConfig(Section):
    """Who is batched with whom, and to which length they are padded."""

    strategy: StrategyName = "bucketed"
    """fixed: all to the longest; dynamic: random batches to their longest; bucketed: by length;
    packed: several samples in a row, none of which sees another."""
    num_buckets: PositiveInt = 8
    """Buckets at most, for bucketed without boundaries; boundary_rule then places these."""
    boundary_rule: Literal[
        "least_padding", "quantile", "equal_tokens", "exponential", "uniform"
    ] = "least_padding"
    """least_padding is exact; the others are common rules, to compare with."""
    boundaries: tuple[PositiveInt, ...] = ()
    """Padded lengths in tokens, rising; a row goes to the first boundary >= its length. For
    packed the tokens of packed rows: a sample that finds no room opens a row of the first of
    them >= its length; [] is one, the longest sample aligned."""
    align: PositiveInt | tuple[AlignRule, ...] = 8
    """Padded lengths are multiples of this, or follow a table of rules by length."""
    tokens_per_batch: PositiveInt | None = 4096
    """Padded tokens a batch of one rank at most: B = tokens_per_batch // L."""
    samples_per_batch: PositiveInt | None = None
    """Rows a batch, for every length; instead of tokens_per_batch."""
    batch_sizes: tuple[PositiveInt, ...] = ()
    """Rows a batch for each of the boundaries; instead of the two above."""
    one_size_per_length: bool = True
    """true: all batches of a padded length have one B, and empty rows fill the last of them;
    false: their B differ by one and no row is empty, with up to twice the shapes, which cost
    nothing in one dynamic graph."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the order; the plan of an epoch follows from (seed, epoch) alone."""
    rows_per_slab: PositiveInt = 16_000_000
    """Rows that are planned at a time at most, about 90 bytes of memory each; larger sets are
    dealt to slabs of like lengths, and batches stay within a slab."""

    left_out_at_default: ClassVar[frozenset[str]] = frozenset({"rows_per_slab"})

    @model_validator(mode="after")
    def _is_consistent(self) -> BatchingConfig:
        _check_rising("boundaries", self.boundaries)
        _check_align_table(self.align)
        _check_batch_size_rule(self)
        return self


class GraphConfig(Section):
    """How MindSpore compiles the step."""

    mode: Literal["static", "dynamic"] = "static"
    """static: one graph a shape, compiled before step 1; dynamic: one graph for all shapes."""
    jit_level: Literal["O0", "O1", "O2"] = "O0"
    """O0, O1: kernel by kernel; O2: whole graph, Ascend with static shapes only, deprecated."""
    compile_cache: bool = False
    """Whether compiled graphs are kept on disk in train.out for the warm-up after --resume; every
    graph from there is checked against a fresh value before it is trained with."""
    attention: AttentionName = "auto"
    """math: matrix products and a softmax; flash: flash_attention_score, on Ascend in fp16 or
    bf16; auto: flash where it can be, else math. Of the built-in decoder."""

    left_out_at_default: ClassVar[frozenset[str]] = frozenset({"attention"})

    @field_validator("jit_level", mode="before")
    @classmethod
    def _is_a_level_that_is_left(cls, value: object) -> object:
        if value == "O3":
            raise ValueError(
                "O3 is gone: MindSpore had it in 2.0 and 2.1 only; take O0, O1 or, on Ascend with "
                "static shapes, O2"
            )
        return value


class PrecisionConfig(Section):
    """In which precision the model computes; weights, gradients and optimizer stay fp32."""

    compute_dtype: ComputeDtype = "fp32"
    """fp32, fp16, or bf16 (Ascend A2 and later); matrix products always run in it."""
    fp32_ops: tuple[OpGroup, ...] = ()
    """Op groups that run in fp32 although compute_dtype is lower; empty for fp32."""
    loss_scale: PositiveFloat = 65536.0
    """First loss scale of fp16: halved at an overflow, doubled after loss_scale_window updates."""
    loss_scale_window: PositiveInt = 1000
    """Updates without an overflow after which the scale of fp16 doubles."""

    @model_validator(mode="after")
    def _is_written_one_way(self) -> PrecisionConfig:
        if self.compute_dtype == "fp32" and self.fp32_ops:
            raise ValueError(
                "fp32_ops has a meaning below fp32 only "
                f"(got {', '.join(self.fp32_ops)} with compute_dtype fp32); set it to []"
            )
        ordered = tuple(group for group in OP_GROUPS if group in self.fp32_ops)
        if self.fp32_ops != ordered:
            raise ValueError(
                "fp32_ops must name each group once, in this order: "
                f"{', '.join(ordered)} (got {', '.join(self.fp32_ops)})"
            )
        return self


class TrainConfig(Section):
    """The whole of best.yaml."""

    data: DataConfig
    batching: BatchingConfig = BatchingConfig()
    graph: GraphConfig = GraphConfig()
    precision: PrecisionConfig = PrecisionConfig()
    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: LoopConfig = LoopConfig()
    evaluation: EvaluationConfig | None = None
    """Rows to evaluate on; null: none."""
    device: Literal["auto", "cpu", "ascend"] = "auto"
    """auto: Ascend where MindSpore reports one, else CPU."""
    memory: MemoryConfig | None = None
    """The memory pool of Ascend; null: as MindSpore has it."""
    provenance: ProvenanceConfig | None = None
    """Written by varseq-tune; null in a config written by hand."""

    left_out_at_default: ClassVar[frozenset[str]] = frozenset({"memory"})

    @model_validator(mode="after")
    def _has_an_update_size_to_scale_by(self) -> TrainConfig:
        if self.optimizer.rate_scaling != "none" and self.train.tokens_per_update is None:
            raise ValueError(
                f"optimizer.rate_scaling {self.optimizer.rate_scaling} follows "
                "train.tokens_per_update, which must be set (got null)"
            )
        return self

    @model_validator(mode="after")
    def _has_a_loss_to_keep_the_best_by(self) -> TrainConfig:
        if self.train.keep_best and self.evaluation is None:
            raise ValueError(
                f"train.keep_best needs an evaluation (got {self.train.keep_best} without one)"
            )
        return self

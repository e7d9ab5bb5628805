"""The schema of a run: everything `varseq-train` needs, as frozen values.

`TrainConfig` is the whole of best.yaml. Every field says its unit and range; a field that is not
here is an error that names its nearest neighbours. Reading and writing YAML is `codec`'s job,
changing a value by its dotted name is `override`'s.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


StrategyName = Literal["fixed", "dynamic", "bucketed", "packed"]

ComputeDtype = Literal["fp32", "fp16", "bf16"]

OpGroup = Literal[
    "softmax", "norms", "rope", "logits", "loss", "embedding", "activations", "residual"
]
OP_GROUPS: tuple[OpGroup, ...] = get_args(OpGroup)
"""The parts of a model whose precision can be chosen, in the order in which they are written."""


class Section(BaseModel):
    """A part of the config: immutable, and strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


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
    if batching.batch_sizes and batching.strategy != "bucketed":
        raise ValueError(
            "batch_sizes needs strategy bucketed, whose boundaries they belong to "
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
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the order; the plan of an epoch follows from (seed, epoch) alone."""

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


class ModelConfig(Section):
    """The built-in decoder: RMSNorm, RoPE, SwiGLU, grouped-query attention, tied embedding."""

    vocab_size: PositiveInt
    """Token ids are in [0, vocab_size)."""
    width: PositiveInt = 128
    """Model width; a multiple of num_heads, with an even head size."""
    num_layers: PositiveInt = 2
    """Decoder layers."""
    num_heads: PositiveInt = 4
    """Query heads."""
    num_kv_heads: PositiveInt = 2
    """Key and value heads; divides num_heads."""
    ffn_width: PositiveInt = 384
    """Width of the SwiGLU layer."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: PositiveFloat = 1e-6
    """Added to the mean square inside RMSNorm."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _has_whole_heads(self) -> ModelConfig:
        if self.width % self.num_heads or (self.width // self.num_heads) % 2:
            raise ValueError(
                "width / num_heads must be a whole even number "
                f"(got width {self.width}, num_heads {self.num_heads})"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_heads must be a multiple of num_kv_heads "
                f"(got {self.num_heads} and {self.num_kv_heads})"
            )
        return self


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay (norm weights are not decayed)."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of the mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.1
    """Share of the weight taken off each update, times the learning rate."""


class ScheduleConfig(Section):
    """Learning rate over updates: linear warm-up, then cosine."""

    warmup_fraction: Fraction = 0.03
    """Share of all updates in which the rate rises linearly from 0."""
    min_learning_rate_fraction: Fraction = 0.1
    """The cosine ends at this share of the peak."""


class LoopConfig(Section):
    """How long and with what the loop trains. A step is one batch; an update may take several."""

    epochs: PositiveInt = 1
    """Passes over the data."""
    max_steps: PositiveInt | None = None
    """Steps (batches) after which the run ends early; null: all epochs."""
    tokens_per_update: PositiveInt | None = None
    """Real tokens of an optimizer update, on average; null: one update a step."""
    clip_norm: PositiveFloat | None = 1.0
    """Global gradient norm above which gradients are scaled down; null: no clipping."""
    out: str = "runs/train"
    """Folder of metrics.jsonl and checkpoints; relative to the working folder."""
    checkpoint_every_steps: PositiveInt = 500
    """Steps between checkpoints, taken at the next update; one more at the end."""
    keep_last: PositiveInt = 2
    """Checkpoints kept."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the initial weights."""


class PredictionRecord(Section):
    """What the study predicted for this config: estimated from measured compiles and steps."""

    estimated_run_s: float
    """Seconds for all epochs, compile time included."""
    estimated_real_tokens_per_s: float
    """Real tokens per second over those seconds."""
    estimated_steady_real_tokens_per_s: float
    """The same without compile time."""
    estimated_compile_s: float
    """Compile seconds of all shapes and of the update."""
    effective_token_fraction: Fraction
    """Real tokens / padded tokens of the plan, exact."""
    peak_bytes: int
    """Largest memory seen in the trial (resident set on CPU)."""


class ProvenanceConfig(Section):
    """Where this config comes from; `varseq-train` compares it with the world."""

    data_fingerprint: str
    """Content fingerprint of the MindRecord set that was tuned on."""
    num_samples: Annotated[int, Field(ge=0)]
    """Rows of that set."""
    device: str
    """Device the trials ran on."""
    versions: dict[str, str]
    """Versions of varseq-tuner, MindSpore, NumPy and Python."""
    study: str
    """Name of the Optuna study."""
    trial: Annotated[int, Field(ge=0)]
    """Number of the trial in that study."""
    shapes: tuple[tuple[PositiveInt, PositiveInt], ...]
    """Planned (batch size, padded length), in the order of warm-up."""
    prediction: PredictionRecord
    """The figures that the study chose by."""


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
    device: Literal["auto", "cpu", "ascend"] = "auto"
    """auto: Ascend where MindSpore reports one, else CPU."""
    provenance: ProvenanceConfig | None = None
    """Written by varseq-tune; null in a config written by hand."""

"""What the study may choose: a search space file, fitted to the data and the device."""

from __future__ import annotations

import importlib.resources
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tuner.batching.align import align_length
from tuner.config.codec import parse_model, read_yaml, to_plain
from tuner.config.schema import (
    AlignRule,
    ComputeDtype,
    ModelConfig,
    StrategyName,
    TrainConfig,
)
from tuner.config.sections import PositiveFloat, PositiveInt, Section
from tuner.errors import BadInputError

Align = PositiveInt | tuple[AlignRule, ...]


class IntRange(Section):
    """Whole numbers, both ends included."""

    low: PositiveInt
    """Smallest."""
    high: PositiveInt
    """Largest."""

    @model_validator(mode="after")
    def _is_a_range(self) -> IntRange:
        if self.low > self.high:
            raise ValueError(f"low must be at most high (got {self.low} and {self.high})")
        return self


class SearchSpace(Section):
    """A search space file."""

    strategy: Annotated[tuple[StrategyName, ...], Field(min_length=1)]
    """Batching strategies."""
    num_buckets: IntRange
    """Buckets at most, for bucketed; of static graphs never more than `max_static_shapes`."""
    packed_lengths: IntRange = IntRange(low=1, high=1)
    """Lengths of packed rows at most, for packed."""
    align: Annotated[tuple[Align, ...], Field(min_length=1)]
    """Alignment rules."""
    longest_rows_per_batch: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Token budgets, as rows of the longest padded length."""
    graph_mode: Annotated[tuple[Literal["static", "dynamic"], ...], Field(min_length=1)]
    """Graph modes."""
    jit_level: Annotated[tuple[Literal["O0", "O1", "O2"], ...], Field(min_length=1)]
    """Levels; which of them are tried depends on the device."""
    compute_dtype: Annotated[tuple[ComputeDtype, ...], Field(min_length=1)] = ("fp32",)
    """Precisions of the matrix products; which of them are tried depends on the device."""
    max_loss_deviation: PositiveFloat = 0.002
    """Relative deviation of the loss from fp32 above which a precision is infeasible."""
    max_gradient_deviation: PositiveFloat = 0.03
    """The same for the gradient: norm of the difference over the norm of the fp32 gradient."""
    fill_memory: bool = False
    """Also try the largest batches that fit in memory, found by real steps."""
    max_static_shapes: PositiveInt = 32
    """Static shapes of a plan at most."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One point of the space.

    Attributes:
        strategy: Batching strategy.
        num_buckets: Buckets at most; None unless bucketed.
        align: Alignment rule.
        longest_rows_per_batch: Token budget as rows of the longest padded length.
        graph_mode: Graph mode.
        jit_level: Level.
        compute_dtype: Precision of the matrix products.
        fp32_ops: Op groups that stay in fp32, in the order of OP_GROUPS; () for fp32.
        packed_lengths: Lengths of packed rows at most; 1 unless packed.
    """

    strategy: str
    num_buckets: int | None
    align: Align
    longest_rows_per_batch: int
    graph_mode: str
    jit_level: str
    compute_dtype: str = "fp32"
    fp32_ops: tuple[str, ...] = ()
    packed_lengths: int = 1


def load_space(name_or_path: str) -> SearchSpace:
    """A space by its name among the shipped ones, or from a file.

    Raises:
        BadInputError: there is none, or it breaks the schema.
    """
    shipped = {file.stem: file for file in sorted(_shipped_folder().glob("*.yaml"))}
    # A shipped name first: a folder that happens to be called `default` must not hide it.
    path = shipped.get(name_or_path, Path(name_or_path))
    if not path.suffix and not path.is_file():
        raise BadInputError(
            f"--space: no search space is called {name_or_path!r}",
            fix=f"give a file, or one of: {', '.join(shipped)}",
        )
    return parse_model(SearchSpace, read_yaml(path), source=str(path))


LARGEST_OF_UPDATE = 1.1
"""Tokens of a full batch over those of an update, at most: batches hold some padding too."""

WHOLE_GRAPH_NOTE = (
    "jit_level O2 is tried with static graphs only: it compiles whole graphs and takes no dynamic "
    "shapes; MindSpore has deprecated it since 2.9"
)


def fit_to_device(space: SearchSpace, device: str) -> tuple[SearchSpace, list[str]]:
    """The space without what the device does not take, and the reasons in words.

    Args:
        space: As written.
        device: `CPU` or `Ascend`.
    """
    if device == "Ascend":
        return space, ([WHOLE_GRAPH_NOTE] if "O2" in space.jit_level else [])
    changes: dict[str, Any] = {}
    notes = []
    if space.jit_level != ("O0",):
        left_out = ", ".join(level for level in space.jit_level if level != "O0")
        notes.append(
            f"jit_level {left_out} not tried: on {device} every level compiles to the same "
            "kernels, so its timing says nothing about an NPU"
        )
        changes["jit_level"] = ("O0",)
    if "bf16" in space.compute_dtype:
        notes.append(f"bf16 not tried: MindSpore has no kernels for it on {device}")
        kept = tuple(dtype for dtype in space.compute_dtype if dtype != "bf16")
        changes["compute_dtype"] = kept or ("fp32",)
    if "fp16" in space.compute_dtype:
        notes.append(
            f"fp16 on {device} is slower than fp32, whatever op groups stay in fp32; which groups "
            "are sensitive carries over to an NPU, the speed does not"
        )
    return space.model_copy(update=changes), notes


def fit_to_model(space: SearchSpace, model: ModelConfig) -> tuple[SearchSpace, list[str]]:
    """The space without what a model does not take, and the reasons in words.

    Args:
        space: As written.
        model: The model section of the base config.
    """
    if model.factory is None or space.compute_dtype == ("fp32",):
        return space, []
    note = (
        "compute_dtype below fp32 not tried: its op groups are those of the built-in decoder, and "
        f"the Cell of {model.factory} chooses its own precision"
    )
    return space.model_copy(update={"compute_dtype": ("fp32",)}), [note]


def fit_to_update(
    space: SearchSpace, base: TrainConfig, longest: int
) -> tuple[SearchSpace, list[str]]:
    """The space without batches that hold more than an optimizer update, and the reasons in words.

    A batch is never parted, so that larger ones would train fewer and larger updates than the
    config asks for. The smallest batches stay in any case.

    Args:
        space: As written.
        base: The base config; without tokens_per_update an update is what the largest batch holds.
        longest: Tokens of the longest row after truncation.
    """
    wanted = base.train.tokens_per_update
    if wanted is None:
        return space, []
    rows = space.longest_rows_per_batch
    most_rows = max(min(rows), LARGEST_OF_UPDATE * wanted / longest)
    kept = tuple(count for count in rows if count <= most_rows)
    notes = []
    if kept != rows:
        left_out = ", ".join(str(count) for count in rows if count > most_rows)
        notes.append(
            f"longest_rows_per_batch {left_out} not tried: batches of that many rows of {longest} "
            f"tokens hold more than an update, train.tokens_per_update {wanted}"
        )
    if min(rows) * longest > LARGEST_OF_UPDATE * wanted:
        notes.append(
            f"batches of {min(rows)} rows of {longest} tokens, the smallest of the space, may "
            f"hold more than train.tokens_per_update {wanted}: updates are larger then"
        )
    return space.model_copy(update={"longest_rows_per_batch": kept}), notes


def is_compilable(graph_mode: str, jit_level: str) -> bool:
    """Whether MindSpore compiles this level in this mode: O2 takes static shapes only."""
    return jit_level != "O2" or graph_mode == "static"


def choice_overrides(choice: Choice, longest: int) -> dict[str, Any]:
    """The config fields that a choice sets.

    Args:
        choice: A point of the space.
        longest: Tokens of the longest row after truncation.
    """
    budget = choice.longest_rows_per_batch * align_length(longest, choice.align)
    align = choice.align
    return {
        "batching.strategy": choice.strategy,
        "batching.num_buckets": choice.num_buckets or 1,
        "batching.boundary_rule": "least_padding",
        "batching.boundaries": [],
        "batching.batch_sizes": [],
        "batching.samples_per_batch": None,
        "batching.align": align if isinstance(align, int) else [to_plain(rule) for rule in align],
        "batching.tokens_per_batch": budget,
        # A further shape costs nothing there.
        "batching.one_size_per_length": choice.graph_mode != "dynamic",
        "graph.mode": choice.graph_mode,
        "graph.jit_level": choice.jit_level,
        "precision.compute_dtype": choice.compute_dtype,
        "precision.fp32_ops": list(choice.fp32_ops),
    }


def first_choices(space: SearchSpace) -> list[Choice]:
    """What is tried before anything is proposed: the simplest config of each strategy.

    The first is pad-to-longest where the space has it: the figure that others are held against.
    """
    static = "static" if "static" in space.graph_mode else space.graph_mode[0]
    dynamic = "dynamic" if "dynamic" in space.graph_mode else space.graph_mode[0]
    # Half of the largest number of buckets, within the range.
    buckets = max(space.num_buckets.low, space.num_buckets.high // 2)
    modes = {"fixed": static, "bucketed": static, "packed": static, "dynamic": dynamic}
    return [
        Choice(
            strategy=strategy,
            num_buckets=buckets if strategy == "bucketed" else None,
            align=space.align[0],
            longest_rows_per_batch=space.longest_rows_per_batch[-1],
            graph_mode=mode,
            jit_level=space.jit_level[0],
        )
        for strategy, mode in modes.items()
        if strategy in space.strategy
    ]


def all_choices(space: SearchSpace) -> list[Choice]:
    """Every point of the space; some lead to the same config.

    Packed rows come with the first alignment alone: it shifts their few lengths by some tokens.
    """
    buckets = range(space.num_buckets.low, space.num_buckets.high + 1)
    lengths = range(space.packed_lengths.low, space.packed_lengths.high + 1)
    batchings = [
        (strategy, count, packed)
        for strategy in space.strategy
        for count in (buckets if strategy == "bucketed" else (None,))
        for packed in (lengths if strategy == "packed" else (1,))
    ]
    return [
        Choice(
            strategy=strategy,
            num_buckets=count,
            packed_lengths=packed,
            align=align,
            longest_rows_per_batch=rows,
            graph_mode=mode,
            jit_level=level,
        )
        for (strategy, count, packed), align, rows, mode, level in itertools.product(
            batchings,
            space.align,
            space.longest_rows_per_batch,
            space.graph_mode,
            space.jit_level,
        )
        if is_compilable(mode, level) and (strategy != "packed" or align == space.align[0])
    ]


def tokens_per_update(space: SearchSpace, base: TrainConfig, longest: int) -> int:
    """Real tokens of an optimizer update, the same for every candidate.

    The base's own figure if it has one, else the largest token budget of the space, so that every
    candidate trains the same updates whatever its batches are.
    """
    if base.train.tokens_per_update is not None:
        return base.train.tokens_per_update
    return max(space.longest_rows_per_batch) * longest


def _shipped_folder() -> Path:
    """`search_spaces` inside the installed package, or beside it in a checkout."""
    package = Path(str(importlib.resources.files("tuner")))
    installed = package / "search_spaces"
    return installed if installed.is_dir() else package.parent / "search_spaces"

"""cost_model.yaml: what a study learned about costs, to be read by people and by other studies.

Under every key stand the measurements and what was fitted to them. Reading it back fits again;
the written fit is taken where an entry has no measurements, so that a file may also be written by
hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tuner.config.codec import parse_model, read_yaml
from tuner.config.sections import Section
from tuner.errors import BadInputError
from tuner.simulate.cost import CostModel, StepCost
from tuner.simulate.cost_book import LEAST_SHAPES, CostBook, KnownCosts
from tuner.simulate.measurement import (
    CostKey,
    ProcessMeasurement,
    ShapeMeasurement,
    UpdateMeasurement,
)
from tuner.simulate.memory import MemoryCost

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

GivenModels = Mapping[CostKey, tuple[CostModel, MemoryCost | None]]
"""Fits from elsewhere, by key."""


class FittedSeconds(Section):
    """step_s = overhead_s + token_s * B * L + attention_s * B * L^2; compiles from that."""

    overhead_s: Amount
    """Seconds a step."""
    token_s: Amount
    """Seconds a padded token."""
    attention_s: Amount
    """Seconds a padded token and token attended to."""
    compile_base_s: Amount
    """Seconds of a compile, besides the next."""
    compile_per_step_s: Amount
    """Seconds of a first call for each second of a step."""
    step_error: Amount = 0.15
    """Relative error of a step that was not measured, 95 %."""
    compile_error: Amount = 0.3
    """Relative error of a compile that was not measured, 95 %."""

    @model_validator(mode="after")
    def _check_step(self) -> FittedSeconds:
        if self.overhead_s + self.token_s + self.attention_s == 0.0:
            raise ValueError("one of overhead_s, token_s and attention_s must be above 0")
        return self


class FittedBytes(Section):
    """peak = fixed + the largest shape, and of static graphs a share of every other."""

    fixed_bytes: Amount
    """Of a process without a shape."""
    graph_bytes: Amount
    """Of a shape, besides the next two."""
    token_bytes: Amount
    """A padded token."""
    attention_bytes: Amount
    """A padded token and token attended to."""
    further_share: Share = 1.0
    """Of these bytes that every static shape but the largest takes."""
    error: Amount = 0.2
    """Relative error of what shapes add, 95 %."""


class MeasuredShape(Section):
    """What one shape cost in a process; see ShapeMeasurement."""

    batch_size: int = Field(ge=1)
    """B."""
    padded_length: int = Field(ge=1)
    """L in tokens."""
    first_call_s: Seconds
    """Seconds of the first call."""
    steady_s: tuple[Seconds, ...] = Field(min_length=1)
    """Seconds of each steady step."""
    settling_s: tuple[Seconds, ...] = ()
    """Seconds of the calls between the first and the steady ones."""
    has_compiled: bool
    """The first call compiled a graph."""
    memory_bytes: Count
    """Memory of the process after this shape."""
    added_bytes: Count
    """What the shape added to it."""
    loss: float | None = None
    """A label, in the first call."""


class MeasuredUpdate(Section):
    """What an optimizer update cost in a process."""

    first_call_s: Seconds
    """Seconds of the first call."""
    update_s: Seconds
    """Seconds of a steady one."""


class MeasuredProcess(Section):
    """All that one process measured."""

    shapes: tuple[MeasuredShape, ...] = Field(min_length=1)
    """In the order of their first calls."""
    update: MeasuredUpdate | None = None
    """Null if it did not get that far."""
    base_bytes: Count = 0
    """Memory before the first shape; 0 if it is not known."""
    peak_bytes: Count = 0
    """Largest memory; 0 if it is not known."""


class CostEntry(Section):
    """The costs of one key."""

    device: str
    """CPU or Ascend."""
    graph_mode: Literal["static", "dynamic"]
    """static or dynamic."""
    jit_level: Literal["O0", "O1", "O2"]
    """O0 to O2."""
    precision: str
    """fp32, or the compute dtype with the op groups in fp32, as fp16+softmax."""
    rows: Literal["single", "packed"]
    """single or packed."""
    seconds: FittedSeconds
    """What was fitted."""
    memory: FittedBytes | None = None
    """What was fitted; null where it is not known."""
    measured: tuple[MeasuredProcess, ...] = ()
    """In any order. Where there are any, the above is fitted to them again."""


class CostFile(Section):
    """The whole file."""

    format: Literal[1] = 1
    """Of this file."""
    model: str
    """Fingerprint of what the costs belong to: model, optimizer, versions. Others are refused."""
    costs: tuple[CostEntry, ...]
    """An entry a key."""

    @model_validator(mode="after")
    def _check_keys(self) -> CostFile:
        keys = [_key(entry) for entry in self.costs]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"costs must have one entry a key (got {key} twice)")
        return self


def cost_file(book: CostBook, model: str) -> CostFile:
    """What to write; `format_config` makes it text.

    Args:
        book: Measurements of a study.
        model: Fingerprint of what they belong to.
    """
    return CostFile(model=model, costs=tuple(_entry(book, key) for key in book.keys))


def read_cost_file(path: str | Path) -> CostFile:
    """Read a file.

    Raises:
        BadInputError: it cannot be read, or is no cost model.
    """
    return parse_model(CostFile, read_yaml(path), source=str(path))


def given_models(file: CostFile) -> GivenModels:
    """The fits of a file: prior knowledge for a study that measures by itself.

    An entry of too few shapes for a fit of its own keeps the one that it was written with: the
    study that wrote it had other keys, or a file, to borrow from.
    """
    book = CostBook(process for entry in file.costs for process in _processes(entry))
    found: dict[CostKey, tuple[CostModel, MemoryCost | None]] = {}
    for entry in file.costs:
        key = _key(entry)
        if _num_measured(entry) >= LEAST_SHAPES:
            found[key] = book.known(key).model, book.known(key).memory
        else:
            memory = book.known(key).memory if entry.measured else _written_memory(entry)
            found[key] = _written_model(entry), memory
    return found


def read_static_model(path: str | Path) -> CostModel:
    """The fit of static graphs in a file; of several that with the most measured shapes.

    Raises:
        BadInputError: the file cannot be read, or holds no static graph.
    """
    file = read_cost_file(path)
    static = [entry for entry in file.costs if entry.graph_mode == "static"]
    if not static:
        raise BadInputError(
            f"{path} holds no costs of static graphs",
            fix="name the results folder of a finished `varseq-tune`, or leave it out",
        )
    entry = max(static, key=_num_measured)
    return replace(given_models(file)[_key(entry)][0], source=f"{_described(entry)} in {path}")


def _described(entry: CostEntry) -> str:
    count = _num_measured(entry)
    return f"measured at {count} shapes" if count else "written by hand"


def _num_measured(entry: CostEntry) -> int:
    return len({item.shape for process in _processes(entry) for item in process.shapes})


def _entry(book: CostBook, key: CostKey) -> CostEntry:
    known = book.known(key)
    return CostEntry(
        **_fields(key),
        seconds=_fitted_seconds(known),
        memory=FittedBytes(**_memory_fields(known.memory)) if known.memory else None,
        measured=tuple(_written(item) for item in book.processes(key) if item.shapes),
    )


def _written(process: ProcessMeasurement) -> MeasuredProcess:
    fields = asdict(process)
    del fields["key"]
    return MeasuredProcess(**fields)


def _fitted_seconds(known: KnownCosts) -> FittedSeconds:
    model = known.model
    return FittedSeconds(
        overhead_s=model.step.overhead_s,
        token_s=model.step.token_s,
        attention_s=model.step.attention_s,
        compile_base_s=model.compile_base_s,
        compile_per_step_s=model.compile_per_step_s,
        step_error=max(2.0 * model.step.relative_error, model.step.scaled_error),
        compile_error=model.compile_error,
    )


def _memory_fields(memory: MemoryCost) -> dict[str, float]:
    return {name: getattr(memory, name) for name in FittedBytes.model_fields}


def _fields(key: CostKey) -> dict[str, Any]:
    return {name: getattr(key, name) for name in CostKey.__dataclass_fields__}


def _key(entry: CostEntry) -> CostKey:
    return CostKey(**{name: getattr(entry, name) for name in CostKey.__dataclass_fields__})


def _processes(entry: CostEntry) -> tuple[ProcessMeasurement, ...]:
    return tuple(
        ProcessMeasurement(
            key=_key(entry),
            shapes=tuple(ShapeMeasurement(**shape.model_dump()) for shape in item.shapes),
            update=UpdateMeasurement(**item.update.model_dump()) if item.update else None,
            base_bytes=item.base_bytes,
            peak_bytes=item.peak_bytes,
        )
        for item in entry.measured
    )


def _written_model(entry: CostEntry) -> CostModel:
    seconds = entry.seconds
    return CostModel(
        step=StepCost(
            overhead_s=seconds.overhead_s,
            token_s=seconds.token_s,
            attention_s=seconds.attention_s,
            max_relative_error=seconds.step_error,
            scaled_error=seconds.step_error,
        ),
        compile_base_s=seconds.compile_base_s,
        compile_per_step_s=seconds.compile_per_step_s,
        compile_error=seconds.compile_error,
        is_one_graph=entry.graph_mode == "dynamic",
        source="a cost model that was given",
    )


def _written_memory(entry: CostEntry) -> MemoryCost | None:
    if entry.memory is None:
        return None
    return MemoryCost(**entry.memory.model_dump(), is_one_graph=entry.graph_mode == "dynamic")

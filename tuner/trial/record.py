"""What a trial is asked and what it answers; both are JSON files in the trial's folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from tuner.batching.grouping import Shape
from tuner.config.schema import TrainConfig
from tuner.simulate.measurement import ShapeMeasurement, UpdateMeasurement

Status = Literal["ok", "pruned", "oom", "timeout", "crashed", "diverged", "refused"]

Record = TypeVar("Record")


class UnreadableRecordError(Exception):
    """A trial's file does not hold what it should."""


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """What to measure.

    Attributes:
        config: A whole config, boundaries resolved.
        lengths_file: `.npy` of the length of every row, int32 [N].
        shapes: (B, L) to measure, in this order, largest first; at least one. Shapes of the plan
            get real rows, others full rows of random ids.
        timed_steps: Steady steps timed for each shape at most, >= 2; fewer where they are long,
            more where timed_s asks for them.
        time_limit_s: Wall seconds of the whole trial, > 0.
        memory_limit_bytes: Resident set of its process at most, > 0.
        device_id: Of several devices the one to run on.
        timed_s: Seconds of steady steps of all shapes together, at least, >= 0.
        turns_file: Steps are timed in turn with other processes that have this file (turns.py);
            None: one after the other.
        turn_s: Seconds of its turns there, at least, > 0.
    """

    config: TrainConfig
    lengths_file: str
    shapes: tuple[Shape, ...]
    timed_steps: int
    time_limit_s: float
    memory_limit_bytes: int
    device_id: int = 0
    timed_s: float = 0.0
    turns_file: str | None = None
    turn_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What came of a trial; a failure is a value too.

    Attributes:
        status: ok; pruned: stopped, since what was measured cannot become the best; oom: over the
            memory limit or an allocation failed; timeout: over the time limit; crashed: any other
            end; diverged: a loss that is not a number; refused: the config cannot run here.
        reason: Empty for ok, else one line.
        shapes: Measured shapes in the order of their first call; what there was before a failure.
        update: None if the trial did not get that far.
        base_bytes: Memory before the first shape; 0 if the trial did not get that far.
        peak_bytes: Largest memory seen.
        memory_kind: What peak_bytes is.
        wall_s: Wall seconds of the trial's process.
        other_cores: Cores that other programs of the machine took meanwhile, on average, >= 0.
    """

    status: Status
    reason: str = ""
    shapes: tuple[ShapeMeasurement, ...] = ()
    update: UpdateMeasurement | None = None
    base_bytes: int = 0
    peak_bytes: int = 0
    memory_kind: str = ""
    wall_s: float = 0.0
    other_cores: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Installation:
    """What trials run on: the device that the config's choice leads to, and versions.

    Attributes:
        device: `CPU` or `Ascend`.
        versions: Of what changes results or timings.
        device_model: As MindSpore names it; empty where it does not.
    """

    device: str
    versions: dict[str, str]
    device_model: str = ""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why nothing can run here: the two halves of a BadInputError."""

    problem: str
    fix: str


def to_json(record: object) -> str:
    """One line of JSON of a record, a dataclass; the inverse of `parse_json`."""
    return TypeAdapter(type(record)).dump_json(record).decode()


def parse_json(kind: type[Record], text: str) -> Record:
    """Read a record back.

    Raises:
        UnreadableRecordError: the text is not such a record.
    """
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UnreadableRecordError(f"{place or 'text'}: {first['msg']}") from None


def is_sound(result: TrialResult) -> bool:
    """Whether a result holds what its status claims, and only seconds that can be true."""
    update = result.update
    if update is not None and not _are_seconds(update.first_call_s, update.update_s):
        return False
    if not all(map(is_sound_shape, result.shapes)):
        return False
    return result.status != "ok" or bool(result.shapes and update is not None)


def is_sound_shape(item: ShapeMeasurement) -> bool:
    """Whether a measurement is of a shape, with one steady step at least."""
    is_shape = min(item.shape) >= 1 and item.added_bytes >= 0
    seconds = (item.first_call_s, *item.settling_s, *item.steady_s)
    return is_shape and bool(item.steady_s) and _are_seconds(*seconds)


def _are_seconds(*values: float) -> bool:
    return all(math.isfinite(value) and value > 0.0 for value in values)

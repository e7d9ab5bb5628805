"""What a trial is asked and what it answers; both are JSON files in the trial's folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from tuner.config.schema import TrainConfig
from tuner.simulate.estimate import ShapeMeasurement, UpdateMeasurement

Status = Literal["ok", "oom", "timeout", "crashed", "diverged", "refused"]

Record = TypeVar("Record")


class UnreadableRecordError(Exception):
    """A trial's file does not hold what it should."""


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """What to measure.

    Attributes:
        config: A whole config, boundaries resolved.
        lengths_file: `.npy` of the length of every row, int32 [N].
        max_shapes: Shapes measured at most, >= 3; the others are estimated from these.
        timed_steps: Steady steps timed for each shape at most, >= 2; fewer where they are long.
        time_limit_s: Wall seconds of the whole trial, > 0.
        memory_limit_bytes: Resident set of its process at most, > 0.
    """

    config: TrainConfig
    lengths_file: str
    max_shapes: int
    timed_steps: int
    time_limit_s: float
    memory_limit_bytes: int


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What came of a trial; a failure is a value too.

    Attributes:
        status: ok; oom: over the memory limit or an allocation failed; timeout: over the time
            limit; crashed: any other end; diverged: a loss that is not a number; refused: the
            config cannot run here.
        reason: Empty for ok, else one line.
        shapes: Measured shapes in the order of their first call; what there was before a failure.
        update: None if the trial did not get that far.
        peak_bytes: Largest memory seen.
        memory_kind: What peak_bytes is.
        wall_s: Wall seconds of the trial's process.
    """

    status: Status
    reason: str = ""
    shapes: tuple[ShapeMeasurement, ...] = ()
    update: UpdateMeasurement | None = None
    peak_bytes: int = 0
    memory_kind: str = ""
    wall_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Installation:
    """What trials run on: the device that the config's choice leads to, and versions."""

    device: str
    versions: dict[str, str]


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

"""The section of the device's memory pool."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tuner.config.sections import Section

GigaBytes = Annotated[float, Field(ge=0.01, le=1024.0, allow_inf_nan=False)]
"""GB as MindSpore counts them, 2^30 bytes; taken to two decimals."""


class MemoryConfig(Section):
    """How MindSpore's memory pool on Ascend grows. Without effect on CPU, which has none.

    What is null stays as MindSpore has it.
    """

    max_size_gb: GigaBytes | None = None
    """Largest size of the pool, GB; a device with less gives what it has."""
    init_size_gb: GigaBytes | None = None
    """Size of the pool when it is opened, GB."""
    increase_size_gb: GigaBytes | None = None
    """What a pool that is too small grows by, GB."""
    optimize_level: Literal["O0", "O1"] | None = None
    """O0: memory is reused as the graph runs; O1: planned when it is compiled, static shapes."""
    enable_vmm: bool | None = None
    """Whether the pool joins pieces by virtual addresses; without, it fragments."""

    @model_validator(mode="after")
    def _says_something(self) -> MemoryConfig:
        if all(value is None for value in vars(self).values()):
            raise ValueError("memory sets nothing; leave it out or set it to null")
        return self

    @model_validator(mode="after")
    def _starts_within_its_limit(self) -> MemoryConfig:
        first, largest = self.init_size_gb, self.max_size_gb
        if first is not None and largest is not None and first > largest:
            raise ValueError(
                f"init_size_gb must be at most max_size_gb (got {first:g} and {largest:g})"
            )
        return self

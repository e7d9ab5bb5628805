"""What every section of a config is made of."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A part of the config: immutable, and strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    left_out_at_default: ClassVar[frozenset[str]] = frozenset()
    """Fields that are written only where they are set: configs, studies and checkpoints from
    before such a field keep their text and their fingerprints."""

    @model_serializer(mode="wrap")
    def _without_unset_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        plain: dict[str, Any] = handler(self)
        fields = type(self).model_fields
        for name in self.left_out_at_default:
            if getattr(self, name) == fields[name].default:
                plain.pop(name, None)
        return plain

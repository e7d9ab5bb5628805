"""Fields of a JSON object by name and type, with errors that name file, field and value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tuner.errors import BadInputError


class Fields:
    """A JSON object and where it stands.

    Args:
        content: The object.
        source: File, and field of it; starts every error line.
    """

    def __init__(self, content: Mapping[str, Any], source: str) -> None:
        self.content = content
        self.source = source

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number >= 1.

        Raises:
            BadInputError: it is something else, or absent with no default.
        """
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise refuse(self, name, "a whole number >= 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number > 0.

        Raises:
            BadInputError: it is something else, or absent with no default.
        """
        value = self._value(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise refuse(self, name, "a number > 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; null counts as absent.

        Raises:
            BadInputError: it is something else.
        """
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise refuse(self, name, "true or false")
        return value

    def is_null(self, name: str) -> bool:
        """Whether the field is there and null."""
        return name in self.content and self.content[name] is None

    def _value(self, name: str, default: Any) -> Any:
        value = self.content.get(name)
        if value is not None:
            return value
        if default is None:
            raise BadInputError(
                f"{self.source}: {name} is missing", fix="get the checkpoint again"
            )
        return default


def refuse(fields: Fields, name: str, needed: str) -> BadInputError:
    """The error for a field whose value is not taken.

    Args:
        fields: The object.
        name: The field.
        needed: What it would have to be.
    """
    return BadInputError(
        f"{fields.source}: {name} must be {needed} (got {fields.content.get(name)!r})",
        fix="take a checkpoint of the Llama, Qwen2 or Qwen3 family that has it",
    )

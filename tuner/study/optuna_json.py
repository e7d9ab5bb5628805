"""Values of any size in attributes whose size some databases limit.

MySQL keeps 65,535 bytes of an attribute. A longer value is split into numbered parts; the
attribute of its own name is written last and names them, so that a reader never sees half of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

# The quotes of a text in JSON count twice: half of the limit, with room to spare.
MAX_CHARACTERS = 30_000
SPLIT = {"parts", "digest"}


def split_attribute(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that hold a value, in the order in which they must be written.

    Args:
        key: Of the value.
        value: Plain JSON.
    """
    text = json.dumps(value)
    if len(text) <= MAX_CHARACTERS:
        yield key, value
        return
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    starts = range(0, len(text), MAX_CHARACTERS)
    for index, start in enumerate(starts):
        yield _part(key, digest, index), text[start : start + MAX_CHARACTERS]
    yield key, {"parts": len(starts), "digest": digest}


def join_attribute(attributes: Mapping[str, Any], key: str) -> Any:
    """The value of a key, None if there is none; the inverse of `split_attribute`."""
    value = attributes.get(key)
    if not isinstance(value, Mapping) or set(value) != SPLIT:
        return value
    parts = (_part(key, value["digest"], index) for index in range(value["parts"]))
    return json.loads("".join(attributes[part] for part in parts))


def _part(key: str, digest: str, index: int) -> str:
    return f"{key}/{digest}/{index}"

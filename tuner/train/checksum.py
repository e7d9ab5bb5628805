"""sha256 of files and of plain data, by which a damaged or changed one is found out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 22


def file_sha256(path: Path) -> str:
    """Of a file as it can be read now.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def plain_sha256(plain: dict[str, Any]) -> str:
    """Of plain data that JSON can hold, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

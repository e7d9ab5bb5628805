"""Lengths kept in a folder of the caller's choice, for the next start on the same data.

A file is one line of JSON, which says what it belongs to, and the lengths as little-endian int32.
It is named after the fingerprint of the data and the column, is written beside and renamed when it
reads back well, and is believed only if all of it fits: anything else is as good as no file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer[Any]]
LengthSource = Literal["given", "index", "headers", "rows"]

FORMAT = "varseq lengths 1"
FILE_TOKENS = "<i4"


@dataclass(frozen=True, kw_only=True)
class FoundTokens:
    """Tokens of every row, and where they were found."""

    tokens: IntArray
    """int32 [N]."""
    source: LengthSource


@dataclass(frozen=True, kw_only=True)
class LengthCache:
    """The lengths of one column of one set, as far as a folder has them."""

    folder: Path
    """Made when lengths are written."""
    fingerprint: str
    """Of the data."""
    column: str
    """Whose elements were counted."""

    @property
    def path(self) -> Path:
        """The file of these lengths."""
        column = hashlib.sha256(self.column.encode()).hexdigest()
        return self.folder / f"lengths-{self.fingerprint[:32]}-{column[:8]}.bin"

    def read(self, num_rows: int) -> FoundTokens | None:
        """The lengths, or None if they are not there, damaged, or those of other data."""
        return self._read_file(self.path, num_rows)

    def write(self, found: FoundTokens, notice: Callable[[str], None]) -> None:
        """Keep lengths; `notice` is told if that cannot be done."""
        content = self._header(found) + found.tokens.astype(FILE_TOKENS).tobytes()
        unfinished = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(prefix=".lengths-", dir=self.folder)
            unfinished = Path(name)
            # mkstemp keeps it to this user; results folders are shared.
            os.fchmod(number, 0o644)
            with os.fdopen(number, "wb") as stream:
                stream.write(content)
            if self._read_file(unfinished, len(found.tokens)) is None:
                raise OSError("what was written does not read back")
            os.replace(unfinished, self.path)
            unfinished = None
        except OSError as error:
            reason = error.strerror or error
            notice(f"the lengths are not kept: cannot write to {self.folder} ({reason})")
        finally:
            if unfinished is not None:
                unfinished.unlink(missing_ok=True)

    def _read_file(self, path: Path, num_rows: int) -> FoundTokens | None:
        try:
            header, _, body = path.read_bytes().partition(b"\n")
            source = json.loads(header)["source"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if source not in get_args(LengthSource) or len(body) != 4 * num_rows:
            return None
        tokens = np.frombuffer(body, FILE_TOKENS).astype(np.int32)
        found = FoundTokens(tokens=tokens, source=source)
        return found if self._header(found) == header + b"\n" else None

    def _header(self, found: FoundTokens) -> bytes:
        """The first line of the file: it holds a digest of the rest."""
        body = found.tokens.astype(FILE_TOKENS).tobytes()
        parts = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "column": self.column,
            "source": found.source,
            "sha256": hashlib.sha256(found.source.encode() + body).hexdigest(),
        }
        return json.dumps(parts, sort_keys=True).encode() + b"\n"

"""Tensors of Hugging Face checkpoints: foreign files, some bfloat16, large beside the memory.

The safetensors package checks headers and writes files; payloads are read here, one tensor at a
time, since NumPy has no bfloat16 and a model must not be in memory twice.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from tuner.errors import BadInputError

StoredDtype = Literal["fp32", "bf16", "fp16"]

CODES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
SPEC_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
BYTES_OF_NUMBER = {"F32": 4, "BF16": 2, "F16": 2}
# The header's length stands before it as a little-endian number of so many bytes.
LENGTH_BYTES = 8
# What transformers writes itself, and asks for when it loads.
METADATA = {"format": "pt"}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor stands.

    Attributes:
        file: The file.
        dtype: As the header names it, for example BF16.
        shape: Its shape.
        start: Bytes from the start of the file to its first number.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self) -> NDArray[np.float32]:
        """Its numbers as float32.

        Raises:
            BadInputError: a dtype that is not read here, a file cut off since, or a number that
                is not finite.
        """
        if self.dtype not in BYTES_OF_NUMBER:
            raise BadInputError(
                f"{self.file} holds {self.dtype} tensors",
                fix=f"take a checkpoint of {', '.join(BYTES_OF_NUMBER)}",
            )
        num_bytes = math.prod(self.shape) * BYTES_OF_NUMBER[self.dtype]
        with self.file.open("rb") as file:
            file.seek(self.start)
            raw = file.read(num_bytes)
        if len(raw) != num_bytes:
            raise _damaged(self.file, "it ends inside a tensor")
        values = _decode(raw, self.dtype).reshape(self.shape)
        if not np.isfinite(values).all():
            raise _damaged(self.file, "it holds numbers that are not finite")
        return values


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Name -> tensor of all that a file holds; nothing of the payload is read.

    Raises:
        BadInputError: the file cannot be read, or header and size do not fit together.
    """
    try:
        # The package checks dtypes, shapes, offsets and the file's size.
        with safe_open(path, framework="np"):
            pass
        content, payload = _read_json(path)
    except FileNotFoundError:
        raise BadInputError(
            f"no such file: {path}", fix="get all files of the checkpoint"
        ) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(path, " ".join(str(error).split())) from None
    return {
        name: StoredTensor(
            file=path,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=payload + entry["data_offsets"][0],
        )
        for name, entry in content.items()
        if name != "__metadata__"
    }


def write_stored(
    path: Path, weights: Mapping[str, NDArray[np.float32]], dtype: StoredDtype
) -> None:
    """Write one file and bring it to the disk.

    Args:
        path: The file; nobody reads it yet.
        weights: Name -> float32 array.
        dtype: What is stored; rounded to nearest, ties to even.

    Raises:
        BadInputError: a number is too large for fp16, or the file cannot be written.
    """
    stored = {name: _encode(name, values, dtype) for name, values in weights.items()}
    specs = {
        name: TensorSpec(
            dtype=SPEC_DTYPES[dtype],
            shape=values.shape,
            data_ptr=values.ctypes.data,
            data_len=values.nbytes,
        )
        for name, values in stored.items()
    }
    try:
        serialize_file(specs, path, metadata=METADATA)
        # The package makes it readable to its owner alone.
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"cannot write {path}: {error}", fix="make room") from None


def rounded(values: NDArray[np.float32], dtype: StoredDtype) -> NDArray[np.float32]:
    """What reading gives after `write_stored` of these numbers."""
    return _decode(_encode("", values, dtype).tobytes(), CODES[dtype]).reshape(values.shape)


def _read_json(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The header, and where the payload starts."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        content = json.loads(file.read(length))
    return content, LENGTH_BYTES + length


def _decode(raw: bytes, code: str) -> NDArray[np.float32]:
    if code == "BF16":
        # bfloat16 is the upper half of a float32.
        upper = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
        return upper.view(np.float32)
    return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[code]).astype(np.float32)


def _encode(
    name: str, values: NDArray[np.float32], dtype: StoredDtype
) -> NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]:
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "fp32":
        return values
    if dtype == "bf16":
        bits = values.view(np.uint32)
        to_nearest_even = ((bits >> 16) & 1) + np.uint32(0x7FFF)
        return ((bits + to_nearest_even) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise BadInputError(
            f"{name} holds numbers above 65504, the largest of fp16",
            fix="export as bf16 or fp32",
        )
    return halves


def _damaged(path: Path, reason: str) -> BadInputError:
    return BadInputError(f"{path} is damaged: {reason}", fix="get that file again")

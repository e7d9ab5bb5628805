"""Named arrays in a file of the safetensors format, written and read with NumPy alone.

Nothing of MindSpore takes part, so that a thread may write while graphs run. The file is
`mindspore.load_checkpoint`'s too, with format="safetensors".

Source of the format: github.com/huggingface/safetensors, README: 8 bytes of header length, a JSON
header with dtype, shape and place of every array, then their bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I8": "|i1",
    "U8": "|u1",
    "BOOL": "|b1",
}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}


def write_tensors(path: Path, arrays: Mapping[str, NDArray[Any]]) -> str:
    """Write a new file and bring it to the disk.

    Returns:
        sha256 of the file.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    digest = hashlib.sha256()
    with path.open("xb") as file:
        blocks = [memoryview(_header(arrays)), *map(_bytes, arrays.values())]
        for block in blocks:
            file.write(block)
            digest.update(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of a file; copies.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file, or not all of it is there.
    """
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    arrays = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        values = np.frombuffer(content[start + first : start + last], DTYPES[entry["dtype"]])
        arrays[name] = values.reshape(entry["shape"])
    return arrays


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk.

    Raises:
        OSError: it cannot be opened.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _header(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    entries, place = {}, 0
    for name, array in arrays.items():
        end = place + array.nbytes
        entries[name] = {
            "dtype": CODES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(entries).encode()
    # The arrays start at a multiple of 8, so that they may be mapped.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

"""Whether a file of a compiled graph was written to its end.

MindSpore says nothing when the disk is full while it writes one (2.10): the file is cut off and
the run goes on.
"""

from __future__ import annotations

from pathlib import Path

# Wire types of protocol buffers (protobuf.dev, "Encoding"): the low three bits of a field's tag.
VARINT, FIXED_64, WITH_LENGTH, FIXED_32 = 0, 1, 2, 5
FIXED_SIZES = {FIXED_64: 8, FIXED_32: 4}
MOST_VARINT_BYTES = 10


def is_whole(file: Path) -> bool:
    """Whether a file is a row of whole fields, as a MindIR file, which is one message, is.

    A file that ends between two of its outermost fields cannot be told from a whole one.

    Raises:
        OSError: it cannot be read.
    """
    content = file.read_bytes()
    place = 0
    while place < len(content):
        after = _after_field(content, place)
        if after is None:
            return False
        place = after
    return place == len(content) and place > 0


def _after_field(content: bytes, place: int) -> int | None:
    """Where the field that begins at a place ends, maybe past the end; None: it is no field."""
    tag = _read_varint(content, place)
    if tag is None or tag[0] >> 3 == 0:
        return None
    kind, place = tag[0] & 7, tag[1]
    if kind in FIXED_SIZES:
        return place + FIXED_SIZES[kind]
    number = _read_varint(content, place)
    if kind not in (VARINT, WITH_LENGTH) or number is None:
        return None
    return number[1] + (number[0] if kind == WITH_LENGTH else 0)


def _read_varint(content: bytes, place: int) -> tuple[int, int] | None:
    """A number of seven bits a byte, lowest first, and the place after it; None: it has no end."""
    value = 0
    for i, byte in enumerate(content[place : place + MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, place + i + 1
    return None

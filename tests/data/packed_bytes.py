"""A second writer of packed integers, in plain Python."""

from __future__ import annotations

import struct


def packed(values, largest):
    widths = [next(w for w in (1, 2, 4, 8) if -(256**w) // 2 <= v < 256**w // 2) for v in values]
    assert max(widths, default=1) <= largest
    codes = bytearray((len(values) + 3) // 4)
    for i, width in enumerate(widths):
        codes[i // 4] |= (width.bit_length() - 1) << (6 - 2 * (i % 4))
    content = b"".join(
        v.to_bytes(w, "little", signed=True) for v, w in zip(values, widths, strict=True)
    )
    return struct.pack(">I", len(values)) + bytes(codes) + content

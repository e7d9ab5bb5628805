"""A file is whole or cut off; the bytes are laid out by hand after protobuf's own description."""

from __future__ import annotations

import pytest

from tuner.train.graph_file import is_whole

# Field 1 a varint 150; field 2 the text "testing" (both from the description); field 3 a nested
# message of 300 bytes, its length in two bytes; field 4 eight bytes; field 5 four.
FIELDS = (
    b"\x08\x96\x01",
    b"\x12\x07testing",
    b"\x1a\xac\x02" + bytes(300),
    b"\x21" + bytes(8),
    b"\x2d" + bytes(4),
)
MESSAGE = b"".join(FIELDS)
BETWEEN_FIELDS = {sum(map(len, FIELDS[:n])) for n in range(1, len(FIELDS))}


def test_a_message_is_whole(tmp_path):
    file = tmp_path / "graph.mindir"
    file.write_bytes(MESSAGE)
    assert is_whole(file)


def test_cut_off_anywhere_within_a_field_it_is_not(tmp_path):
    file = tmp_path / "graph.mindir"
    for size in range(len(MESSAGE)):
        file.write_bytes(MESSAGE[:size])
        assert is_whole(file) == (size in BETWEEN_FIELDS), size


@pytest.mark.parametrize(
    "content",
    [
        b"no message at all",
        b"\x0b",  # a group, which newer messages do not have
        b"\x00\x01",  # field 0, which no message has
        b"\x08" + b"\xff" * 11,  # a number without an end
    ],
)
def test_other_content_is_none(content, tmp_path):
    file = tmp_path / "graph.mindir"
    file.write_bytes(content)
    assert not is_whole(file)

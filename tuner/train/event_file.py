"""Event files for TensorBoard: scalars by step, in the folder `events` of a run.

All scalars of a step are one event, and with the system when the step is recorded, as its line in
metrics.jsonl is; so a kill loses none of a step that a checkpoint holds. tensorboardX's own
writers would not do: one waits for the disk at every flush (2.5 ms), the other has a queue and a
thread, which stop the run when the disk is full. From tensorboardX come the messages and the
checksum; the framing of a record is written here. On resume nothing is rewritten: a session start
makes TensorBoard drop what came later.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from tuner.errors import BadInputError

EVENTS_FOLDER = "events"
FILE_VERSION = "brain.Event:2"
MASK_DELTA = 0xA282EAD8
"""Of a checksum that stands beside what it is of (tensorflow/core/lib/hash/crc32c.h)."""


class EventFile:
    """One file of events; a run that is resumed adds another beside it."""

    def __init__(self, folder: Path, keep_steps: int) -> None:
        """Open a new file.

        Args:
            folder: Of the run.
            keep_steps: Events of later steps in earlier files no longer hold; 0 for a new run.

        Raises:
            BadInputError: the folder cannot be written.
        """
        self._folder = folder / EVENTS_FOLDER
        # TensorBoard reads files in the order of their names; the seconds come first.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{name}.{keep_steps}"
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._failure(error) from None
        self._append(Event(wall_time=time.time(), file_version=FILE_VERSION))
        start = SessionLog(status=SessionLog.START)
        self._append(Event(wall_time=time.time(), step=keep_steps + 1, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Write the scalars of a step; None and what is not finite are left out.

        Raises:
            BadInputError: the disk is full or the file is gone.
        """
        values = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars.items()
            if value is not None and math.isfinite(value)
        ]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Bring everything to the disk."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _append(self, event: Event) -> None:
        try:
            self._file.write(_framed(event.SerializeToString()))
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> BadInputError:
        return BadInputError(
            f"cannot write {self._folder}: {error.strerror or error}",
            fix="make room and go on with --resume, or set train.tensorboard to false",
        )


def _framed(data: bytes) -> bytes:
    """A record: length, its checksum, data, its checksum (tensorflow/core/lib/io)."""
    length = struct.pack("<Q", len(data))
    return length + _masked_checksum(length) + data + _masked_checksum(data)


def _masked_checksum(data: bytes) -> bytes:
    checksum = crc32c(data)
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + MASK_DELTA) & 0xFFFFFFFF)

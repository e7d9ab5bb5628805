"""What the ranks of a run tell each other by files in train.out/ranks, which all of them share.

One writer for each file, and every file is replaced as a whole; of a rank that died, its launcher
writes the end. A rank writes its status before it meets the others, so once they have met, no file
is of an earlier run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "ranks"
SCHEDULER_LOG = "scheduler.log"
TAIL_BYTES = 20_000
TAIL_LINES = 12


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank as it was at its last sign of life.

    Attributes:
        rank: Which.
        host: Its machine.
        pid: Its process there.
        beat: Signs of life so far.
        place: What it is doing: start, warm-up, ready, plan, step, profile, evaluation, save,
            failure or end.
        marks: How often it went on to something else; a rank that does not go on keeps it.
        meetings: How often it has waited for the others, now included.
        steps: Steps done.
        detail: More about the place, for people; may be empty.
        exit_code: With which it ends; None before.
        message: Why it ends, in a line; empty if all is well.
    """

    rank: int
    host: str
    pid: int
    beat: int = 0
    place: str = "start"
    marks: int = 0
    meetings: int = 0
    steps: int = 0
    detail: str = ""
    exit_code: int | None = None
    message: str = ""


class RankFolder:
    """The files of all ranks."""

    def __init__(self, run_folder: Path) -> None:
        """Name them; nothing is made.

        Args:
            run_folder: train.out.
        """
        self.path = run_folder / FOLDER

    def write(self, status: RankStatus) -> None:
        """Replace a rank's status.

        Raises:
            OSError: the folder cannot be written.
        """
        self._replace(self._status_file(status.rank), dataclasses.asdict(status))

    def read(self, rank: int) -> RankStatus | None:
        """A rank's status; None if it cannot be read."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return RankStatus(**json.loads(self._status_file(rank).read_text(encoding="utf-8")))
        return None

    def write_values(self, rank: int, values: Mapping[str, Any]) -> None:
        """Replace what a rank is going to train on.

        Raises:
            OSError: the folder cannot be written.
        """
        self._replace(self._values_file(rank), values)

    def read_values(self, rank: int) -> dict[str, Any] | None:
        """What a rank is going to train on; None if it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self._values_file(rank).read_text(encoding="utf-8")))
        return None

    def remove(self, rank: int) -> None:
        """Take away what an earlier run left of a rank."""
        for file in (
            self._status_file(rank),
            self._values_file(rank),
            self.log_of(rank),
            self.shape_error_of(rank),
        ):
            file.unlink(missing_ok=True)

    def log_of(self, rank: int) -> Path:
        """What a rank prints, where msrun was started by varseq-train; its own name for it."""
        return self.path / f"worker_{rank}.log"

    def msrun_log_of(self, node_rank: int) -> Path:
        """What msrun prints on one machine."""
        return self.path / f"msrun_{node_rank}.log"

    def shape_error_of(self, rank: int) -> Path:
        """What MindSpore said of shapes that do not fit together on a rank."""
        return self.path / f"shape_error_{rank:05d}.txt"

    def _status_file(self, rank: int) -> Path:
        return self.path / f"rank_{rank:05d}.json"

    def _values_file(self, rank: int) -> Path:
        return self.path / f"values_{rank:05d}.json"

    def _replace(self, file: Path, content: Mapping[str, Any]) -> None:
        # No fsync: once a second, and worth nothing after a crash of the machine.
        self.path.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f".{file.name}")
        unfinished.write_text(json.dumps(content), encoding="utf-8")
        os.replace(unfinished, file)


def last_lines(file: Path) -> list[str]:
    """The last lines of a log that are not empty."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]

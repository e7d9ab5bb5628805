"""When a rank is lost: it ended badly, gives no sign of life, or keeps the others waiting.

All by the clock of who looks, so that clocks of machines need not agree. A rank that compiles may
take its time and may not even beat, since a compile can hold Python's lock for minutes; its end is
seen by its launcher all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.train.rank_files import RankStatus

STALL_S = 60.0
"""Seconds without a sign of life, or with the others waiting, after which a rank is lost."""

LONG_STEPS = 10.0
"""Steps may be long: so many times the longest wait so far counts instead if that is more."""

PATIENCE_S = 1800.0
"""The same where a rank may rightly take long: in an evaluation, a save, a warm-up."""

PATIENT_PLACES = ("start", "warm-up", "plan", "evaluation", "save", "profile")

FAILURE = "failure"
"""Place of a rank that fails and is finding out why."""

EXPLAIN_S = 60.0
"""Seconds that it may take for that."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A rank that waits for the others.

    Attributes:
        rank: Which.
        meeting: Its count of meetings, this one included.
        since_s: Since when.
        longest_s: The longest that it has waited so far and then went on.
    """

    rank: int
    meeting: int
    since_s: float
    longest_s: float


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A rank that the others cannot go on with.

    Attributes:
        status: As it was last seen.
        reason: What is wrong, for people.
    """

    status: RankStatus
    reason: str

    def __str__(self) -> str:
        steps = self.status.steps
        place = f"{self.status.place} after step {steps}" if steps else self.status.place
        return f"rank {self.status.rank} {self.reason} (last seen: {place})"


@dataclass
class _Seen:
    """Since when a rank has the same count."""

    beat: int
    beat_since_s: float
    marks: int
    marks_since_s: float


class RankJudge:
    """Looks at the ranks again and again, and says when one is lost."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def look(
        self,
        now_s: float,
        statuses: Mapping[int, RankStatus | None],
        waiting: Waiting | None = None,
    ) -> Lost | None:
        """Judge what is there now.

        Args:
            now_s: Of a clock that only rises.
            statuses: Of every rank, as far as it can be read.
            waiting: The rank that looks, while it waits for the others; None otherwise.

        Returns:
            The first that is lost; None if all is well.
        """
        for status in statuses.values():
            if status is None:
                continue
            reason = self._reason(now_s, status, waiting)
            if reason is not None:
                return Lost(status=status, reason=reason)
        return None

    def _reason(self, now_s: float, status: RankStatus, waiting: Waiting | None) -> str | None:
        if status.exit_code is not None:
            return f"ended: {status.message}" if status.exit_code else None
        seen = self._see(now_s, status)
        if status.place == FAILURE:
            is_late = now_s - seen.marks_since_s > EXPLAIN_S
            return f"failed: {status.detail}" if is_late else None
        limit_s = _limit_s(status, waiting)
        silent_s = now_s - seen.beat_since_s
        if silent_s > limit_s:
            return f"has given no sign of life for {silent_s:.0f} s"
        if waiting is None or waiting.rank == status.rank:
            return None
        late_s = now_s - max(seen.marks_since_s, waiting.since_s)
        if status.meetings < waiting.meeting and late_s > limit_s:
            return f"has kept the others waiting for {late_s:.0f} s"
        return None

    def _see(self, now_s: float, status: RankStatus) -> _Seen:
        seen = self._seen.get(status.rank)
        if seen is None:
            seen = _Seen(status.beat, now_s, status.marks, now_s)
            self._seen[status.rank] = seen
        if seen.beat != status.beat:
            seen.beat, seen.beat_since_s = status.beat, now_s
        if seen.marks != status.marks:
            seen.marks, seen.marks_since_s = status.marks, now_s
        return seen


def _limit_s(status: RankStatus, waiting: Waiting | None) -> float:
    if status.place in PATIENT_PLACES:
        return PATIENCE_S
    longest_s = 0.0 if waiting is None else waiting.longest_s
    return max(STALL_S, LONG_STEPS * (longest_s if math.isfinite(longest_s) else 0.0))

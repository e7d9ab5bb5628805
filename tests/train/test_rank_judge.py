"""Which rank is lost, by the counts that it shows and a clock that the test moves."""

from __future__ import annotations

import pytest

from tuner.train.rank_files import RankStatus
from tuner.train.rank_judge import (
    EXPLAIN_S,
    LONG_STEPS,
    PATIENCE_S,
    STALL_S,
    RankJudge,
    Waiting,
)


def status(rank=1, **fields):
    return RankStatus(rank=rank, host="h", pid=1, **{"place": "step", "steps": 12, **fields})


def waiting(since_s=0.0, longest_s=0.5):
    return Waiting(rank=0, meeting=5, since_s=since_s, longest_s=longest_s)


def first_loss(statuses_at, waits=None, end_s=4 * STALL_S):
    """(seconds, words) of the first look at which a rank is lost; None: never."""
    judge = RankJudge()
    for second in range(int(end_s)):
        lost = judge.look(float(second), statuses_at(second), waits)
        if lost is not None:
            return second, str(lost)
    return None


def test_a_rank_that_beats_and_goes_on_is_fine():
    def at(second):
        return {1: status(beat=second, marks=second, meetings=second)}

    assert first_loss(at, waiting()) is None


def test_no_sign_of_life():
    second, words = first_loss(lambda second: {0: status(0, beat=second), 1: status(beat=3)})
    assert second == STALL_S + 1
    assert words == "rank 1 has given no sign of life for 61 s (last seen: step after step 12)"


def test_a_rank_that_lives_and_does_not_come():
    def at(second):
        return {1: status(beat=second, marks=4, meetings=4)}

    second, words = first_loss(at, waiting(since_s=20.0))
    assert second == 20 + STALL_S + 1
    assert "rank 1 has kept the others waiting for 61 s" in words


def test_who_waits_too_is_not_to_blame():
    assert first_loss(lambda second: {1: status(beat=second, meetings=5)}, waiting()) is None


def test_long_steps_get_longer():
    def at(second):
        return {1: status(beat=second, meetings=4)}

    second, _ = first_loss(at, waiting(longest_s=15.0), end_s=1000)
    assert second == LONG_STEPS * 15 + 1


@pytest.mark.parametrize("place", ["warm-up", "plan", "evaluation", "save", "profile"])
def test_there_is_patience_where_it_may_rightly_take_long(place):
    def at(second):
        return {1: status(beat=0, meetings=4, place=place)}

    second, _ = first_loss(at, waiting(), end_s=PATIENCE_S + 10)
    assert second == PATIENCE_S + 1


def test_a_rank_that_fails_has_its_time_to_say_why():
    """It fails when the others have waited for it for 50 s already."""

    def at(second):
        place = {"place": "failure", "detail": "ValueError: no", "marks": 5}
        return {1: status(beat=second, meetings=4, **(place if second >= 50 else {"marks": 4}))}

    second, words = first_loss(at, waiting())
    assert second == 50 + EXPLAIN_S + 1
    assert words == "rank 1 failed: ValueError: no (last seen: failure after step 12)"


def test_a_bad_end_is_seen_at_once_and_a_good_one_is_none():
    assert first_loss(lambda second: {1: status(exit_code=0)}) is None
    second, words = first_loss(lambda second: {1: status(exit_code=2, message="no such file")})
    assert second == 0
    assert words.startswith("rank 1 ended: no such file")


def test_what_cannot_be_read_is_not_judged():
    assert first_loss(lambda second: {1: None}, waiting()) is None

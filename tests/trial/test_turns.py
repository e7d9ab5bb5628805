"""Turns of several processes, by a file's lock."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time

import pytest

from tuner.trial.turns import Turns

HOLD = """
import sys, time
from pathlib import Path
from tuner.trial.turns import Turns
turns = Turns(Path(sys.argv[1]))
turns.take()
print("taken", flush=True)
time.sleep(60)
"""


def test_two_take_turns_and_never_at_once(tmp_path):
    """Each steps for 10 ms at a time and passes on after 50 ms."""
    order, inside, overlaps = [], [], []

    def step(name):
        turns = Turns(tmp_path / "turns", turn_s=0.05)
        turns.take()
        for _ in range(30):
            turns.pass_on()
            inside.append(name)
            overlaps.append(len(inside) > 1)
            time.sleep(0.01)
            inside.remove(name)
            order.append(name)
        turns.close()

    threads = [threading.Thread(target=step, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(order) == sorted("ab" * 30)
    assert not any(overlaps)
    changes = sum(one != other for one, other in itertools.pairwise(order))
    # 30 steps of 10 ms are six turns of 50 ms each, fewer where a step takes longer.
    assert 4 <= changes <= 15


def test_a_turn_is_kept_until_its_time_is_over(tmp_path):
    first, second = (Turns(tmp_path / "turns", turn_s=turn_s) for turn_s in (60.0, 0.0))
    first.take()
    first.pass_on()
    waiting = threading.Thread(target=second.take)
    waiting.start()
    waiting.join(timeout=0.2)
    assert waiting.is_alive()
    first.give_up()
    waiting.join(timeout=10)
    assert not waiting.is_alive()


def test_a_process_that_dies_gives_up_its_turn(tmp_path):
    file = tmp_path / "turns"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "taken\n"
    turns = Turns(file)
    waiting = threading.Thread(target=turns.take)
    waiting.start()
    waiting.join(timeout=0.2)
    assert waiting.is_alive()
    holder.kill()
    holder.wait()
    waiting.join(timeout=10)
    assert not waiting.is_alive()


def test_without_a_file_nobody_waits():
    turns = Turns(None, turn_s=0.0)
    turns.take()
    turns.pass_on()
    turns.give_up()
    turns.close()


def test_a_closed_one_gives_up_its_turn(tmp_path):
    first, second = Turns(tmp_path / "turns"), Turns(tmp_path / "turns")
    first.take()
    first.close()
    second.take()
    second.close()


def test_a_folder_that_is_not_there_is_a_fault_of_ours(tmp_path):
    with pytest.raises(FileNotFoundError):
        Turns(tmp_path / "no" / "turns")

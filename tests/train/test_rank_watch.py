"""Ranks that watch each other, as processes without MindSpore."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from tuner.train.rank_files import RankFolder
from tuner.train.rank_watch import EXIT_LOST, LAUNCHER_VARIABLE, RankWatch
from tuner.train.world import World

LIMIT_S = 60


def start(folder, rank, code, **environment):
    """A process that is a rank of two and runs the code with its watch."""
    program = f"""
import time
from pathlib import Path
from tuner.train.rank_files import RankFolder
from tuner.train.rank_watch import RankWatch
from tuner.train.world import World
with RankWatch(RankFolder(Path({str(folder)!r})), World(rank={rank}, size=2)) as watch:
{textwrap.indent(textwrap.dedent(code), "    ")}
"""
    return subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_bad_end_of_one_ends_the_other_wherever_it_is(tmp_path):
    """The first waits in what no exception would leave."""
    second = start(tmp_path, 1, "watch.at('step', 12); watch.end(2, 'a row cannot be read')")
    second.communicate(timeout=LIMIT_S)
    first = start(tmp_path, 0, "watch.met()\nwith watch.waiting():\n    time.sleep(600)")
    _, told = first.communicate(timeout=LIMIT_S)
    assert first.returncode == EXIT_LOST
    assert "rank 1 ended: a row cannot be read (last seen: end after step 12)" in told
    assert "go on with --resume" in told
    status = RankFolder(tmp_path).read(0)
    assert status is not None
    assert (status.exit_code, status.meetings) == (EXIT_LOST, 1)


def test_a_rank_ends_when_its_launcher_is_gone(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    rank = start(tmp_path, 0, "time.sleep(600)", **{LAUNCHER_VARIABLE: str(gone.pid)})
    _, told = rank.communicate(timeout=LIMIT_S)
    assert rank.returncode == EXIT_LOST
    assert "the varseq-train that started this rank is gone" in told


def test_others_are_waited_for_until_they_are_ready_and_the_first_to_its_end(tmp_path):
    folder = RankFolder(tmp_path)
    late = start(
        tmp_path, 0,
        "watch.at('warm-up', detail='B=2 L=8')\ntime.sleep(1.5)\n"
        "watch.at('ready')\ntime.sleep(2)\nwatch.end(0)",
    )  # fmt: skip
    while (status := folder.read(0)) is None or status.place == "start":
        assert late.poll() is None
    with RankWatch(folder, World(rank=1, size=2)) as watch:
        assert watch.wait_for_others(lambda line: None, lambda: False)
        ready = folder.read(0)
        assert ready is not None
        assert (ready.place, ready.exit_code) == ("ready", None)
        assert not watch.has_stepped
        watch.at("step", 1)
        assert watch.has_stepped
        watch.wait_for_first()
        assert folder.read(0).exit_code == 0
    late.communicate(timeout=LIMIT_S)


def test_who_fails_says_so_and_the_first_alone_finds_out_why(tmp_path):
    folder = RankFolder(tmp_path)
    first = start(
        tmp_path, 0,
        "watch.at('step', 12)\nassert watch.fail(ValueError('no  such\\nshape'))\n"
        "time.sleep(5)\nwatch.end(2)",
    )  # fmt: skip
    while (status := folder.read(0)) is None or status.place != "failure":
        assert first.poll() is None
    assert (status.steps, status.detail) == (12, "ValueError: no such shape")
    with RankWatch(folder, World(rank=1, size=2)) as watch:
        assert not watch.fail(ValueError("no such shape"))
        # It is let end first, though that takes longer than is usual.
        watch.wait_for_first(0.1)
        assert folder.read(0).exit_code == 2
    first.communicate(timeout=LIMIT_S)


def test_who_fails_alone_finds_out_why(tmp_path):
    first = start(tmp_path, 0, "watch.at('step', 12)\ntime.sleep(600)")
    try:
        with RankWatch(RankFolder(tmp_path), World(rank=1, size=2)) as watch:
            assert watch.fail(ValueError("no such shape"))
    finally:
        first.kill()
        first.communicate()


def test_a_stop_ends_the_waiting(tmp_path):
    folder = RankFolder(tmp_path)
    late = start(tmp_path, 0, "time.sleep(600)")
    try:
        while folder.read(0) is None:
            assert late.poll() is None
        with RankWatch(folder, World(rank=1, size=2)) as watch:
            assert not watch.wait_for_others(lambda line: None, lambda: True)
    finally:
        late.kill()
        late.communicate()

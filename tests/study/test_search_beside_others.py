"""A search beside a tuner of another process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from search_case import COST, HUNDRED_ROWS, SMALL, journal_of, proposals, search
from study_case import Seen, make_setup

from tuner.trial.fake import FakeRunner


@pytest.fixture
def busy_tuner(tmp_path):
    """Another process that has taken a trial and works on it for a minute."""
    code = (
        "import sys, time\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from search_case import SMALL\n"
        "from tuner.study.optuna_study import OptunaStudy\n"
        "study = OptunaStudy(sys.argv[1], 'varseq-tune', SMALL, 0)\n"
        "print(study.ask().number, flush=True)\n"
        "time.sleep(60)\n"
    )
    tests = next(path for path in sys.path if path.endswith("tests"))
    process = subprocess.Popen(
        [sys.executable, "-c", code, journal_of(tmp_path), tests],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline().strip().isdigit()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_nobody_waits_for_others_past_the_time_limit(tmp_path, busy_tuner):
    deadline_s = time.monotonic() + 3.0
    setup = make_setup(tmp_path, HUNDRED_ROWS, SMALL, trials=3, deadline_s=deadline_s)
    result = search(setup, FakeRunner(COST))
    assert busy_tuner.poll() is None
    assert len(proposals(result)) == 2
    assert deadline_s - 1.0 < time.monotonic() < deadline_s + 10.0


def test_what_a_tuner_left_that_died_meanwhile_is_run_before_the_study_ends(tmp_path, busy_tuner):
    """Its trial is the third of three; once its process is dead it is run again."""
    seen = Seen()
    setup = make_setup(tmp_path, HUNDRED_ROWS, SMALL, trials=3)
    threading.Timer(4.0, busy_tuner.kill).start()
    result = search(setup, FakeRunner(COST), seen)
    assert busy_tuner.wait() != 0
    assert len(proposals(result)) == 3
    assert "trial 0 was interrupted and is run again" in seen.notices

"""What other programs take of the machine, seen from beside one process."""

from __future__ import annotations

import subprocess
import sys
import time

from tuner.trial.other_work import OtherWork

SPIN = "import time, sys; end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"


def test_the_watched_process_does_not_count_and_another_does():
    watched_cores, other_cores = [], []
    for counts in (watched_cores, other_cores):
        others = OtherWork()
        busy = subprocess.Popen([sys.executable, "-c", SPIN])
        idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2.5)"])
        while busy.poll() is None or idle.poll() is None:
            others.look(((busy if counts is watched_cores else idle).pid,))
            time.sleep(0.05)
        counts.append(others.cores())
    # The spinning takes a core for 1.5 of some 2.6 s, or its share where the machine is busy.
    assert other_cores[0] > 0.3
    assert watched_cores[0] < other_cores[0] + 0.3

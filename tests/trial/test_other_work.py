"""What other programs take of the machine, seen from beside one process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tuner.trial.other_work import OtherWork

SPIN = "import time, sys; end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"


def test_the_watched_process_does_not_count_and_another_does():
    watched_cores, other_cores = [], []
    for counts in (watched_cores, other_cores):
        others = OtherWork()
        process = subprocess.Popen([sys.executable, "-c", SPIN])
        # To the one it is the watched process; the other watches one that does nothing.
        pid = process.pid if counts is watched_cores else os.getppid()
        while process.poll() is None:
            others.look(pid)
            time.sleep(0.05)
        counts.append(others.cores())
    # The machine may be busy with other things as well: the same ones in both.
    assert other_cores[0] > 0.5
    assert watched_cores[0] < other_cores[0] + 0.3

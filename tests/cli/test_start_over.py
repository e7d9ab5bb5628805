"""A process starts over in place, also while its main thread is stuck."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, threading, time
from tuner.cli.start_over import start_over

blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
print(os.getpid(), sys.argv[1:], sorted(blocked), os.environ.get("AGAIN"), flush=True)
if "AGAIN" in os.environ:
    sys.exit(7)
start = lambda: start_over("AGAIN", {signal.SIGTERM, signal.SIGINT})
if sys.argv[1] == "stuck":
    threading.Timer(0.1, start).start()
    time.sleep(60)
start()
"""


@pytest.mark.parametrize("how", ["stuck", "at once"])
def test_the_same_process_runs_the_same_command_again(how):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how, "a b"], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 7, done.stderr
    first, second = done.stdout.splitlines()
    pid, rest = first.split(" ", 1)
    assert rest == f"['{how}', 'a b'] [] None"
    # Nothing that was blocked stays so.
    assert second == f"{pid} ['{how}', 'a b'] [] 1"

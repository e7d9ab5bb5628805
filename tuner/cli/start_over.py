"""Starting a command over in place: the same process and arguments, and nothing in memory."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import NoReturn


def start_over(variable: str, unblock: Iterable[signal.Signals]) -> NoReturn:
    """Replace this process by the command that it was started with; may be called by any thread.

    Args:
        variable: Set in the environment of the new one, so that it does something else this time.
        unblock: Signals that this process may have blocked, which the new one would inherit.
    """
    os.environ[variable] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, unblock)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

"""The command line and the environment of msrun, MindSpore's own launcher (2.7 to 2.10)."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MSRUN_MODULE = "mindspore.parallel.cluster.run"
LOOPBACK = "127.0.0.1"

MEET_S = 600
"""Seconds in which all ranks of all machines must have started."""

MSRUN_LOG_LEVEL = "3"
"""Of GLOG_v: errors, among them which rank has ended."""

RANK_LOG_LEVEL = "VARSEQ_TUNER_LOG_LEVEL"
"""GLOG_v of the ranks themselves."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Which ranks there are, and which of them are of this machine.

    Attributes:
        workers: Ranks of each machine, >= 1.
        nodes: Machines, >= 1.
        node_rank: Number of this one, in [0, nodes).
        master: Address of machine 0, where the ranks meet.
        port: There; None: a free one, if there is only one machine.
    """

    workers: int
    nodes: int = 1
    node_rank: int = 0
    master: str = LOOPBACK
    port: int | None = None

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.workers * self.nodes

    @property
    def local_ranks(self) -> range:
        """Ranks of this machine."""
        return range(self.node_rank * self.workers, (self.node_rank + 1) * self.workers)


def msrun_command(
    plan: LaunchPlan, port: int, log_folder: Path, program: Sequence[str]
) -> list[str]:
    """The command line of msrun (MindSpore 2.7 to 2.10).

    Args:
        plan: The ranks.
        port: Of the scheduler.
        log_folder: Of what each process prints.
        program: What each rank runs; the first word is `python` or `python3`, of the PATH.
    """
    return [
        sys.executable,
        "-m",
        MSRUN_MODULE,
        f"--worker_num={plan.world_size}",
        f"--local_worker_num={plan.workers}",
        f"--node_rank={plan.node_rank}",
        f"--master_addr={plan.master}",
        f"--master_port={port}",
        f"--log_dir={log_folder}",
        "--join=True",
        f"--cluster_time_out={MEET_S}",
        # It would follow logs by `tail` processes; there is no such rank.
        f"--tail_worker_log={plan.world_size}",
        *program,
    ]


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def msrun_environment(given: Mapping[str, str]) -> dict[str, str]:
    """What msrun and its ranks find in their environment.

    Args:
        given: Of this process, with GLOG_v.
    """
    # msrun takes `python` from the PATH, whatever it runs in itself.
    places = [str(Path(sys.executable).parent), given.get("PATH", os.defpath)]
    return {
        **given,
        RANK_LOG_LEVEL: given["GLOG_v"],
        "GLOG_v": MSRUN_LOG_LEVEL,
        "PATH": os.pathsep.join(places),
    }


def python_name() -> str:
    """What msrun takes for a Python: `python` or `python3`, whichever is beside ours."""
    beside = Path(sys.executable).parent
    return "python" if (beside / "python").exists() else "python3"

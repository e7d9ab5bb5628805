"""How msrun is called: its own parser reads the command, so that it means what we mean."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tuner.train.msrun import LaunchPlan, free_port, msrun_command, msrun_environment
from tuner.train.rank_files import RankFolder, RankStatus, last_lines


@pytest.mark.mindspore
def test_msrun_reads_the_command_as_it_is_meant(monkeypatch, tmp_path):
    from mindspore.parallel.cluster.run import get_args

    plan = LaunchPlan(workers=4, nodes=2, node_rank=1, master="10.0.0.1", port=8118)
    program = ["python", "-m", "tuner.cli.train", "--config", "best.yaml", "--workers", "4"]
    command = msrun_command(plan, 8118, tmp_path, program)
    assert command[:3] == [sys.executable, "-m", "mindspore.parallel.cluster.run"]
    monkeypatch.setattr(sys, "argv", command[2:])
    read = get_args()
    assert (read.worker_num, read.local_worker_num, read.node_rank) == (8, 4, 1)
    assert (read.master_addr, read.master_port) == ("10.0.0.1", 8118)
    assert (read.join, read.log_dir) == (True, str(tmp_path))
    # A rank that is not there: no `tail` is started.
    assert read.tail_worker_log == "8"
    assert [read.task_script, *read.task_script_args] == program


def test_ranks_of_a_machine():
    plan = LaunchPlan(workers=4, nodes=2, node_rank=1)
    assert plan.world_size == 8
    assert list(plan.local_ranks) == [4, 5, 6, 7]


def test_levels_of_logs_and_the_python_of_the_ranks():
    found = msrun_environment({"GLOG_v": "4", "PATH": "/bin", "HOME": "h"})
    assert (found["GLOG_v"], found["VARSEQ_TUNER_LOG_LEVEL"]) == ("3", "4")
    assert found["PATH"].split(":") == [str(Path(sys.executable).parent), "/bin"]
    assert found["HOME"] == "h"


def test_a_free_port_can_be_listened_on():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("127.0.0.1", free_port()))
        server.listen()


def test_files_of_ranks_come_back_and_half_a_file_is_none(tmp_path):
    folder = RankFolder(tmp_path)
    status = RankStatus(rank=3, host="h", pid=12, place="save", steps=4, message="ä")
    folder.write(status)
    assert folder.read(3) == status
    assert folder.read(0) is None
    (file,) = folder.path.glob("rank_*.json")
    file.write_text(file.read_text()[:20])
    assert folder.read(3) is None
    folder.log_of(3).write_text("\n".join(map(str, range(50))) + "\n\n")
    assert last_lines(folder.log_of(3))[-2:] == ["48", "49"]
    folder.shape_error_of(3).write_text("all that was said")
    folder.remove(3)
    assert list(folder.path.iterdir()) == []

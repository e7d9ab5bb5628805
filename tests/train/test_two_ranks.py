"""Ranks of a real msrun on this machine train what one process trains on all their batches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launched_case import (
    LIMIT_S,
    Launched,
    can_bind,
    last_step,
    records,
    saved,
    trained_in_one_process,
    write_config,
)
from run_case import write_counting_rows

from tuner.config.codec import load_config
from tuner.train.msrun import free_port, python_name
from tuner.train.rank_judge import STALL_S

pytestmark = [pytest.mark.mindspore, pytest.mark.timeout(4 * LIMIT_S)]

STEPS = 30


def train_and_compare(folder, out, workers, device, **changes):
    """Run the command; its records, after its weights were compared with one process."""
    config = write_config(folder, out, **changes)
    with Launched(config, folder / out, workers) as run:
        # When all ranks have met, their server listens.
        run.until(lambda: run.is_at(0, "warm-up") or run.is_at(0, "step"), LIMIT_S)
        ports = run.listening_ports()
        assert run.wait(3 * LIMIT_S) == 0, run.tails()
        output = run.output
        assert run.leftovers() == []
        assert all(map(can_bind, ports))
    assert_trained_as_one_process(config, folder / out, workers, device)
    return output


def assert_trained_as_one_process(config, out, world_size, device):
    lines = records(out)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    weights, losses, real_tokens = trained_in_one_process(
        load_config(str(config)), world_size, STEPS, device
    )
    found = saved(out, STEPS)
    for name, value in weights.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=1e-5)
    assert sum(line["real_tokens"] for line in lines) == real_tokens
    assert {line["recompiles"] for line in lines} == {0}


def test_two_ranks_train_what_one_process_does(tmp_path, device):
    write_counting_rows(tmp_path / "data.mindrecord", 61, (3, 17))
    output = train_and_compare(tmp_path, "two", 2, device, evaluation={
        "fraction": 0.1, "every_steps": 15})  # fmt: skip
    assert "Traceback" not in output
    # The first alone writes: one line for each evaluation, one table at the end.
    evaluations = (tmp_path / "two" / "evaluation.jsonl").read_text().splitlines()
    first, last = (json.loads(line)["step"] for line in evaluations)
    assert (first in (15, 16), last) == (True, STEPS)
    assert output.count("recompiles after warm-up") == 1
    assert not list((tmp_path / "two" / "ranks").glob("metrics*"))


@pytest.mark.slow
def test_four_ranks_train_what_one_process_does(tmp_path, device):
    write_counting_rows(tmp_path / "data.mindrecord", 121, (3, 17))
    train_and_compare(tmp_path, "four", 4, device)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_rows_that_divide_by_nothing_hang_nobody(tmp_path, device, workers):
    """101 rows, most of them short, a few long: a prime, and so are the rows of no bucket."""
    write_counting_rows(tmp_path / "data.mindrecord", 101, (2, 40), seed=5)
    train_and_compare(
        tmp_path, "skewed", workers, device,
        batching={"num_buckets": 4, "tokens_per_batch": 80, "align": 4},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(2, 1), (2, 1, 2), (4, 2)], ids=str)
def test_fewer_ranks_go_on_with_the_plan_of_more(tmp_path, device, numbers):
    """Stopped and taken up by another number of ranks each time, at any step of a window."""
    write_counting_rows(tmp_path / "data.mindrecord", 121, (3, 17))
    config, out = write_config(tmp_path, "run"), tmp_path / "run"
    run_in_parts(config, out, numbers)
    assert_trained_as_one_process(config, out, numbers[0], device)


def run_in_parts(config, out, numbers):
    """As many parts as numbers of ranks, all but the last stopped; what the last printed."""
    for part, workers in enumerate(numbers):
        more = ["--resume"] if part else []
        with Launched(config, out, workers, *more) as run:
            is_last = part == len(numbers) - 1
            if not is_last:
                run.until(lambda steps=7 + 8 * part: last_step(out) >= steps)
                run.process.send_signal(signal.SIGTERM)
            assert run.wait(3 * LIMIT_S) == (0 if is_last else 143), run.tails()
            takes_several = numbers[0] > workers
            assert (f"planned for {numbers[0]} devices" in run.output) == takes_several
            output = run.output
    return output


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(2,), (3,), (2, 2), (2, 1, 2)], ids=str)
def test_moments_that_are_shared_out_change_nothing(tmp_path, device, numbers):
    """The same as the ranks that keep all of them, stopped and taken up again or not.

    To the bit where the number of ranks stays: one that trains for two sums in another order.
    """
    write_counting_rows(tmp_path / "data.mindrecord", 121, (3, 17))
    kept = write_config(tmp_path, "kept")
    run_in_parts(kept, tmp_path / "kept", numbers)
    shared = write_config(
        tmp_path, "shared", optimizer={"learning_rate": 0.005, "sharded": True}
    )  # fmt: skip
    output = run_in_parts(shared, tmp_path / "shared", numbers)
    assert ("optimizer.sharded: this rank keeps" in output) == (numbers[-1] > 1)
    assert_trained_as_one_process(shared, tmp_path / "shared", numbers[0], device)
    mine, theirs = (saved(tmp_path / name, STEPS) for name in ("shared", "kept"))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        if len(set(numbers)) == 1:
            assert mine[name].tobytes() == value.tobytes(), name
        np.testing.assert_allclose(mine[name], value, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_of_a_profile_there_is_one(tmp_path):
    write_counting_rows(tmp_path / "data.mindrecord", 61, (3, 17))
    out = tmp_path / "profiled"
    config = write_config(tmp_path, "profiled", train={"max_steps": 6})
    with Launched(config, out, 2, "--profile", "2") as run:
        assert run.wait(3 * LIMIT_S) == 0, run.tails()
        assert run.output.count("profile of 2 steps: ") == 1
        assert "profile" not in run.folder.log_of(1).read_text()
    assert list((out / "profile").rglob("*.csv"))


def on_two_machines(config, out):
    """Two launchers of one rank each, as of two machines that share train.out."""
    more = ["--nodes", "2", "--master", f"127.0.0.1:{free_port()}", "--node-rank"]
    return Launched(config, out, 1, *more, "0"), Launched(config, out, 1, *more, "1")


@pytest.mark.slow
def test_two_launchers_train_together(tmp_path, device):
    write_counting_rows(tmp_path / "data.mindrecord", 61, (3, 17))
    config, out = write_config(tmp_path, "nodes"), tmp_path / "nodes"
    first, second = on_two_machines(config, out)
    with first, second:
        assert first.wait(3 * LIMIT_S) == 0, first.tails()
        assert second.wait() == 0, second.tails()
        assert first.leftovers() == second.leftovers() == []
    assert_trained_as_one_process(config, out, 2, device)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_on_another_machine_is_known_at_once(tmp_path, killed):
    write_counting_rows(tmp_path / "data.mindrecord", 61, (3, 17))
    config = write_config(tmp_path, "nodes", train={"epochs": 400, "max_steps": 400})
    out = tmp_path / "nodes"
    first, second = runs = on_two_machines(config, out)
    with first, second:
        first.until(lambda: last_step(out) >= 7)
        second.look()
        os.kill(runs[killed].status(killed).pid, signal.SIGKILL)
        for run in runs:
            assert run.wait(STALL_S / 2) == 3, run.tails()
            assert run.leftovers() == []
        assert f"rank {killed} died" in runs[killed].output
        assert f"rank {killed} ended: died" in runs[1 - killed].output


@pytest.mark.slow
def test_within_msrun_it_joins(tmp_path, device):
    """As a user starts msrun, and with --workers in the command, which then says nothing new."""
    write_counting_rows(tmp_path / "data.mindrecord", 61, (3, 17))
    config, out = write_config(tmp_path, "joined"), tmp_path / "joined"
    # msrun takes `python` from there.
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "mindspore.parallel.cluster.run", "--worker_num=2",
         "--local_worker_num=2", "--join=True", f"--master_port={free_port()}",
         f"--log_dir={tmp_path / 'logs'}", python_name(), "-m", "tuner.cli.train",
         "--config", str(config), "--workers", "2"],
        capture_output=True, text=True, timeout=3 * LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": places},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [(tmp_path / "logs" / f"worker_{rank}.log").read_text() for rank in (0, 1)]
    assert f"step {STEPS}/{STEPS}" in logs[0]
    assert "resumed" not in logs[0] + logs[1]
    assert not list((out / "ranks").glob("*.log"))
    assert_trained_as_one_process(config, out, 2, device)

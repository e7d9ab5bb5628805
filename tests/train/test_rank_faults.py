"""Ranks that are killed, frozen, slow or different: the run ends or goes on as it says.

Every case is repeated, since a moment that goes well once may not the next time.
"""

from __future__ import annotations

import os
import signal
import textwrap
import time

import pytest
from launched_case import (
    LIMIT_S,
    Launched,
    can_bind,
    last_step,
    records,
    saved,
    write_config,
)
from run_case import write_counting_rows

from tuner.train.rank_judge import STALL_S

pytestmark = [pytest.mark.mindspore, pytest.mark.slow, pytest.mark.timeout(40 * LIMIT_S)]

TIMES = range(5)
ENDS_S = STALL_S / 2
"""Seconds in which a run has ended after a rank died; most of it is for a busy machine."""

STEPS = 400
COMPILE_DELAY_S = 30.0

ON_RANK_1 = """
import os, sys
if os.environ.get("MS_ROLE") == "MS_WORKER" and os.environ.get("RANK_ID") == "1":
{code}
"""

SLOW_COMPILE = f"""
import importlib.abc, importlib.machinery, time

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "tuner.train.warmup":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            compile_all = module.compile_all
            def slow(*arguments):
                time.sleep({COMPILE_DELAY_S})
                compile_all(*arguments)
            module.compile_all = slow
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    write_counting_rows(folder / "data.mindrecord", 61, (3, 17))
    write_counting_rows(folder / "other.mindrecord", 61, (3, 17), seed=1)
    return folder


def only_on_rank_1(folder, name, code):
    """A folder whose sitecustomize changes one rank, for PYTHONPATH."""
    path = folder / name
    path.mkdir(exist_ok=True)
    indented = textwrap.indent(textwrap.dedent(code).strip(), "    ")
    (path / "sitecustomize.py").write_text(ON_RANK_1.format(code=indented))
    return path


def long_run(folder, out, **train):
    return write_config(folder, out, train={"epochs": 400, "max_steps": STEPS, **train})


def assert_nothing_is_left(run, ports):
    assert run.leftovers() == []
    assert all(map(can_bind, ports))


def assert_ends_after_kill(run, rank, number=signal.SIGKILL):
    ports = run.listening_ports()
    os.kill(run.status(rank).pid, number)
    code = run.wait(ENDS_S)
    assert code == 3, run.tails()
    assert f"rank {rank} died" in run.output
    assert "go on with --resume" in run.output
    assert f"worker_{rank}.log" in run.output
    assert_nothing_is_left(run, ports)


@pytest.mark.parametrize("number", TIMES)
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_in_a_step(folder, number, rank):
    out = folder / f"step{rank}{number}"
    with Launched(long_run(folder, out.name), out, 2) as run:
        run.until(lambda: last_step(out) >= 7 + number)
        assert_ends_after_kill(run, rank)


@pytest.mark.parametrize("number", TIMES)
def test_killed_in_a_save(folder, number):
    out = folder / f"save{number}"
    config = long_run(folder, out.name, checkpoint_every_steps=1, async_checkpoint=False)
    with Launched(config, out, 2) as run:
        run.until(lambda: last_step(out) >= 3 and any((out / "checkpoints").glob(".unfin*")))
        assert_ends_after_kill(run, 0)


@pytest.mark.parametrize("number", TIMES)
def test_killed_in_the_warm_up(folder, number):
    out = folder / f"warm{number}"
    with Launched(long_run(folder, out.name), out, 2) as run:
        run.until(lambda: run.is_at(1, "warm-up"))
        assert_ends_after_kill(run, 1)
        assert last_step(out) == 0


@pytest.mark.parametrize("number", TIMES)
def test_frozen_in_a_step(folder, number):
    out = folder / f"frozen{number}"
    with Launched(long_run(folder, out.name), out, 2) as run:
        run.until(lambda: last_step(out) >= 7)
        ports = run.listening_ports()
        os.kill(run.status(1).pid, signal.SIGSTOP)
        assert run.wait(STALL_S + ENDS_S) == 3, run.tails()
        assert "rank 1 has given no sign of life for 6" in run.output
        assert_nothing_is_left(run, ports)


@pytest.mark.parametrize("number", TIMES)
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("data.path={folder}/other.mindrecord", "rank 1 differs from rank 0 in data: "),
        (
            "optimizer.learning_rate=0.5",
            "rank 1 differs from rank 0 in config.optimizer.learning_rate: 0.5 there, 0.005 on "
            "rank 0; give all ranks the same data, config and versions",
        ),
    ],
    ids=["data", "config"],
)
def test_another_rank_is_told_before_anything_is_compiled(folder, number, option, words, request):
    name = request.node.callspec.id
    code = f"sys.argv += ['--set', {option.format(folder=folder)!r}]"
    out = folder / f"other-{name}"
    with Launched(
        long_run(folder, out.name), out, 2, path=only_on_rank_1(folder, f"site-{name}", code)
    ) as run:
        assert run.wait() == 2, run.tails()
        assert run.output.count(words) == 1, run.tails()
        assert "[warm-up" not in run.output
        assert_nothing_is_left(run, [])


@pytest.mark.parametrize("number", TIMES)
def test_a_slow_compile_is_waited_for_and_told(folder, number):
    out = folder / f"slow{number}"
    config = write_config(folder, out.name, train={"max_steps": 4})
    site = only_on_rank_1(folder, "site-slow", SLOW_COMPILE)
    with Launched(config, out, 2, path=site) as run:
        assert run.wait(2 * LIMIT_S + COMPILE_DELAY_S) == 0, run.tails()
        assert "waiting for the warm-up of rank 1" in run.output
        assert len(records(out)) == 4


@pytest.mark.parametrize("number", TIMES)
@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_saves_once_and_the_same_step_on_all(folder, number, signal_number, code):
    out = folder / f"stop{code}{number}"
    config = long_run(folder, out.name, checkpoint_every_steps=1000)
    with Launched(config, out, 2) as run:
        run.until(lambda: last_step(out) >= 5 + number)
        ports = run.listening_ports()
        run.process.send_signal(signal_number)
        assert run.wait(ENDS_S) == code, run.tails()
        (checkpoint,) = (out / "checkpoints").glob("step_*")
        assert checkpoint.name == f"step_{last_step(out):08d}"
        assert "go on with --resume" in run.output
        assert_nothing_is_left(run, ports)


@pytest.mark.parametrize("number", TIMES)
def test_killed_launcher_leaves_no_ranks(folder, number):
    out = folder / f"orphans{number}"
    with Launched(long_run(folder, out.name), out, 2) as run:
        run.until(lambda: last_step(out) >= 5)
        ports = run.listening_ports()
        run.process.kill()
        run.process.wait()
        begun = time.monotonic()
        # Orphans are for the machine's first process to reap, which is none of ours.
        while time.monotonic() - begun < ENDS_S:
            if not run.leftovers(with_zombies=False) and all(map(can_bind, ports)):
                break
            time.sleep(0.2)
        assert run.leftovers(with_zombies=False) == []
        assert all(map(can_bind, ports))


@pytest.fixture(scope="module")
def whole(folder):
    """A run of 30 steps that nobody disturbed."""
    out = folder / "whole"
    with Launched(write_config(folder, out.name), out, 2) as run:
        assert run.wait(2 * LIMIT_S) == 0, run.tails()
    return out


COURSE = ("step", "loss", "updates", "grad_norm", "learning_rate", "real_tokens", "label_tokens")


def course(out):
    return [{name: line[name] for name in COURSE} for line in records(out)]


@pytest.mark.parametrize("number", TIMES)
@pytest.mark.parametrize("way", ["kill", "stop"])
def test_resumed_it_ends_with_the_same_bits(folder, whole, number, way):
    """A stop at any step: gradients of half a window differ between ranks, and are kept."""
    out = folder / f"resumed-{way}{number}"
    config = write_config(folder, out.name)
    with Launched(config, out, 2) as run:
        run.until(lambda: last_step(out) >= 8 + number)
        if way == "kill":
            os.kill(run.status(number % 2).pid, signal.SIGKILL)
        else:
            run.process.send_signal(signal.SIGTERM)
        assert run.wait(ENDS_S) in (3, 143), run.tails()
    with Launched(config, out, 2, "--resume") as run:
        assert run.wait(2 * LIMIT_S) == 0, run.tails()
    assert course(out) == course(whole)
    mine, theirs = saved(out, 30), saved(whole, 30)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].tobytes() == value.tobytes(), name


def test_another_number_of_ranks_is_refused(folder, whole):
    config = folder / "whole.yaml"
    with Launched(config, whole, 3, "--resume", "--set", "train.max_steps=40") as run:
        assert run.wait() == 2, run.tails()
        words = "the checkpoint belongs to a run on 2 devices, this one has 3"
        assert run.output.count(words) == 1

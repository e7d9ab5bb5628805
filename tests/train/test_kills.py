"""Sixty kills at drawn moments: the run ends with the bits of one that nobody disturbed."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import yaml
from checkpoint_case import parameter_bytes
from run_case import VOCAB, write_counting_rows

pytestmark = [pytest.mark.mindspore, pytest.mark.slow, pytest.mark.timeout(3600)]

KILLS = 60
SEED = 20_240
STEPS = 240
STEPS_PER_UPDATE = 3
STEPS_PER_EPOCH = 20
MOMENTS = ("warm-up", "step", "save", "any time")
OUTCOME = ("step", "epoch", "loss", "updates", "grad_norm", "learning_rate", "clip_norm",
           "clipped", "real_tokens", "label_tokens")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One shape, windows of three steps, a threshold that follows the norms, a save in four."""
    folder = tmp_path_factory.mktemp("kills")
    write_counting_rows(folder / "data.mindrecord", 2 * STEPS_PER_EPOCH, (3, 17))
    config = {
        "data": {"path": str(folder / "data.mindrecord")},
        "batching": {"strategy": "fixed", "samples_per_batch": 2, "tokens_per_batch": None},
        "model": {
            "vocab_size": VOCAB, "width": 16, "num_layers": 1, "num_heads": 2,
            "num_kv_heads": 1, "ffn_width": 16,
        },
        "schedule": {"kind": "wsd", "progress": "tokens"},
        "train": {
            "epochs": STEPS // STEPS_PER_EPOCH, "steps_per_update": STEPS_PER_UPDATE,
            "clip_quantile": 0.8, "clip_window": 30, "checkpoint_every_steps": 4,
            "async_checkpoint": True, "tensorboard": False,
        },
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def start(folder, out):
    """The process that begins the run or goes on with it."""
    resume = ["--resume"] if (folder / out / "metrics.jsonl").exists() else []
    return subprocess.Popen(
        [sys.executable, "-m", "tuner.cli.train", "--config", str(folder / "config.yaml"),
         "--set", f"train.out={folder / out}", *resume],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def last_step(metrics):
    """The last step that is wholly recorded."""
    if not metrics.exists():
        return 0
    return sum(line.endswith("\n") for line in metrics.open())


def unfinished(run):
    return list((run / "checkpoints").glob(".unfinished_*"))


def course(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line[name] for name in OUTCOME) for line in lines]


class Killer:
    """Starts a run and kills it at a drawn moment, again and again."""

    def __init__(self, folder, rng, warm_up_s):
        self.folder, self.rng, self.warm_up_s = folder, rng, warm_up_s
        self.hits = Counter()

    def kill_once(self, out):
        """Whether the run came to its end instead."""
        run = self.folder / out
        metrics = run / "metrics.jsonl"
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        process = start(self.folder, out)
        self.wait_for_moment(self.rng.choice(MOMENTS), process, run, before)
        if process.poll() is None:
            process.kill()
        output, _ = process.communicate()
        if process.returncode == 0:
            return True
        assert process.returncode == -signal.SIGKILL, output[-3000:]
        self.hits[self.place_of_hit(run, before)] += 1
        return False

    def wait_for_moment(self, moment, process, run, before):
        """Wait; how long a start takes is learnt from those that got through."""
        begun = time.monotonic()
        late = {"warm-up": 0.95, "any time": 1.2}.get(moment)
        end_s = self.warm_up_s * self.rng.uniform(0.05, late) if late else math.inf
        wanted_steps = self.rng.randint(1, STEPS // 6)
        steps_before = None
        while process.poll() is None and time.monotonic() - begun < end_s:
            if not self.has_begun(run, before):
                time.sleep(0.01)
                continue
            steps = last_step(run / "metrics.jsonl")
            if steps_before is None:
                self.warm_up_s, steps_before = time.monotonic() - begun, steps
            is_there = steps - steps_before >= wanted_steps
            if is_there and (moment == "step" or (moment == "save" and unfinished(run))):
                return

    def has_begun(self, run, before):
        """Whether this process has opened the metrics, which is when its first step comes."""
        metrics = run / "metrics.jsonl"
        return metrics.exists() and metrics.stat().st_mtime_ns != before

    def place_of_hit(self, run, before):
        if not self.has_begun(run, before):
            return "warm-up"
        if unfinished(run):
            return "save"
        step = last_step(run / "metrics.jsonl") % STEPS_PER_EPOCH
        return "window" if step % STEPS_PER_UPDATE else "step"


@pytest.fixture(scope="module")
def whole(folder):
    """Of a run that nobody disturbed: its course, its last parameters, its seconds."""
    begun = time.monotonic()
    process = start(folder, "whole")
    output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]
    seconds = time.monotonic() - begun
    return course(folder / "whole"), parameter_bytes(folder / "whole", STEPS), seconds


def test_killed_again_and_again_a_run_ends_with_the_same_bits(folder, whole, capsys):
    expected, parameters, seconds = whole
    assert [line[0] for line in expected] == list(range(1, STEPS + 1))
    killer = Killer(folder, random.Random(SEED), seconds)
    runs = 0
    while sum(killer.hits.values()) < KILLS:
        out = f"run{runs}"
        while not killer.kill_once(out):
            pass
        assert course(folder / out) == expected
        assert parameter_bytes(folder / out, STEPS) == parameters
        runs += 1
        with capsys.disabled():
            print(f"\n{sum(killer.hits.values())} kills in {runs} runs: {dict(killer.hits)}")
    assert all(killer.hits[place] for place in ("warm-up", "step", "save", "window"))


def test_a_stop_while_a_save_is_in_flight_waits_for_it(folder, whole):
    expected, parameters, _ = whole
    run = folder / "stopped"
    for _ in range(3):
        process = start(folder, run.name)
        before = last_step(run / "metrics.jsonl")
        while process.poll() is None:
            if last_step(run / "metrics.jsonl") > before + 5 and unfinished(run):
                os.kill(process.pid, signal.SIGTERM)
                break
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 143, output[-3000:]
        assert "go on with --resume" in output
        done = last_step(run / "metrics.jsonl")
        assert (run / "checkpoints" / "latest").read_text().strip() == f"step_{done:08d}"
        assert not unfinished(run)
    output, _ = start(folder, run.name).communicate()
    assert course(run) == expected, output[-3000:]
    assert parameter_bytes(run, STEPS) == parameters

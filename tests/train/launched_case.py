"""Runs of several ranks as a user starts them, and what they are compared with."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import yaml
from run_case import VOCAB

from tuner.batching.plan import plan_batches
from tuner.batching.windows import update_after_step
from tuner.train.rank_files import RankFolder
from tuner.train.tensor_file import read_tensors

LIMIT_S = 60 * float(os.environ.get("VARSEQ_TEST_PATIENCE", "1"))
"""Of a run of some steps; a machine that is busy otherwise needs more."""


def config_of(folder, out, **train):
    """One layer, two shapes, windows of two steps; windows counted in steps."""
    return {
        "data": {"path": str(folder / "data.mindrecord")},
        "batching": {"num_buckets": 2, "tokens_per_batch": 64},
        "model": {
            "vocab_size": VOCAB, "width": 16, "num_layers": 1, "num_heads": 2,
            "num_kv_heads": 1, "ffn_width": 16,
        },
        "optimizer": {"learning_rate": 0.005},
        "schedule": {"kind": "wsd", "progress": "tokens"},
        "train": {
            "epochs": 20, "max_steps": 30, "steps_per_update": 2, "clip_norm": 1.0,
            "checkpoint_every_steps": 5, "keep_last": 20, "async_checkpoint": True,
            "tensorboard": False, "out": str(folder / out), **train,
        },
    }  # fmt: skip


def write_config(folder, out, **changes):
    """The file of a config; changes are sections."""
    train = changes.pop("train", {})
    content = {**config_of(folder, out, **train), **changes}
    path = folder / f"{out}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


class Launched:
    """A varseq-train with workers; it is ended, whatever the test does."""

    def __init__(self, config, out, workers, *more, path=None):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if path is not None:
            places = [str(path), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        self.out = Path(out)
        self.folder = RankFolder(self.out)
        self.log = self.out.with_suffix(f".{time.monotonic_ns()}.log")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tuner.cli.train", "--config", str(config),
             "--workers", str(workers), *more],
            stdout=self.log.open("wb"), stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
        self.family = {}
        self.looked_at = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.look()
        for process in self.family.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait()

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def look(self):
        """Remember all processes that this one has started."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.family.setdefault(child.pid, child)

    def look_now_and_then(self):
        """Looking walks all processes of the machine, which takes time from the run."""
        if time.monotonic() - self.looked_at > 0.5:
            self.look()
            self.looked_at = time.monotonic()

    def wait(self, limit_s=LIMIT_S):
        """The exit code; seconds that it took are in `seconds`."""
        begun = time.monotonic()
        while self.process.poll() is None:
            self.look_now_and_then()
            assert time.monotonic() - begun < limit_s, self.tails()
            time.sleep(0.05)
        self.seconds = time.monotonic() - begun
        return self.process.returncode

    def until(self, is_there, limit_s=LIMIT_S):
        """Wait for a moment; the run must not end before."""
        begun = time.monotonic()
        while not is_there():
            self.look_now_and_then()
            assert self.process.poll() is None, self.tails()
            assert time.monotonic() - begun < limit_s, self.tails()
            time.sleep(0.005)

    def status(self, rank):
        """Of this run's process; None before it has written any."""
        status = self.folder.read(rank)
        return status if status is not None and status.pid in self.family else None

    def is_at(self, rank, place):
        status = self.status(rank)
        return status is not None and status.place == place

    def tails(self):
        logs = [self.log, *sorted(self.folder.path.glob("*.log"))]
        return "\n".join(
            f"== {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in logs
        )

    def leftovers(self, *, with_zombies=True):
        """Processes of it that are still there."""
        found = []
        for process in self.family.values():
            with contextlib.suppress(psutil.Error):
                is_zombie = process.status() == psutil.STATUS_ZOMBIE
                if process.is_running() and (with_zombies or not is_zombie):
                    found.append((process.pid, process.status(), process.cmdline()))
        return found

    def listening_ports(self):
        """Ports that its processes listen on now."""
        ports = set()
        for process in self.family.values():
            with contextlib.suppress(psutil.Error):
                ports |= {
                    connection.laddr.port
                    for connection in process.net_connections("tcp")
                    if connection.status == psutil.CONN_LISTEN
                }
        return ports


def can_bind(port):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def records(out):
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def last_step(out):
    """The last step that is wholly recorded."""
    metrics = Path(out) / "metrics.jsonl"
    if not metrics.exists():
        return 0
    with metrics.open() as lines:
        return sum(line.endswith("\n") for line in lines)


def saved(out, steps):
    return read_tensors(Path(out) / "checkpoints" / f"step_{steps:08d}" / "parameters.safetensors")


def trained_in_one_process(config, world_size, steps, device):
    """Weights by name after so many steps of the plan for several ranks, by one engine.

    Of each step the ranks' batches are accumulated one after another; an update divides by all
    their labels. AdamW's rate and clipping are those of the engine; who is batched with whom, when
    an update comes and what it divides by is said here.
    """
    from tuner.train.engine import Engine
    from tuner.train.loader import read_batches
    from tuner.train.run_inputs import open_inputs
    from tuner.train.schedule import learning_rate_at, peak_rate

    inputs = open_inputs(config, None, world_size)
    config = inputs.config
    engine = Engine(config, device, inputs.longest)
    done, real, labels, updates, losses = 0, 0, 0, 0, []
    plans = [
        plan_batches(inputs.lengths, config, epoch=epoch, world_size=world_size)
        for epoch in range(config.train.epochs)
    ]
    of_steps = np.concatenate([plan.real_tokens for plan in plans])[:steps]
    total_tokens = int(of_steps.sum())
    for plan in plans:
        ranks = [
            read_batches(inputs.dataset, list(plan.steps_of_rank(rank)), config)
            for rank in range(world_size)
        ]
        ends = update_after_step(plan.real_tokens, None, config.train.steps_per_update)
        for end, batches in zip(ends, zip(*ranks, strict=True), strict=True):
            assert len({batch.shape for batch in batches}) == 1
            step_losses = [engine.run_step(batch) for batch in batches]
            step_labels = sum(batch.label_tokens for batch in batches)
            losses.append(sum(step_losses) / step_labels)
            labels += step_labels
            real += sum(batch.real_tokens for batch in batches)
            done += 1
            if end:
                updates += 1
                rate = learning_rate_at(real, total_tokens, peak_rate(config), config.schedule)
                engine.run_update(rate, updates, labels, config.train.clip_norm)
                labels = 0
            if done == steps:
                weights = {weight.name: weight.asnumpy().copy() for weight in engine.weights}
                return weights, losses, real
    raise AssertionError("the plan is too short")

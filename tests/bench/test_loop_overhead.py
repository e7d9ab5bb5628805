"""What the trainer adds to a bare MindSpore loop over the same batches.

`python -m pytest -m slow -s tests/bench/test_loop_overhead.py`; about six minutes on two cores.
The bare loop holds every batch of the same plan in memory before it starts, calls the compiled
step and update and looks at each loss, and does nothing else. The trainer reads, checks and pads
the rows, writes metrics, event files and a checkpoint. Both take turns in one process.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from length_sets import MIX_LONGEST_TOKENS, write_mix
from mindspore import Tensor
from strategies import make_config

from tuner.config.schema import TrainConfig
from tuner.train.cached_graphs import warm_up
from tuner.train.checkpoint import CheckpointFolder
from tuner.train.device import open_device
from tuner.train.engine import Engine
from tuner.train.graph import prepare_step, set_level
from tuner.train.loader import Batch, read_batches
from tuner.train.loop import Loop, RunParts
from tuner.train.model import Decoder
from tuner.train.run_inputs import RunInputs, open_inputs
from tuner.train.run_log import RunLog
from tuner.train.state import TrainState
from tuner.train.step import AccumulateStep, SummedLoss, UpdateStep, update_arguments
from tuner.train.warmup import WarmUpWatch
from tuner.train.weight_groups import are_decayed

pytestmark = [pytest.mark.slow, pytest.mark.mindspore, pytest.mark.timeout(3600)]

STEPS = 40
ROUNDS = 5
VOCABULARY = 2048
LEAST_SPEED = 0.97


@dataclass(frozen=True)
class Bare:
    """The Cells of a loop as one writes it by hand."""

    step: AccumulateStep
    update: UpdateStep

    def run(self, batches: list[Batch], config: TrainConfig) -> float:
        """Seconds of a step and an update for every batch."""
        started = time.perf_counter()
        for number, batch in enumerate(batches, start=1):
            loss = self.step(*map(Tensor, batch.arrays))
            self.update(*update_arguments(config.optimizer, 1e-4, number, batch.label_tokens, 1.0))
            float(loss.asnumpy())
        return time.perf_counter() - started


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> RunInputs:
    folder = tmp_path_factory.mktemp("overhead")
    data = write_mix(folder / "mix.mindrecord", MIX_LONGEST_TOKENS, VOCABULARY)
    config = make_config(
        {
            "data.path": str(data),
            "batching.num_buckets": 4,
            "batching.align": 32,
            "model.vocab_size": VOCABULARY,
            "train.max_steps": STEPS,
            "train.out": str(folder / "run"),
        }
    )
    return open_inputs(config, None)


def make_bare(config: TrainConfig, longest: int) -> Bare:
    loss = SummedLoss(Decoder(config.model, longest, config.train.seed))
    step = AccumulateStep(loss)
    decayed = are_decayed(loss, step.parameters, config.optimizer.no_decay)
    update = UpdateStep(step, config.optimizer, is_decayed=decayed, clips=True)
    prepare_step(step, config.graph, num_inputs=2)
    set_level(update, config.graph)
    return Bare(step, update)


def train(inputs: RunInputs, engine: Engine, folder: Path) -> float:
    """Seconds of the trainer's loop, checkpoint included."""
    config = inputs.config
    parts = RunParts(
        config=config,
        dataset=inputs.dataset,
        lengths=inputs.lengths,
        engine=engine,
        checkpoints=CheckpointFolder(folder / "checkpoints", 1, 0),
        log=RunLog(folder, 0, lambda _: None, writes_events=True),
        on_step=lambda _: None,
        on_notice=lambda _: None,
        stop_requested=lambda: False,
    )
    with closing(parts.log):
        started = time.perf_counter()
        Loop(parts, TrainState(), inputs.plan).run()
        return time.perf_counter() - started


def test_the_trainer_is_hardly_slower_than_a_bare_loop(inputs, tmp_path):
    config = inputs.config
    device = open_device(config)
    engine = Engine(config, device, inputs.longest)
    bare = make_bare(config, inputs.longest)
    watch = WarmUpWatch(notice=lambda _: None, stop_requested=lambda: False, on_stuck=lambda: None)
    warm_up(engine, config, inputs.plan.shapes, tmp_path / "cache", watch)
    steps = list(inputs.plan.steps_of_rank(0))[:STEPS]
    batches = list(read_batches(inputs.dataset, steps, config))
    # A round that does not count: the bare loop compiles, and kernels of both settle.
    bare.run(batches, config)
    train(inputs, engine, tmp_path / "warm")
    ratios = []
    for number in range(ROUNDS):
        bare_s = bare.run(batches, config)
        trainer_s = train(inputs, engine, tmp_path / f"{number}")
        ratios.append(bare_s / trainer_s)
        print(f"\n{STEPS} steps: bare {bare_s:.2f} s, trainer {trainer_s:.2f} s", end="")
    tokens_per_s = sum(batch.real_tokens for batch in batches) / bare_s
    speed = statistics.median(ratios)
    print(f"\nspeed of the trainer, bare = 1: {[round(ratio, 3) for ratio in ratios]}, "
          f"median {speed:.3f}; last bare round {tokens_per_s:,.0f} real tokens/s")  # fmt: skip
    assert speed >= LEAST_SPEED

"""Five hundred steps of the shared mix in random bucket order: memory, compiles, waiting for data.

`python -m pytest -m slow -s tests/bench/test_long_run.py`; about six minutes on two cores. The
figures stand in results/benchmarks/trainer.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import yaml
from length_sets import MIX_LONGEST_TOKENS, write_mix

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS = 500
VOCABULARY = 2048
# Memory may still settle in the first steps after warm-up.
SETTLED_STEP = 50
LARGEST_GROWTH = 0.02
LARGEST_DATA_WAIT = 0.02
SHAPES = 8


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("long run")
    data = write_mix(folder / "mix.mindrecord", MIX_LONGEST_TOKENS, VOCABULARY)
    config = {
        "data": {"path": str(data)},
        "batching": {"num_buckets": SHAPES, "align": 32, "tokens_per_batch": 4096},
        "model": {"vocab_size": VOCABULARY},
        "train": {
            "max_steps": STEPS, "tokens_per_update": 8192, "checkpoint_every_steps": 100,
            "out": str(folder / "run"),
        },
    }  # fmt: skip
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "tuner.cli.train", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_memory_stays_flat_and_nothing_is_compiled(records):
    assert len(records) == STEPS
    lengths = np.array([record["padded_length"] for record in records])
    assert len(set(lengths.tolist())) == SHAPES
    # The order is random: neighbours are hardly of like length.
    assert abs(np.corrcoef(lengths[:-1], lengths[1:])[0, 1]) < 0.2
    memory = np.array([record["memory_bytes"] for record in records[SETTLED_STEP:]], float)
    growth = np.median(memory[-50:]) / np.median(memory[:50]) - 1.0
    print(f"\nmemory {memory[0] / 1e9:.3f} GB after {SETTLED_STEP} steps, growth {growth:+.2%}, "
          f"largest {memory.max() / 1e9:.3f} GB")  # fmt: skip
    assert {record["recompiles"] for record in records} == {0}
    assert growth <= LARGEST_GROWTH
    assert memory.max() <= (1.0 + LARGEST_GROWTH) * np.median(memory[:50])


def test_the_loop_hardly_waits_for_data(records):
    step_s = sum(record["step_s"] for record in records)
    data_wait_s = sum(record["data_wait_s"] for record in records)
    print(
        f"\ndata wait {data_wait_s:.2f} s of {step_s:.1f} s of steps: {data_wait_s / step_s:.2%}"
    )
    assert data_wait_s <= LARGEST_DATA_WAIT * step_s

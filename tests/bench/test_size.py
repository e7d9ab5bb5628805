"""Ten million rows: planned in seconds and bounded memory; and in 64 files up to the first batch.

`python -m pytest -m slow -s tests/bench/test_size.py` prints the tables of
results/benchmarks/size.md. Every measurement is a process of its own; its memory is the peak
(VmHWM) above what the process had before, the lengths and MindSpore's import included there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from many_shards import write_many

from tuner.batching.plan import STRATEGIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc"),
]

NUM_ROWS = 10_000_000
MOST_PLAN_S = 15.0
MOST_PLAN_BYTES = 1_000_000_000

ROWS_PER_SLAB = 4_000_000
MOST_BYTES_A_ROW, MOST_BYTES_A_SLAB_ROW = 16, 100
"""Of a plan in slabs: for every row of the set, and for every row of one slab."""
BYTES_A_STEP = 24
"""What comes out: B, L and real tokens of every step."""

NUM_SHARDS, MEAN_TOKENS = 64, 32
MOST_PAYLOAD_GROWTH_BYTES = 50_000_000
NUM_TURNS = 3
"""The least peak of so many processes counts: what the allocator keeps for threads that are done
varies by a tenth of a gigabyte."""

COMMON = """
import json, re, sys, time
from pathlib import Path
import numpy as np
from strategies import make_config
def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
def start():
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    return memory("VmRSS"), time.process_time(), time.perf_counter()
def end(started, **more):
    before, cpu_s, passed_s = started
    print(json.dumps({"cpu_s": time.process_time() - cpu_s, "s": time.perf_counter() - passed_s,
        "peak_bytes": memory("VmHWM") - before, **more}))
"""

PLAN = """
from tuner.batching.plan import plan_batches
from tuner.data.lengths import Lengths
from tuner.simulate.stats import count_plan
strategy, num_rows, rows_per_slab = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
drawn, tokens = np.random.default_rng(0), np.empty(num_rows, np.int32)
for first in range(0, num_rows, 10**6):
    part = tokens[first : first + 10**6]
    part[:] = np.clip(drawn.lognormal(np.log(300), 1.0, len(part)), 1, 4096)
lengths = Lengths(tokens=tokens, fingerprint="drawn")
config = make_config({"batching.strategy": strategy, "batching.tokens_per_batch": 16384,
    "batching.rows_per_slab": rows_per_slab})
started = start()
plan = plan_batches(lengths, config)
stats = count_plan(plan, None)
first = next(plan.steps_of_rank(0))
loss = getattr(plan, "loss", None)
end(started, real_tokens=stats.real_tokens, total_tokens=lengths.total_tokens,
    steps=plan.num_steps, loss=loss and loss.text)
"""

SCAN = """
import mindspore.dataset
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import open_mindrecord
started = start()
dataset = open_mindrecord(sys.argv[1])
lengths = scan_lengths(dataset)
end(started, rows=dataset.num_samples, files=len(dataset.files), source=lengths.source)
np.save(sys.argv[3], lengths.tokens)
"""

OF_LENGTHS = """
from tuner.data.lengths import Lengths
from tuner.batching.plan import plan_batches, resolve_boundaries
lengths = Lengths(tokens=np.load(sys.argv[3]), fingerprint="scanned")
config = make_config({"data.path": sys.argv[1], "model.vocab_size": 32000,
    "batching.tokens_per_batch": 16384 * int(sys.argv[2])})
"""

PLAN_STORED = (
    OF_LENGTHS
    + """
started = start()
config = resolve_boundaries(lengths, config)
plan = plan_batches(lengths, config)
end(started, real_tokens=int(plan.real_tokens.sum()), total_tokens=lengths.total_tokens)
"""
)

SIMULATE = (
    OF_LENGTHS
    + """
from tuner.simulate.cost import default_cost_model
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.suggest import RunSetting, suggest_buckets
started = start()
setting = RunSetting(tokens_per_batch=config.batching.tokens_per_batch, epochs=1,
    cost=default_cost_model())
suggestion = suggest_buckets(LengthHistogram.from_tokens(lengths.tokens), setting)
end(started, real_tokens=suggestion.best.plan.real_tokens, total_tokens=lengths.total_tokens)
"""
)

FIRST_BATCH = (
    OF_LENGTHS
    + """
import mindspore.dataset
from tuner.data.mindrecord import open_mindrecord
from tuner.train.loader import read_ahead, read_batches
config = resolve_boundaries(lengths, config)
plan = plan_batches(lengths, config)
started = start()
dataset = open_mindrecord(sys.argv[1])
opened = time.process_time()
with read_ahead(read_batches(dataset, plan.steps_of_rank(0), config)) as ready:
    batch = next(ready)
    end(started, real_tokens=batch.real_tokens, total_tokens=int(plan.real_tokens[0]),
        open_cpu_s=opened - started[1])
"""
)

STAGES = {
    "open and scan": SCAN,
    "plan": PLAN_STORED,
    "simulate": SIMULATE,
    "open, first batch": FIRST_BATCH,
}
"""In their order: each goes on from the lengths that the first of them found."""


def measure(script: str, *arguments: object) -> dict:
    tests = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(tests), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", COMMON + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "GLOG_v": "4", "PYTHONPATH": path},
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def line(*cells: object) -> None:
    print(f"\n| {' | '.join(map(str, cells))} |", end="")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_ten_million_rows_are_planned_in_bounded_time_and_memory(strategy):
    found = measure(PLAN, strategy, NUM_ROWS, 16_000_000)
    line(strategy, f"{found['cpu_s']:.1f}", f"{found['peak_bytes'] / 1e9:.2f}")
    assert found["loss"] is None
    assert found["real_tokens"] == found["total_tokens"]
    assert found["cpu_s"] <= MOST_PLAN_S
    assert found["peak_bytes"] <= MOST_PLAN_BYTES


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_rows", [20_000_000, 40_000_000])
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_more_rows_are_planned_in_slabs_of_bounded_memory(strategy, num_rows):
    found = measure(PLAN, strategy, num_rows, ROWS_PER_SLAB)
    peak_bytes = found["peak_bytes"]
    cells = [f"{found['cpu_s']:.1f}", f"{peak_bytes / 1e9:.2f}", found["loss"]]
    line(strategy, f"{num_rows:,}", *cells)
    assert found["loss"].startswith(f"planned in {num_rows // ROWS_PER_SLAB} slabs")
    assert found["real_tokens"] == found["total_tokens"]
    limit = MOST_BYTES_A_ROW * num_rows + MOST_BYTES_A_SLAB_ROW * ROWS_PER_SLAB
    assert peak_bytes <= limit + BYTES_A_STEP * found["steps"]


@pytest.mark.mindspore
@pytest.mark.timeout(3600)
def test_memory_up_to_the_first_batch_does_not_grow_with_the_payload(tmp_path):
    peaks = {}
    # The same rows, three times as long: three times the payload, and the same rows a batch.
    for times in (1, 3):
        path = tmp_path / str(times) / "data.mindrecord"
        path.parent.mkdir()
        write_many(path, NUM_ROWS, NUM_SHARDS, mean_tokens=MEAN_TOKENS, times_longer=times)
        num_bytes = sum(file.stat().st_size for file in path.parent.glob("*[0-9]"))
        found = measure_stages(path, times)
        for _ in range(NUM_TURNS - 1):
            for stage, one in measure_stages(path, times).items():
                found[stage] = min(found[stage], one, key=lambda each: each["peak_bytes"])
        for stage, one in found.items():
            cells = [f"{one['cpu_s']:.1f}", f"{one['s']:.1f}", f"{one['peak_bytes'] / 1e9:.3f}"]
            line(f"{num_bytes / 1e9:.2f} GB", stage, *cells)
        peaks[times] = {stage: one["peak_bytes"] for stage, one in found.items()}
        shutil.rmtree(path.parent)
    for stage, peak_bytes in peaks[1].items():
        assert peaks[3][stage] - peak_bytes <= MOST_PAYLOAD_GROWTH_BYTES, stage


def measure_stages(path: Path, times: int) -> dict[str, dict]:
    found = {}
    for stage, script in STAGES.items():
        one = found[stage] = measure(script, path, times, path.with_name("lengths.npy"))
        if "total_tokens" in one:
            assert one["real_tokens"] == one["total_tokens"]
    scanned = found["open and scan"]
    assert (scanned["rows"], scanned["files"]) == (NUM_ROWS, NUM_SHARDS)
    assert scanned["source"] == "headers"
    return found

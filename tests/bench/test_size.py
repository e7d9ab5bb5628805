"""Ten million rows: a plan in seconds and bounded memory; and 64 shards up to the first batch.

`python -m pytest -m slow -s tests/bench/test_size.py` prints the tables of
results/benchmarks/size.md. Every measurement is a process of its own; its memory is the peak
(VmHWM) above what the process had before, the lengths and MindSpore's import included there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_scan import write_set

from tuner.batching.plan import STRATEGIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc"),
]

NUM_PLANNED_ROWS = 10_000_000
MOST_PLAN_S = 15.0
MOST_PLAN_BYTES = 1_000_000_000
NUM_STORED_ROWS, NUM_SHARDS = 1_000_000, 64
MOST_PAYLOAD_GROWTH_BYTES = 50_000_000

COMMON = """
import json, re, sys, time
import numpy as np
from strategies import make_config
def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
"""

PLAN = """
from tuner.batching.plan import plan_batches
from tuner.data.lengths import Lengths
from tuner.simulate.stats import count_plan
num_rows, tokens = int(sys.argv[2]), []
drawn = np.random.default_rng(0)
for start in range(0, num_rows, 10**6):
    some = drawn.lognormal(np.log(300), 1.0, min(10**6, num_rows - start))
    tokens.append(np.clip(some, 1, 4096).astype(np.int32))
lengths = Lengths(tokens=np.concatenate(tokens), fingerprint="drawn")
del tokens, some
config = make_config({"batching.strategy": sys.argv[1], "batching.tokens_per_batch": 16384})
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before, start = memory("VmRSS"), time.process_time()
plan = plan_batches(lengths, config)
planned = time.process_time()
stats = count_plan(plan, None)
counted = time.process_time()
first = next(plan.steps_of_rank(0))
plan.fingerprint
print(json.dumps({"plan_s": planned - start, "count_s": counted - planned,
    "peak_bytes": memory("VmHWM") - before, "real_tokens": stats.real_tokens,
    "total_tokens": lengths.total_tokens}))
"""

FIRST_BATCH = """
import itertools
import mindspore.dataset
from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import open_mindrecord
from tuner.simulate.stats import count_plan
from tuner.train.loader import read_ahead, read_batches
open("/proc/self/clear_refs", "w").write("5")
before, times = memory("VmRSS"), [time.process_time()]
dataset = open_mindrecord(sys.argv[1])
times.append(time.process_time())
lengths = scan_lengths(dataset)
times.append(time.process_time())
config = make_config({"data.path": sys.argv[1], "model.vocab_size": 32000,
    "batching.tokens_per_batch": 16384 * int(sys.argv[2])})
config = resolve_boundaries(lengths, config)
plan = plan_batches(lengths, config)
times.append(time.process_time())
stats = count_plan(plan, None)
times.append(time.process_time())
with read_ahead(read_batches(dataset, plan.steps_of_rank(0), config)) as ready:
    batch = next(ready)
    times.append(time.process_time())
names = ["open", "scan", "plan", "simulate", "first batch"]
print(json.dumps({"seconds": dict(zip(names, np.diff(times).tolist())),
    "peak_bytes": memory("VmHWM") - before, "rows": dataset.num_samples,
    "files": len(dataset.files), "real_tokens": batch.real_tokens,
    "planned_tokens": int(plan.real_tokens[0]), "source": lengths.source}))
"""


def measure(script: str, *arguments: object) -> dict:
    tests = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(tests), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", COMMON + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "GLOG_v": "4", "PYTHONPATH": path},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_ten_million_rows_are_planned_in_bounded_time_and_memory(strategy):
    found = measure(PLAN, strategy, NUM_PLANNED_ROWS)
    print(
        f"\n| {strategy} | {found['plan_s']:.1f} | {found['count_s']:.1f} "
        f"| {found['peak_bytes'] / 1e9:.2f} |"
    )
    assert found["real_tokens"] == found["total_tokens"]
    assert found["plan_s"] + found["count_s"] <= MOST_PLAN_S
    assert found["peak_bytes"] <= MOST_PLAN_BYTES


@pytest.mark.mindspore
@pytest.mark.timeout(3600)
def test_memory_up_to_the_first_batch_does_not_grow_with_the_payload(tmp_path):
    peaks = {}
    # The same rows, three times as long: three times the payload, and the same rows a batch.
    for times in (1, 3):
        path = tmp_path / str(times) / "data.mindrecord"
        path.parent.mkdir()
        write_set(path, NUM_STORED_ROWS, NUM_SHARDS, times_longer=times)
        num_bytes = sum(file.stat().st_size for file in path.parent.glob("*[0-9]"))
        found = measure(FIRST_BATCH, path, times)
        peaks[times] = found["peak_bytes"]
        seconds = ", ".join(f"{name} {value:.2f}" for name, value in found["seconds"].items())
        print(
            f"\n{NUM_STORED_ROWS:,} rows, {NUM_SHARDS} files, {num_bytes / 1e9:.2f} GB: CPU s "
            f"{seconds}; peak {found['peak_bytes'] / 1e9:.2f} GB"
        )
        assert (found["rows"], found["files"]) == (NUM_STORED_ROWS, NUM_SHARDS)
        assert found["source"] == "headers"
        assert found["real_tokens"] == found["planned_tokens"]
    assert abs(peaks[3] - peaks[1]) <= MOST_PAYLOAD_GROWTH_BYTES

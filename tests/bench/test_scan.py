"""How fast and in how much memory lengths are found. Prints the table of results/benchmarks.

python -m pytest tests/bench/test_scan.py -m slow -s
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

MEAN_TOKENS = 100
LONGEST = 4096
VOCABULARY = 32_000
ROWS_PER_WRITE = 5000
RUNS = 5
LEAST_TIMES_FASTER = 25
MOST_PEAK_BYTES = 1_500_000_000


def write_set(path: Path, num_rows: int, num_shards: int) -> None:
    """Two int32 columns, no index; log-normal lengths with a mean of about 100 tokens."""
    from mindspore.mindrecord import FileWriter

    random = np.random.default_rng(0)
    writer = FileWriter(str(path), shard_num=num_shards)
    array = {"type": "int32", "shape": [-1]}
    writer.add_schema({"input_ids": array, "labels": array})
    lengths = random.lognormal(np.log(MEAN_TOKENS) - 0.5, 1, num_rows).astype(int)
    ids = random.integers(0, VOCABULARY, 2 * LONGEST).astype(np.int32)
    for start in range(0, num_rows, ROWS_PER_WRITE):
        rows = []
        for length in np.clip(lengths[start : start + ROWS_PER_WRITE], 1, LONGEST):
            begin = int(random.integers(LONGEST))
            row = ids[begin : begin + length]
            rows.append({"input_ids": row, "labels": row})
        writer.write_raw_data(rows)
    writer.commit()


def iterate(files: list[str]) -> list[int]:
    """What finding lengths costs without the scan: MindDataset, one column, as fast as it goes."""
    import mindspore.dataset as msds

    rows = msds.MindDataset(
        files, columns_list=["input_ids"], num_parallel_workers=os.cpu_count(), shuffle=False
    )
    iterator = rows.create_tuple_iterator(num_epochs=1, output_numpy=True, do_copy=False)
    return [row[0].size for row in iterator]


def seconds(call):
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


@pytest.mark.parametrize("num_shards", [1, 4])
def test_scan_is_exact_and_many_times_faster_than_iterating(tmp_path, num_shards):
    import mindspore.dataset  # noqa: F401  (the import is in neither figure)

    from tuner.data.lengths import scan_lengths
    from tuner.data.mindrecord import open_mindrecord

    write_set(tmp_path / "data.mindrecord", 100_000, num_shards)
    files = [str(file) for file in open_mindrecord(tmp_path / "data.mindrecord").files]
    scan_s, iterate_s, from_cache_s = [], [], []
    for _ in range(RUNS):
        took, found = seconds(lambda: scan_lengths(open_mindrecord(files)))
        scan_s.append(took)
        took, read = seconds(lambda: iterate(files))
        iterate_s.append(took)
        assert found.tokens.tolist() == read
        assert found.source == "headers"
        scan_lengths(open_mindrecord(files), cache=tmp_path / "cache")
        took, kept = seconds(
            lambda: scan_lengths(open_mindrecord(files), cache=tmp_path / "cache")
        )
        assert kept.is_from_cache
        from_cache_s.append(took)
    times = statistics.median(iterate_s) / statistics.median(scan_s)
    print(f"\n100,000 rows in {num_shards} file(s), {found.total_tokens:,} tokens, {RUNS} runs")
    for name, taken in (
        ("open and scan", scan_s),
        ("open and cache", from_cache_s),
        ("MindDataset", iterate_s),
    ):
        median, low, high = statistics.median(taken), min(taken), max(taken)
        print(f"| {name} | {median:.3f} | {low:.3f} to {high:.3f} |")
    print(f"times faster (medians): {times:.0f}")
    assert times >= LEAST_TIMES_FASTER


MEASURE = """
import json, re, sys, time
import mindspore.dataset
def peak_bytes():
    # Not ru_maxrss: that starts with the size of the process that started this one.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
imported = peak_bytes()
from tuner.data.length_sample import sample_lengths
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import open_mindrecord
start = time.perf_counter()
dataset = open_mindrecord(sys.argv[1])
opened = time.perf_counter()
if sys.argv[2] == "all":
    found = scan_lengths(dataset)
else:
    found = sample_lengths(dataset, "input_ids", int(sys.argv[2]))
done = time.perf_counter()
print(json.dumps({"rows": dataset.num_samples, "longest": found.longest, "source": found.source,
    "open_s": opened - start, "find_s": done - opened, "imported_bytes": imported,
    "peak_bytes": peak_bytes()}))
"""


def measure_fresh_process(path: Path, how_many: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), how_many],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "GLOG_v": "4"},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_million_rows_fit_into_memory(tmp_path):
    path = tmp_path / "data.mindrecord"
    write_set(path, 1_000_000, 4)
    file_bytes = sum(file.stat().st_size for file in tmp_path.iterdir())
    print(f"\n1,000,000 rows in 4 files, {file_bytes / 1e9:.2f} GB")
    found = {how_many: measure_fresh_process(path, how_many) for how_many in ("all", "10000")}
    for how_many, one in found.items():
        print(
            f"| {how_many} | open {one['open_s']:.2f} s | find {one['find_s']:.2f} s | "
            f"peak {one['peak_bytes'] / 1e9:.2f} GB, of that "
            f"{one['imported_bytes'] / 1e9:.2f} GB after import mindspore |"
        )
        assert one["peak_bytes"] < MOST_PEAK_BYTES
        assert (one["rows"], one["source"]) == (1_000_000, "headers")
    assert found["all"]["longest"] == found["10000"]["longest"]

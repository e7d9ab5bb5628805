"""Rows and tokens per second of the trainer's reader against MindDataset + bucket_batch_by_length.

`python -m pytest -m slow -s tests/bench/test_pipeline.py` prints the table of
results/benchmarks/pipeline.md.
"""

from __future__ import annotations

import time

import pytest
from bucketers import mindspore_file_batches
from length_sets import write_mix
from strategies import make_config
from tabulate import tabulate
from test_scan import write_set
from turns import medians_by_clock

from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import open_mindrecord
from tuner.train.loader import read_ahead, read_batches

pytestmark = [pytest.mark.slow, pytest.mark.mindspore]

NUM_TURNS = 5
VOCABULARY = 50_257
SETS = {
    "shared mix": lambda folder: write_mix(folder / "mix.mindrecord", 512),
    "100,000 log-normal rows": lambda folder: write_drawn(folder / "drawn.mindrecord"),
}


def write_drawn(path):
    write_set(path, 100_000, 1)
    return path


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SETS)
def test_rows_reach_the_device_at_least_as_fast_as_from_mindspore(tmp_path, name):
    dataset = open_mindrecord(SETS[name](tmp_path))
    lengths = scan_lengths(dataset)
    config = make_config({"data.path": dataset.path, "model.vocab_size": VOCABULARY})
    config = resolve_boundaries(lengths, config)
    plan = plan_batches(lengths, config)
    size_of_length = {length: size for size, length in plan.shapes}
    boundaries = config.batching.boundaries
    sizes = [size_of_length[length] for length in boundaries]

    def ours():
        steps = plan.steps_of_rank(0)
        with read_ahead(read_batches(dataset, steps, config)) as ready:
            counted = [(batch.real_tokens, batch.padded_tokens) for batch in ready]
        assert sum(real for real, _ in counted) == lengths.total_tokens
        assert len(counted) == plan.num_steps

    def theirs():
        batches = list(map(count_ids, mindspore_file_batches(dataset, boundaries, sizes)))
        assert sum(batches) == lengths.num_samples
        assert len(batches) == plan.num_steps

    works = {"ours": ours, "MindDataset, bucket_batch_by_length": theirs}
    clocks = [time.perf_counter, time.process_time]
    passed_s, cpu_s = medians_by_clock(works, num_turns=NUM_TURNS, clocks=clocks)
    lines = [
        (
            way,
            f"{passed_s[way]:.2f}",
            f"{cpu_s[way]:.2f}",
            f"{lengths.num_samples / passed_s[way]:,.0f}",
            f"{lengths.total_tokens / passed_s[way]:,.0f}",
            f"{lengths.num_samples / cpu_s[way]:,.0f}",
            f"{lengths.total_tokens / cpu_s[way]:,.0f}",
        )
        for way in works
    ]
    print(f"\n{name}: {lengths.num_samples:,} rows, {lengths.total_tokens:,} tokens")
    headers = ["way", "s", "CPU s", "rows/s", "tokens/s", "rows/CPU s", "tokens/CPU s"]
    print(tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True))
    for seconds in (passed_s, cpu_s):
        assert seconds["ours"] <= seconds["MindDataset, bucket_batch_by_length"]


def count_ids(ids_and_labels):
    """Rows of a batch; its arrays are let go of."""
    ids, labels = ids_and_labels
    assert ids.shape == labels.shape
    return len(ids)

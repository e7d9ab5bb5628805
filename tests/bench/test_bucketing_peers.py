"""Buckets against those of lhotse, transformers and MindSpore: padding, shapes, seconds.

`python -m pytest -m slow -s tests/bench/test_bucketing_peers.py` prints tables of
results/benchmarks/plans.md. The peers are in the extra `peers`; without one its part is skipped.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest
from bucketers import (
    Lhotse,
    RowsInMemory,
    grouped_by_transformers,
    mindspore_batches,
    mindspore_rows,
)
from length_sets import azure_tokens, lognormal_tokens, mix_tokens, uniform_tokens
from strategies import make_config, make_lengths
from tabulate import tabulate
from turns import median_seconds

from tuner.batching.align import align_lengths
from tuner.batching.boundaries import solve_least_padding
from tuner.batching.boundary_rules import BOUNDARY_RULES
from tuner.batching.plan import plan_batches, resolve_boundaries
from tuner.simulate.stats import count_plan
from tuner.train.loader import pad_batch

pytestmark = pytest.mark.slow

ALIGNS = (8, 64)
NUM_BUCKETS = (4, 8, 16, 32)
EPOCH_ALIGN = 8
ROWS_PER_BATCH = 16
NUM_TURNS = 5
SETS = {
    # Name -> lengths, tokens of a batch.
    "lognormal 20,000": (lambda: lognormal_tokens(20_000), 16384),
    "uniform 20,000": (lambda: uniform_tokens(20_000), 16384),
    "shared mix": (mix_tokens, 4096),
    "azure 2023 conversations": (azure_tokens, 16384),
}


def show(title, headers, lines):
    print(f"\n\n{title}\n")
    print(tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True))


def percent(real, padded):
    return f"{100 * (1 - real / padded):.1f}"


def padded_rows(tokens, ends):
    """Tokens of all rows, each padded to its own boundary."""
    return int(ends[np.searchsorted(ends, tokens)].sum())


@pytest.mark.parametrize("name", SETS)
def test_no_rule_pads_less_with_as_many_buckets(name):
    pytest.importorskip("lhotse")
    read_tokens, budget = SETS[name]
    tokens = read_tokens()
    lhotse = Lhotse(tokens, budget)
    lines = []
    for align, num_buckets in itertools.product(ALIGNS, NUM_BUCKETS):
        ends = {
            rule: np.array(choose(tokens, align, num_buckets))
            for rule, choose in BOUNDARY_RULES.items()
        }
        ends |= lhotse.boundaries(num_buckets, align)
        padded = {rule: padded_rows(tokens, points) for rule, points in ends.items()}
        assert max(map(len, ends.values())) <= num_buckets
        assert padded["least_padding"] == min(padded.values())
        own, sampler, documented = padded["least_padding"], *list(padded.values())[-2:]
        works = {
            "ours": lambda align=align, k=num_buckets: solve_least_padding(tokens, align, k),
            "lhotse": lambda k=num_buckets: lhotse.starts(k),
        }
        taken_s = median_seconds(works, num_turns=NUM_TURNS)
        lines.append(
            [
                align,
                num_buckets,
                *(percent(tokens.sum(), value) for value in (own, sampler, documented)),
                *(f"{1000 * seconds:.1f}" for seconds in taken_s.values()),
                f"{taken_s['lhotse'] / taken_s['ours']:.1f}",
            ]
        )
    show(
        f"{name}: padding %, every row padded to its boundary; CPU ms to find the boundaries",
        ["align", "K", "ours", "lhotse", "as documented", "ours ms", "lhotse ms", "x ours"],
        lines,
    )


def test_boundaries_of_a_million_rows_are_found_sooner():
    tokens = lognormal_tokens(10**6)
    lhotse = Lhotse(tokens, 16384)
    lines = []
    for num_buckets in (8, 32):
        works = {
            "ours": lambda k=num_buckets: solve_least_padding(tokens, EPOCH_ALIGN, k),
            "lhotse": lambda k=num_buckets: lhotse.starts(k),
        }
        taken_s = median_seconds(works, num_turns=NUM_TURNS)
        ratio = taken_s["lhotse"] / taken_s["ours"]
        lines.append([num_buckets, *(f"{s:.3f}" for s in taken_s.values()), f"{ratio:.1f}"])
        assert ratio > 1
    show("lognormal 1,000,000, align 8", ["K", "ours CPU s", "lhotse CPU s", "x ours"], lines)


class Epoch:
    """Batches of an epoch, each padded to its own longest row; or all to ends of buckets."""

    def __init__(self, tokens, batches, ends):
        sizes = np.array([len(batch) for batch in batches])
        rows = np.concatenate([np.asarray(batch) for batch in batches])
        assert np.array_equal(np.sort(rows), np.arange(len(tokens)))
        longest = np.maximum.reduceat(tokens[rows], np.cumsum(sizes) - sizes)
        aligned = align_lengths(longest, EPOCH_ALIGN)
        self.padded_tokens = int((sizes * aligned).sum())
        self.shapes = set(zip(sizes.tolist(), aligned.tolist(), strict=True))
        self.tokens_at_ends = int((sizes * ends[np.searchsorted(ends, longest)]).sum())
        self.num_steps = len(batches)


OURS = "ours"
OURS_AGAIN = "ours, boundaries known"
TO_BOUNDARY = "MindSpore, to the boundary"


class OwnEpoch:
    """Our plan: with boundaries to be found, and as a written config has it, with these."""

    def __init__(self, tokens, batching):
        changes = {"align": EPOCH_ALIGN, **batching}
        config = make_config({f"batching.{name}": value for name, value in changes.items()})
        lengths = make_lengths(tokens)
        resolved = resolve_boundaries(lengths, config)
        self.ends = np.array(resolved.batching.boundaries)
        self.stats = count_plan(plan_batches(lengths, config), None)
        self.works = {
            OURS: lambda: plan_batches(lengths, config),
            OURS_AGAIN: lambda: plan_batches(lengths, resolved),
        }


def compare_epochs(name, tokens, batching, peers):
    """Ours under one rule of batch sizes against peers under the same; returns median seconds."""
    own = OwnEpoch(tokens, batching)
    epochs = {peer: Epoch(tokens, run(), own.ends) for peer, run in peers.items()}
    taken_s = median_seconds(own.works | peers, num_turns=NUM_TURNS)
    real = tokens.sum()
    own_percent = percent(real, own.stats.padded_tokens)
    own_row = [own.stats.num_steps, own.stats.num_shapes, own_percent, own_percent]
    figures = {way: own_row for way in own.works}
    for peer, epoch in epochs.items():
        padded = (epoch.padded_tokens, epoch.tokens_at_ends)
        percents = [percent(real, tokens_padded) for tokens_padded in padded]
        figures[peer] = [epoch.num_steps, len(epoch.shapes), *percents]
    show(
        name,
        ["way", "steps", "shapes", "padding %", "at our lengths %", "CPU s", "x ours"],
        [
            [way, *row, f"{taken_s[way]:.4f}", f"{taken_s[way] / taken_s[OURS]:.1f}"]
            for way, row in figures.items()
        ],
    )
    for epoch in epochs.values():
        assert own.stats.num_shapes <= len(own.ends) < len(epoch.shapes)
        assert own.stats.padded_tokens <= epoch.tokens_at_ends
    return taken_s


@pytest.mark.parametrize("name", SETS)
def test_an_epoch_of_lhotse_has_many_shapes_and_takes_longer(name):
    pytest.importorskip("lhotse")
    read_tokens, budget = SETS[name]
    tokens = read_tokens()
    lhotse = Lhotse(tokens, budget)
    for num_buckets in (8, 32):
        batching = {"tokens_per_batch": budget, "num_buckets": num_buckets}
        peers = {"lhotse": lambda k=num_buckets: lhotse.epoch(k)}
        title = f"{name}: K = {num_buckets}, batches of {budget} tokens at most"
        taken_s = compare_epochs(title, tokens, batching, peers)
        assert taken_s[OURS] < taken_s["lhotse"]


@pytest.mark.parametrize("name", SETS)
def test_an_epoch_of_transformers_has_many_shapes(name):
    pytest.importorskip("transformers")
    tokens = SETS[name][0]()
    listed = tokens.tolist()
    peers = {"transformers": lambda: grouped_by_transformers(listed, ROWS_PER_BATCH)}
    size = {"samples_per_batch": ROWS_PER_BATCH, "tokens_per_batch": None}
    for num_buckets in (8, 32):
        title = f"{name}: K = {num_buckets}, batches of {ROWS_PER_BATCH} rows"
        taken_s = compare_epochs(title, tokens, {**size, "num_buckets": num_buckets}, peers)
        # It sorts and cuts, no more: with boundaries to be found, ours is not always sooner done.
        assert taken_s[OURS_AGAIN] < taken_s["transformers"]


def our_batches(plan, rows, config):
    """Padded batches of the plan, shifted targets included; no thread reads ahead."""
    for batch in plan.steps_of_rank(0):
        taken = [rows[index] for index in batch.row_indices.tolist()]
        yield pad_batch(taken, batch, config).input_ids_BT


def test_an_epoch_of_mindspore_has_ragged_batches_and_takes_longer():
    pytest.importorskip("mindspore.dataset")
    budget = 16384
    tokens = lognormal_tokens(100_000)
    rows, lengths = RowsInMemory(tokens), make_lengths(tokens)
    config = make_config(
        {
            "batching.tokens_per_batch": budget,
            "batching.num_buckets": 8,
            "data.label_column": None,
        }
    )
    ends = np.array(resolve_boundaries(lengths, config).batching.boundaries)
    ways = {
        OURS: lambda: our_batches(plan_batches(lengths, config), rows, config),
        TO_BOUNDARY: lambda: mindspore_batches(rows, ends, budget // ends, to_boundary=True),
        "MindSpore, to the longest of a batch": lambda: mindspore_batches(
            rows, ends, budget // ends, to_boundary=False
        ),
    }
    shapes = {way: Counter(ids.shape for ids in work()) for way, work in ways.items()}
    ways["MindSpore, reading rows alone"] = lambda: mindspore_rows(rows).create_tuple_iterator(
        num_epochs=1, output_numpy=True
    )
    drains = {way: lambda work=work: sum(1 for _ in work()) for way, work in ways.items()}
    taken_s = median_seconds(drains, num_turns=3, clock=time.perf_counter)
    figures = {
        way: [met.total(), len(met), percent(tokens.sum(), padded_of(met))]
        for way, met in shapes.items()
    }
    show(
        f"lognormal 100,000, the same {len(ends)} boundaries, batches of {budget} tokens at most",
        ["way", "batches", "shapes", "padding %", "s", "x ours"],
        [
            [
                way,
                *figures.get(way, ["", "", ""]),
                f"{passed:.2f}",
                f"{passed / taken_s[OURS]:.1f}",
            ]
            for way, passed in taken_s.items()
        ],
    )
    assert len(shapes[OURS]) <= len(ends) < len(shapes[TO_BOUNDARY]) <= 2 * len(ends)
    assert padded_of(shapes[TO_BOUNDARY]) == padded_rows(tokens, ends)
    assert taken_s[OURS] < taken_s[TO_BOUNDARY]


def padded_of(shapes):
    return sum(size * length * steps for (size, length), steps in shapes.items())

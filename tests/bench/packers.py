"""Ways to put samples into rows of a fixed number of tokens: ours, peers', and two written out.

Each takes lengths in tokens, none over the capacity, and gives the row of every sample or, where
the peer does not say who went where, the samples' lengths row by row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray
from strategies import make_config

from tuner.batching.packed import pack_falling
from tuner.batching.plan import BatchPlan, plan_batches
from tuner.data.lengths import Lengths

IntArray = NDArray[np.int64]


def our_rows(tokens: IntArray, capacity: int) -> IntArray:
    """The placement alone: sorting, and the row of every sample from the longest on."""
    return pack_falling(np.sort(tokens)[::-1], (capacity,))[0]


def our_plan(tokens: IntArray, capacity: int) -> BatchPlan:
    """A whole plan of an epoch, with one packed row a batch, in random order."""
    config = make_config(
        {
            "batching.strategy": "packed",
            "batching.boundaries": [capacity],
            "batching.samples_per_batch": 1,
            "batching.tokens_per_batch": None,
        }
    )
    lengths = Lengths(tokens=tokens.astype(np.int32), fingerprint="bench")
    return plan_batches(lengths, config)


def first_fit_decreasing(tokens: IntArray, capacity: int) -> IntArray:
    """From the longest on, each sample into the first row with room; a tree of the most room.

    Node i of the tree holds the most room of the rows below it; leaves are rows, all empty yet.
    """
    num_leaves = 1 << int(len(tokens) - 1).bit_length()
    room = [capacity] * (2 * num_leaves)
    row_of_sample = []
    for length in np.sort(tokens)[::-1].tolist():
        node = 1
        while node < num_leaves:
            node *= 2
            if room[node] < length:
                node += 1
        row_of_sample.append(node - num_leaves)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return np.array(row_of_sample)


class TrlPacker:
    """`pack_dataset` of TRL, on token lists of the given lengths, one byte a token."""

    def __init__(self, tokens: IntArray) -> None:
        self._utils = pytest.importorskip("trl.data_utils")
        pa = pytest.importorskip("pyarrow")
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        ends = np.concatenate(([0], np.cumsum(tokens)))
        ids = pa.array(np.zeros(ends[-1], dtype=np.int8))
        self._table = pa.table({"input_ids": pa.LargeListArray.from_arrays(ends, ids)})
        self._dataset = datasets.Dataset(self._table)

    def pack(self, capacity: int, strategy: str, rows_at_once: int | None) -> list[list[int]]:
        """Lengths of the samples of every row.

        Args:
            capacity: Tokens of a row.
            strategy: `bfd` or `bfd_split`.
            rows_at_once: Samples that are packed together; None: all.
        """
        packed = self._utils.pack_dataset(
            self._dataset,
            capacity,
            strategy,
            {
                "batch_size": rows_at_once,
                "keep_in_memory": True,
                "load_from_cache_file": False,
                "new_fingerprint": "bench",
            },
        )
        lengths: list[list[int]] = packed.data.column("seq_lengths").to_pylist()
        return lengths

    def placement_seconds(self, capacity: int) -> float:
        """CPU seconds of the function inside, less all that it spends in Arrow's functions.

        These move the tokens, most of the time; a packer of lengths has none to move.
        """
        arrow = ClockedModule(self._utils.pc)
        start = time.process_time()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._utils, "pc", arrow)
            self._utils._pack_bfd(self._table, capacity)
        return time.process_time() - start - arrow.spent_s


class ClockedModule:
    """A module's functions, and the CPU seconds spent in them."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self.spent_s = 0.0

    def __getattr__(self, name: str) -> Callable[..., object]:
        function = getattr(self._module, name)

        def clocked(*args: object, **options: object) -> object:
            start = time.process_time()
            result = function(*args, **options)
            self.spent_s += time.process_time() - start
            return result

        return clocked


def seqpacker_rows(tokens: IntArray, capacity: int, strategy: str) -> list[list[int]]:
    """Samples of every row.

    Source: `pack_sequences` as documented for seqpacker 0.1.
    """
    seqpacker = pytest.importorskip("seqpacker")
    packed = seqpacker.pack_sequences(tokens, capacity=capacity, strategy=strategy)
    bins: list[list[int]] = packed.bins
    return bins

"""Peers that put rows of like length together: lhotse, transformers and MindSpore.

Each takes lengths in tokens and gives the rows, or the lengths, of every batch of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tuner.batching.align import align_lengths
from tuner.data.mindrecord import MindRecordSet

IntArray = NDArray[np.int64]


@dataclass
class CountedRow:
    """What lhotse asks of an example of text; it hangs its own marks on it."""

    index: int
    num_tokens: int


class Lhotse:
    """Equal-token buckets and the sampler that fills batches from them, with a token budget."""

    def __init__(self, tokens: IntArray, budget_tokens: int) -> None:
        self._sampling = pytest.importorskip("lhotse.dataset.sampling.dynamic_bucketing")
        base = pytest.importorskip("lhotse.dataset.sampling.base")
        self._constraint = base.TokenConstraint(max_tokens=budget_tokens)
        self._rows = [CountedRow(*pair) for pair in enumerate(tokens.tolist())]
        self._longest = int(tokens.max())

    def starts(self, num_buckets: int) -> list[int]:
        """Where buckets after the first start; from all rows, not the first 10,000 alone."""
        found: list[int] = self._sampling.estimate_duration_buckets(
            self._rows, num_buckets, self._constraint
        )
        return found

    def boundaries(self, num_buckets: int, align: int) -> dict[str, IntArray]:
        """Padded lengths of its buckets in both readings of its rule.

        Its documentation says that a bucket ends below the start of the next; its sampler puts
        rows of exactly that length into the lower bucket. With whole numbers the two differ.
        """
        starts = np.array([*self.starts(num_buckets), self._longest])
        ends = {"as its sampler does": starts, "as documented": starts - 1}
        ends["as documented"][-1] = self._longest
        return {name: np.unique(align_lengths(points, align)) for name, points in ends.items()}

    def epoch(self, num_buckets: int) -> list[list[int]]:
        """Rows of every batch of its sampler, shuffled, nothing dropped."""
        sampler = self._sampling.DynamicBucketingSampler(
            self._rows,
            constraint=self._constraint,
            num_buckets=num_buckets,
            shuffle=True,
            world_size=1,
            rank=0,
        )
        return [[row.index for row in batch] for batch in sampler]


def grouped_by_transformers(tokens: list[int], size: int) -> list[list[int]]:
    """Rows of every batch of the Trainer's `group_by_length`, `size` rows each."""
    parts = pytest.importorskip("transformers.trainer_pt_utils")
    torch = pytest.importorskip("torch")
    seeded = torch.Generator().manual_seed(0)
    order = list(parts.LengthGroupedSampler(size, lengths=tokens, generator=seeded))
    return [order[start : start + size] for start in range(0, len(order), size)]


class RowsInMemory:
    """What a GeneratorDataset reads: row i has tokens[i] ids."""

    def __init__(self, tokens: IntArray) -> None:
        self._ids = np.zeros(int(tokens.max()), dtype=np.int32)
        self._tokens = tokens.tolist()

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int32]]:
        return (self._ids[: self._tokens[index]],)


def mindspore_rows(rows: RowsInMemory) -> Any:
    """A MindSpore data set of rows in random order, read by one thread."""
    ds = pytest.importorskip("mindspore.dataset")
    return ds.GeneratorDataset(rows, ["ids"], shuffle=True, num_parallel_workers=1)


def mindspore_batches(
    rows: RowsInMemory, boundaries: IntArray, batch_sizes: IntArray, *, to_boundary: bool
) -> Iterator[NDArray[np.int32]]:
    """Batches of `bucket_batch_by_length`, padded to their longest row or to their boundary.

    Its buckets are half open and it pads to one below their end, so every end is one more than
    the padded length; the bucket after the last end, which no row may reach, needs a size too.
    Without pad_info it pads to the longest row even if told to pad to the boundary.
    """
    batches = mindspore_rows(rows).bucket_batch_by_length(
        ["ids"],
        (boundaries + 1).tolist(),
        [*batch_sizes.tolist(), 1],
        pad_info={"ids": ([None], 0)},
        pad_to_bucket_boundary=to_boundary,
    )
    for (ids,) in batches.create_tuple_iterator(num_epochs=1, output_numpy=True):
        yield ids


def mindspore_file_batches(
    dataset: MindRecordSet, boundaries: Sequence[int], batch_sizes: Sequence[int]
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Shuffled batches of ids and labels, from files, padded to their boundary.

    As `mindspore_batches`, with the threads that the trainer has.
    """
    ds = pytest.importorskip("mindspore.dataset")
    rows = ds.MindDataset(
        [str(file) for file in dataset.files],
        columns_list=["input_ids", "labels"],
        shuffle=True,
        num_parallel_workers=2,
    )
    batches = rows.bucket_batch_by_length(
        ["input_ids"],
        [length + 1 for length in boundaries],
        [*batch_sizes, 1],
        pad_info={"input_ids": ([None], 0), "labels": ([None], -100)},
        pad_to_bucket_boundary=True,
    )
    yield from batches.create_tuple_iterator(num_epochs=1, output_numpy=True, do_copy=False)

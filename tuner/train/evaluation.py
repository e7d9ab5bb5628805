"""The loss on rows that are not trained on, over all their labels and by length.

A graph of its own without gradients, compiled before the first step for every shape of the
evaluation's plan. The losses of all batches are summed in float64 and divided by the labels, so
that the result does not depend on who was batched with whom. Of several ranks each evaluates its
share of the batches, and every rank gets the sums of all. Nothing of the training changes: the
weights are only read, and the model is told that it is evaluated, and then that it is trained.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, nn

from tuner.batching.grouping import Shape
from tuner.batching.plan import PlannedBatch
from tuner.data.content import IGNORED_LABEL
from tuner.train.device import memory_bytes
from tuner.train.engine import Engine
from tuner.train.evaluation_rows import EvaluationRows
from tuner.train.graph import prepare_step
from tuner.train.loader import Batch, read_ahead, read_batches
from tuner.train.metrics import EvaluationRecord, LengthLoss
from tuner.train.ranks import OneRank, Ranks
from tuner.train.step import SummedLoss
from tuner.train.warmup import StoppedError, named_if_too_large


class EvaluatedLoss(nn.Cell):
    """The summed loss of a batch as a graph of its own, without gradients."""

    def __init__(self, loss: SummedLoss) -> None:
        # The parameters keep the names that they have in the training.
        super().__init__(auto_prefix=False)
        self.loss = loss

    def construct(self, input_ids_BT: Tensor, targets_BT: Tensor, *packing: Tensor) -> Tensor:
        """float32 scalar, as `SummedLoss`."""
        return self.loss(input_ids_BT, targets_BT, *packing)


@dataclass
class _Sum:
    """Of one class of lengths so far."""

    rows: int = 0
    label_tokens: int = 0
    loss: float = 0.0


class Evaluation:
    """Evaluates an engine's model, as often as it is asked to."""

    def __init__(self, engine: Engine, rows: EvaluationRows) -> None:
        """Prepare; nothing is compiled yet.

        Args:
            engine: Whose model is evaluated; its graphs are compiled.
            rows: What is evaluated.
        """
        self._engine = engine
        self._rows = rows
        self._cell = EvaluatedLoss(engine.loss)
        num_inputs = len(Batch.empty((1, 1), rows.config).arrays)
        prepare_step(self._cell, rows.config.graph, num_inputs)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """(B, L) that are compiled: of static graphs each, of a dynamic one the first."""
        shapes = self._rows.plan.shapes
        return shapes if self._rows.config.graph.mode == "static" else shapes[:1]

    def warm_up(self, notice: Callable[[str], None], stop_requested: Callable[[], bool]) -> float:
        """Compile every shape with a batch of fillers.

        Args:
            notice: Told a line for every shape.
            stop_requested: Asked after every shape.

        Returns:
            Seconds in all.

        Raises:
            StoppedError: a stop was requested.
            BadInputError: a shape does not fit in memory.
        """
        started = time.perf_counter()
        for number, shape in enumerate(self.shapes, start=1):
            place = f"[evaluation {number}/{len(self.shapes)}] B={shape[0]} L={shape[1]}"
            shape_started = time.perf_counter()
            with named_if_too_large(place), self._evaluating(), self._engine.recompiles.planned():
                self._loss_of(Batch.empty(shape, self._rows.config))
            seconds = time.perf_counter() - shape_started
            memory = memory_bytes(self._engine.device) / 1e9
            kind = self._engine.device.memory_kind
            notice(f"{place} {seconds:.1f} s, memory {memory:.2f} GB ({kind})")
            if stop_requested():
                raise StoppedError
        return time.perf_counter() - started

    def run(self, step: int, ranks: Ranks | None = None) -> EvaluationRecord:
        """Evaluate all rows with the weights as they are.

        Args:
            step: Steps done, for the record.
            ranks: All that evaluate together; None: this one alone.

        Raises:
            BadInputError: a row cannot be read or is not fit for the model.
        """
        started = time.perf_counter()
        ranks = ranks or OneRank()
        sums = [_Sum() for _ in self._rows.plan.classes]
        with self._evaluating():
            for index, batch in self._batches(ranks):
                has_label = (batch.targets_BT != IGNORED_LABEL).any(axis=1)
                sums[index].rows += int(np.count_nonzero(has_label))
                sums[index].label_tokens += batch.label_tokens
                sums[index].loss += self._loss_of(batch)
        sums = _summed(sums, ranks)
        record = _record(step, sums, [item.up_to for item in self._rows.plan.classes])
        return dataclasses.replace(record, seconds=time.perf_counter() - started)

    def _batches(self, ranks: Ranks) -> Iterator[tuple[int, Batch]]:
        """This rank's batches with the class of their rows, always in the same order."""
        planned: list[tuple[int, PlannedBatch]] = [
            (index, batch)
            for index, item in enumerate(self._rows.plan.classes)
            for batch in item.batches()
        ][ranks.world.rank :: ranks.world.size]
        steps = [batch for _, batch in planned]
        batches = read_batches(self._rows.dataset, steps, self._rows.config)
        with read_ahead(batches) as ready:
            for (index, _), batch in zip(planned, ready, strict=True):
                yield index, batch

    def _loss_of(self, batch: Batch) -> float:
        inputs = map(Tensor, batch.arrays)
        return float(self._engine.recompiles.run(self._cell, *inputs).asnumpy())

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Tell the model that it is evaluated; a graph keeps what it was told at its compile."""
        self._cell.set_train(False)
        try:
            yield
        finally:
            self._engine.loss.set_train()


def _summed(sums: list[_Sum], ranks: Ranks) -> list[_Sum]:
    """Over all ranks."""
    own = [number for item in sums for number in (item.rows, item.label_tokens, item.loss)]
    totals = ranks.gather(own).sum(axis=0).reshape(-1, 3)
    return [
        _Sum(rows=int(rows), label_tokens=int(label_tokens), loss=float(loss))
        for rows, label_tokens, loss in totals
    ]


def _record(step: int, sums: list[_Sum], ends: list[int]) -> EvaluationRecord:
    label_tokens = sum(item.label_tokens for item in sums)
    total = sum(item.loss for item in sums)
    loss = total / label_tokens if label_tokens and math.isfinite(total) else None
    by_length = tuple(
        LengthLoss(
            up_to=up_to,
            rows=item.rows,
            label_tokens=item.label_tokens,
            loss=item.loss / item.label_tokens,
            perplexity=_perplexity(item.loss / item.label_tokens),
        )
        for up_to, item in zip(ends, sums, strict=True)
        if item.label_tokens
    )
    return EvaluationRecord(
        step=step,
        seconds=0.0,
        rows=sum(item.rows for item in sums),
        label_tokens=label_tokens,
        loss=loss,
        perplexity=None if loss is None else _perplexity(loss),
        by_length=() if loss is None else by_length,
    )


def _perplexity(loss: float) -> float | None:
    try:
        return math.exp(loss)
    except OverflowError:
        return None

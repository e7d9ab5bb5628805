"""Whether a graph computes what the model says: its outputs beside those of no graph at all.

The same Cell runs the same batch twice, as a graph and op by op, and loss and every element of
every gradient are compared; the update the same way on known buffers. Weights are known noise
meanwhile: as they are initialised, norms are 1 and adapters 0, and a graph that is wrong about
them would not show. Afterwards all parameters hold the bits that they had.

Op by op costs no compile, but a step takes longer than as a graph. So the batch of a built-in
decoder repeats one row, and only that runs op by op: rows are independent there, so loss and
gradients of the whole batch are its own times their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from mindspore import Parameter, Tensor
from numpy.typing import NDArray

from tuner.batching.grouping import Shape
from tuner.config.schema import ComputeDtype, TrainConfig
from tuner.data.content import IGNORED_LABEL
from tuner.train.engine import Engine
from tuner.train.loader import Batch, Packing

Array = NDArray[np.float32]

KNOWN_SEED = 20
# Times the root of the columns: products of values around 1 are around 1 again, so that neither
# a softmax is flat nor anything near the ends of fp16.
KNOWN_SCALE = 0.7

TOLERANCES: dict[ComputeDtype, float] = {"fp32": 1e-4, "fp16": 5e-2, "bf16": 5e-2}
"""Largest error of an output, as a share of the largest value of its array."""

RECORDED_TOLERANCES: dict[ComputeDtype, float] = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 1e-2}
"""The same for square sums, compared with what the graph gave when it was compiled."""

UPDATE_TOLERANCE = 1e-5
"""The same for what an update leaves; it computes in fp32 whatever the model does."""

# Of the checked update: a rate that moves weights visibly, a bias correction that is not 1.
CHECKED_RATE = 0.1
CHECKED_UPDATE = 3
CHECKED_LABELS = 7


def checked_batch(shape: Shape, config: TrainConfig) -> Batch:
    """The batch that graphs are compared with: two samples a row and padding at its end.

    Of random ids, always the same ones. Where rows hold one sample it fills both places.

    Args:
        shape: (B, L).
        config: As `Batch.full` takes it.
    """
    full = repeated(Batch.full(shape, config), num_distinct_rows(shape, config))
    length = shape[1]
    middle, end = length // 2, length - length // 8
    targets_BT = full.targets_BT.copy()
    targets_BT[:, end - 1 :] = IGNORED_LABEL
    packing = full.packing
    if packing is not None:
        places = np.arange(length, dtype=np.int32)
        is_real = places < end
        segments = np.where(is_real, 1 + (places >= middle), 0).astype(np.int32)
        positions = np.where(is_real, places - middle * (places >= middle), 0).astype(np.int32)
        packing = Packing(
            segment_ids_BT=np.broadcast_to(segments, shape).copy(),
            positions_BT=np.broadcast_to(positions, shape).copy(),
        )
    return dataclasses.replace(
        full,
        targets_BT=targets_BT,
        packing=packing,
        label_tokens=int((targets_BT != IGNORED_LABEL).sum()),
    )


def num_distinct_rows(shape: Shape, config: TrainConfig) -> int:
    """Rows of the checked batch that are not repeats; divides B.

    In a user's Cell rows may depend on each other, as in a norm over the batch: all are distinct.
    """
    if config.model.factory is not None:
        return shape[0]
    return 1


def repeated(batch: Batch, num_rows: int) -> Batch:
    """The first rows of a batch over and over again."""
    rows = np.arange(batch.shape[0]) % num_rows
    ids_BT, targets_BT = batch.input_ids_BT[rows], batch.targets_BT[rows]
    return dataclasses.replace(batch, input_ids_BT=ids_BT, targets_BT=targets_BT)


def first_rows(batch: Batch, num_rows: int) -> Batch:
    """A smaller batch of the first rows of another, of which they are an equal share."""
    share = batch.shape[0] // num_rows
    packing = batch.packing
    if packing is not None:
        packing = Packing(
            segment_ids_BT=packing.segment_ids_BT[:num_rows],
            positions_BT=packing.positions_BT[:num_rows],
        )
    return Batch(
        input_ids_BT=batch.input_ids_BT[:num_rows],
        targets_BT=batch.targets_BT[:num_rows],
        packing=packing,
        real_tokens=batch.real_tokens // share,
        label_tokens=batch.label_tokens // share,
    )


class GraphMismatchError(Exception):
    """A graph gives another value than its model."""


def step_outputs(engine: Engine, batch: Batch) -> list[Array]:
    """Run a step: the loss, then every gradient buffer; the buffers are zero afterwards."""
    loss = engine.run_step(batch)
    gradients = engine.read_gradients()
    engine.clear_gradients()
    return [np.array([loss], np.float32), *gradients]


def update_outputs(engine: Engine) -> list[Array]:
    """Make an update of known buffers: its norm, then every parameter after it.

    All parameters hold known noise afterwards.
    """
    rng = np.random.default_rng(KNOWN_SEED)
    for parameter in engine.parameters:
        noise = 0.1 * rng.standard_normal(parameter.shape, dtype=np.float32)
        # Second moments are never negative.
        is_square = any(parameter is moment for moment in engine.second_moments)
        parameter.set_data(Tensor(np.square(noise) if is_square else noise))
    before = engine.loss_scale
    norm = engine.run_update(CHECKED_RATE, CHECKED_UPDATE, CHECKED_LABELS, clip_norm=1e-2)
    engine.loss_scale = before
    return [np.array([norm], np.float32), *(p.asnumpy().copy() for p in engine.parameters)]


def fresh_step_outputs(engine: Engine, batch: Batch, num_rows: int) -> list[Array]:
    """`step_outputs` without a graph.

    Args:
        engine: With the weights of the graph.
        batch: That the graph ran; repeats its first rows.
        num_rows: How many; only these are run.
    """
    with engine.without_graphs():
        outputs = step_outputs(engine, first_rows(batch, num_rows))
    repeats = np.float32(batch.shape[0] // num_rows)
    return [repeats * output for output in outputs]


def fresh_update_outputs(engine: Engine) -> list[Array]:
    """`update_outputs` without a graph."""
    with engine.without_graphs():
        return update_outputs(engine)


def require_equal(found: Sequence[Array], expected: Sequence[Array], tolerance: float) -> None:
    """Compare outputs array by array.

    Args:
        found: Of the graph.
        expected: Fresh ones.
        tolerance: Largest error, as a share of the largest value of each array.

    Raises:
        GraphMismatchError: they differ; says where and by how much.
    """
    for index, (value, wanted) in enumerate(zip(found, expected, strict=True)):
        error = relative_error(value, wanted)
        if not error <= tolerance:
            name = f"array {index}" if index else "the first value"
            raise GraphMismatchError(
                f"{name} is off by {error:.2g} of its largest value, at most {tolerance:g} is "
                f"rounding (it starts with {value.flat[0]:.6g} instead of {wanted.flat[0]:.6g})"
            )


def relative_error(value: Array, wanted: Array) -> float:
    """Largest difference as a share of the largest wanted value; infinite where only one has it.

    Overflows of fp16 are equal if they stand in the same places.
    """
    is_finite = np.isfinite(wanted)
    if not np.array_equal(is_finite, np.isfinite(value)):
        return float("inf")
    difference = np.abs(value[is_finite] - wanted[is_finite]).max(initial=0.0)
    largest = np.abs(wanted[is_finite]).max(initial=0.0)
    return float(difference / largest) if largest else float("inf" if difference else 0.0)


def square_sums(outputs: Sequence[Array]) -> tuple[float, ...]:
    """The first value as it is, then the square sum of each array; what a manifest keeps."""
    first, *arrays = outputs
    return (float(first[0]), *(float(np.square(a, dtype=np.float64).sum()) for a in arrays))


def require_recorded(found: Sequence[float], recorded: Sequence[float], tolerance: float) -> None:
    """Compare square sums with those of the graph when it was compiled.

    Raises:
        GraphMismatchError: they differ.
    """
    if len(found) != len(recorded):
        raise GraphMismatchError(f"{len(found)} outputs, {len(recorded)} when it was compiled")
    for value, before in zip(found, recorded, strict=True):
        if not np.isclose(value, before, rtol=tolerance, atol=0.0, equal_nan=True):
            raise GraphMismatchError(
                f"an output has {value:.9g}, it had {before:.9g} when the graph was compiled"
            )


@contextmanager
def known_weights(engine: Engine) -> Iterator[None]:
    """Known values in all trained weights for the block; afterwards every parameter has its bits.

    They do not follow from the initial ones, which a resumed run may not even read.
    """
    parameters = engine.parameters
    before = [parameter.asnumpy().copy() for parameter in parameters]
    try:
        set_known(engine.weights)
        yield
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.set_data(Tensor(value))


def set_known(weights: Sequence[Parameter]) -> None:
    """Fill weights with the same noise at every call: vectors around 1, the rest around 0."""
    rng = np.random.default_rng(KNOWN_SEED)
    for weight in weights:
        noise = rng.standard_normal(weight.shape, dtype=np.float32)
        scale = np.float32(KNOWN_SCALE * weight.shape[-1] ** -0.5 if weight.ndim else KNOWN_SCALE)
        weight.set_data(Tensor(scale * noise + np.float32(weight.ndim == 1)))

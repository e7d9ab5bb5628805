"""The compiled parts of a run on its device: model, step and update; for trainer and trials."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from numpy.typing import NDArray

from tuner.batching.grouping import Shape
from tuner.batching.packed_bounds import PackedBounds
from tuner.config.schema import TrainConfig
from tuner.train.build import build_model, saves_frozen_weights
from tuner.train.device import Device
from tuner.train.flash_lengths import cumulative_lengths, layout_refusal, num_lengths
from tuner.train.graph import num_compiled_graphs, op_by_op, prepare_step, set_level
from tuner.train.loader import Batch
from tuner.train.model import Decoder
from tuner.train.precision import dtypes_of
from tuner.train.recompiles import RecompileWatch
from tuner.train.scaling import LossScale
from tuner.train.step import (
    FIRST_MOMENT,
    SECOND_MOMENT,
    AccumulateStep,
    GradientNorm,
    ScaledAccumulateStep,
    SummedLoss,
    UpdateStep,
    update_arguments,
)
from tuner.train.weight_groups import are_decayed
from tuner.train.weight_shares import owners_of_weights
from tuner.train.world import World


class Engine:
    """Forward, backward and update of one rank.

    Every method returns when the device has done the work, so that the caller may time it.

    Attributes:
        model: What is trained.
        loss: Its summed loss, of a batch as `Batch.arrays` has it.
        device: What it runs on.
        num_lengths: Cumulative lengths that a step takes of packed rows, for flash attention in
            layout TND; 0: it takes none.
        owners: Rank that updates each of the weights; None: every rank updates all of them.
        loss_scale: Of fp16; None in fp32 and bf16, which need none. An update moves it.
        recompiles: Through which every Cell is called; knows the compiles that nobody planned.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: Device,
        max_padded_length: int,
        *,
        bounds: PackedBounds | None = None,
        reads_source: bool = True,
    ) -> None:
        """Build the model; nothing is compiled yet.

        Args:
            config: Model, precision, optimizer, graph.
            device: The opened device.
            max_padded_length: Longest planned row in tokens.
            bounds: Of all batches of packed rows; None: there are none, or they are not known, and
                flash attention takes full masks.
            reads_source: As `build_model` takes it.

        Raises:
            BadInputError: as `build_model`.
        """
        self.device = device
        self.loss_scale: LossScale | None = None
        self.recompiles = RecompileWatch()
        self.in_flight: Batch | None = None
        self._config = config
        dtypes = dtypes_of(config.precision)
        self.model = build_model(config, max_padded_length, reads_source=reads_source)
        self.loss = SummedLoss(self.model, dtypes.loss)
        # A step holds it in a function, past which set_train of the step does not reach.
        self.loss.set_train()
        loss = self.loss
        is_scaled = config.precision.compute_dtype == "fp16"
        if is_scaled:
            self.loss_scale = LossScale(scale=config.precision.loss_scale)
        self._step = ScaledAccumulateStep(loss) if is_scaled else AccumulateStep(loss)
        self.owners: tuple[int, ...] | None = None
        self._update = self._make_update(None)
        # Of fp16 the norm comes first: it decides whether there is an update.
        self._norm = GradientNorm(self._step) if is_scaled else None
        self.num_lengths = _num_lengths(self.model, bounds)
        prepare_step(
            self._step,
            config.graph,
            len(Batch.empty((1, 1), config).arrays),
            num_scalars=int(is_scaled),
            num_vectors=int(self.num_lengths > 0),
        )
        for cell in self._cells[1:]:
            set_level(cell, config.graph)

    def share_out(self, world: World) -> None:
        """With optimizer.sharded keep the moments of this rank's own weights alone.

        Args:
            world: This rank; nothing was compiled yet.
        """
        if world.is_alone or not self._config.optimizer.sharded:
            return
        self.owners = owners_of_weights([weight.size for weight in self.weights], world.size)
        self._update = self._make_update(tuple(owner == world.rank for owner in self.owners))
        set_level(self._update, self._config.graph)

    @property
    def weights(self) -> tuple[Parameter, ...]:
        """Those that are trained."""
        return tuple(self._step.parameters)

    @property
    def gradients(self) -> ParameterTuple:
        """The buffers, in the order of the weights."""
        return self._step.gradients

    @property
    def moments(self) -> dict[str, Parameter]:
        """Of the optimizer on this rank, by name."""
        kept = (*self._update.first_moments, *self._update.second_moments)
        return {moment.name: moment for moment in kept}

    @property
    def moments_elsewhere(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of those that other ranks keep."""
        here = self.moments
        return {
            f"{kind}.{weight.name}": tuple(weight.shape)
            for kind in (FIRST_MOMENT, SECOND_MOMENT)
            for weight in self.weights
            if f"{kind}.{weight.name}" not in here
        }

    @property
    def second_moments(self) -> tuple[Parameter, ...]:
        """Of the optimizer; never negative."""
        return tuple(self._update.second_moments)

    @property
    def parameters(self) -> list[Parameter]:
        """Everything that a checkpoint holds of this rank: weights, gradient buffers, moments.

        Weights that are not trained come last, unless they are read from model.source again.
        """
        is_saved = saves_frozen_weights(self._config.model)
        return [
            *self._step.parameters,
            *self._step.gradients,
            *self.moments.values(),
            *(self.model.untrainable_params() if is_saved else ()),
        ]

    def run_step(self, batch: Batch) -> float:
        """Add a batch's gradient to the buffers; the loss summed over its labels."""
        self.in_flight = batch
        inputs = list(map(Tensor, batch.arrays))
        if self.num_lengths and batch.packing is not None:
            ids_BT = batch.packing.segment_ids_BT
            inputs.append(Tensor(cumulative_lengths(ids_BT, self.num_lengths)))
        if self.loss_scale is not None:
            factor = self.loss_scale.factor(batch.label_tokens)
            inputs.insert(0, Tensor(factor, ms.float32))
        # asnumpy waits for the result, and with it for the whole graph.
        loss_sum = float(self.recompiles.run(self._step, *inputs).asnumpy())
        self.in_flight = None
        return loss_sum

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Run steps and updates op by op inside the block, and as the same graphs after it."""
        with op_by_op():
            as_graph = self._step.loss_and_gradients
            self._step.loss_and_gradients = self._step.differentiate()
            try:
                yield
            finally:
                self._step.loss_and_gradients = as_graph

    def run_empty_step(self, shape: Shape) -> None:
        """Run a batch without labels: compiles the shape, takes its memory, adds exactly 0."""
        self.run_step(Batch.empty(shape, self._config))

    def run_update(
        self, learning_rate: float, update: int, label_tokens: int, clip_norm: float = math.inf
    ) -> float:
        """Make the t-th update (t >= 1) of the buffered gradients, and clear these.

        In fp16 gradients that overflowed make no update: only the buffers are cleared and the
        loss scale is halved.

        Args:
            learning_rate: Of this update.
            update: t.
            label_tokens: Labels of the whole window, >= 1.
            clip_norm: Norm to which larger gradients are scaled down; looked at if the config
                clips at all.

        Returns:
            The norm of the gradients before clipping; not finite in fp16 if there was no update.
        """
        arguments = update_arguments(
            self._config.optimizer, learning_rate, update, label_tokens, clip_norm
        )
        if self._norm is None or self.loss_scale is None:
            return float(self.recompiles.run(self._update, *arguments).asnumpy())
        norm = float(self.recompiles.run(self._norm, arguments[0]).asnumpy())
        is_finite = math.isfinite(norm)
        if is_finite:
            self.recompiles.run(self._update, *arguments)
        else:
            self.clear_gradients()
            # So that the compile is in the first call even if that makes no update.
            self._update.compile(*arguments)
        window = self._config.precision.loss_scale_window
        self.loss_scale = self.loss_scale.after_update(is_finite=is_finite, window=window)
        return norm

    def run_empty_update(self) -> None:
        """Compile the update. With buffers and moments at 0 and rate 0 it changes nothing."""
        before = self.loss_scale
        self.run_update(learning_rate=0.0, update=1, label_tokens=1)
        self.loss_scale = before

    def read_gradients(self) -> list[NDArray[np.float32]]:
        """A copy of the gradient buffers in the order of the weights; not scaled."""
        return [gradient.asnumpy().copy() for gradient in self.gradients]

    def clear_gradients(self) -> None:
        """Set the gradient buffers to 0."""
        for gradient in self.gradients:
            gradient.set_data(Tensor(np.zeros(gradient.shape, np.float32)))

    def num_graphs(self) -> int | None:
        """Graphs compiled so far for step and update; None where MindSpore does not tell."""
        counts = [num_compiled_graphs(cell) for cell in self._cells]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def _make_update(self, is_own: tuple[bool, ...] | None) -> UpdateStep:
        optimizer, train = self._config.optimizer, self._config.train
        return UpdateStep(
            self._step,
            optimizer,
            is_decayed=are_decayed(self.loss, self._step.parameters, optimizer.no_decay),
            clips=train.clip_norm is not None or train.clip_quantile is not None,
            is_own=is_own,
        )

    @property
    def _cells(self) -> list[nn.Cell]:
        """All that is compiled, the step first."""
        cells = [self._step, self._update, self._norm]
        return [cell for cell in cells if cell is not None]


def _num_lengths(model: nn.Cell, bounds: PackedBounds | None) -> int:
    takes_any = isinstance(model, Decoder) and model.is_flash
    if not takes_any or bounds is None or layout_refusal(bounds) is not None:
        return 0
    return num_lengths(bounds.sequences)

"""The compiled parts of a run on its device: model, step and update; for trainer and trials."""

from __future__ import annotations

from mindspore import Parameter, Tensor

from tuner.batching.grouping import Shape
from tuner.config.schema import TrainConfig
from tuner.train.device import Device
from tuner.train.graph import num_compiled_graphs, prepare_step, set_level
from tuner.train.loader import Batch
from tuner.train.model import Decoder
from tuner.train.step import (
    AccumulateStep,
    SummedLoss,
    UpdateStep,
    update_arguments,
)


class Engine:
    """Forward, backward and update of one rank.

    Every method returns when the device has done the work, so that the caller may time it.
    """

    def __init__(self, config: TrainConfig, device: Device, max_padded_length: int) -> None:
        """Build the model; nothing is compiled yet.

        Args:
            config: Model, optimizer, graph.
            device: The opened device.
            max_padded_length: Longest planned row in tokens.
        """
        self.device = device
        self._config = config
        model = Decoder(config.model, max_padded_length, config.train.seed)
        self._step = AccumulateStep(SummedLoss(model))
        self._update = UpdateStep(self._step, config.optimizer, config.train.clip_norm)
        prepare_step(self._step, config.graph, num_inputs=len(Batch.empty((1, 1), config).arrays))
        set_level(self._update, config.graph)

    @property
    def parameters(self) -> list[Parameter]:
        """Everything that a checkpoint holds: weights, gradient buffers, moments."""
        return [
            *self._step.parameters,
            *self._step.gradients,
            *self._update.first_moments,
            *self._update.second_moments,
        ]

    def run_step(self, batch: Batch) -> float:
        """Add a batch's gradient to the buffers; the loss summed over its labels."""
        # asnumpy waits for the result, and with it for the whole graph.
        return float(self._step(*map(Tensor, batch.arrays)).asnumpy())

    def run_empty_step(self, shape: Shape) -> None:
        """Run a batch without labels: compiles the shape, takes its memory, adds exactly 0."""
        self.run_step(Batch.empty(shape, self._config))

    def run_update(self, learning_rate: float, update: int, label_tokens: int) -> float:
        """Make the t-th update (t >= 1) of the buffered gradients; their norm before clipping."""
        arguments = update_arguments(self._config.optimizer, learning_rate, update, label_tokens)
        return float(self._update(*arguments).asnumpy())

    def run_empty_update(self) -> None:
        """Compile the update. With buffers and moments at 0 and rate 0 it changes nothing."""
        self.run_update(learning_rate=0.0, update=1, label_tokens=1)

    def num_graphs(self) -> int | None:
        """Graphs compiled so far for step and update; None where MindSpore does not tell."""
        counts = [num_compiled_graphs(self._step), num_compiled_graphs(self._update)]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

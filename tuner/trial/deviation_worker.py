"""The process of a deviation run: `python -m tuner.trial.deviation_worker FOLDER`.

fp32 first, then each variant: a new model with the same initial weights computes the loss and the
whole gradient of the same batches. They run op by op, since a graph for each variant and shape
would take minutes to compile, for a few steps. One process holds one model at a time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.batching.grouping import Shape
from tuner.batching.packed_bounds import packed_bounds
from tuner.batching.plan import EpochPlan, PlannedBatch, plan_batches
from tuner.config.codec import write_text
from tuner.config.schema import PrecisionConfig, TrainConfig
from tuner.data.held_out import training_part
from tuner.data.lengths import Lengths
from tuner.data.mindrecord import open_mindrecord
from tuner.errors import BadInputError
from tuner.train.device import Device, check_precision, open_device
from tuner.train.engine import Engine
from tuner.train.graph import run_op_by_op
from tuner.train.loader import Batch, read_batches
from tuner.train.scaling import LossScale
from tuner.trial.deviation import Deviation, DeviationResult, DeviationSpec, Reference
from tuner.trial.folder import TrialFolder
from tuner.trial.measure import DivergedError
from tuner.trial.record import parse_json, to_json
from tuner.trial.worker import end_with_parent, failure_of

# Gradients of a mean loss that overflow at a scale of 1 are no matter of the scale.
LEAST_TRIED_SCALE = 1.0
SCALE_DIVISOR = 16.0


def main(arguments: list[str]) -> int:
    """Run one comparison; returns the exit code."""
    end_with_parent()
    folder = TrialFolder(Path(arguments[0]))
    try:
        _compare(folder)
        result = DeviationResult(status="ok")
    except Exception as error:
        status, reason = failure_of(error)
        result = DeviationResult(status=status, reason=reason)
    write_text(folder.result, to_json(result))
    return 0


def choose_steps(plan: EpochPlan, num_batches: int) -> list[PlannedBatch]:
    """The first steps of the epoch at the largest and at the smallest shape, in turn."""
    by_shape: dict[Shape, list[PlannedBatch]] = {}
    for step in plan.steps_of_rank(0):
        by_shape.setdefault(step.shape, []).append(step)
    met = sorted(by_shape, key=lambda shape: (shape[0] * shape[1], shape[1]), reverse=True)
    ends = [by_shape[shape] for shape in dict.fromkeys((met[0], met[-1]))]
    chosen: list[PlannedBatch] = []
    for number in range(max(map(len, ends))):
        chosen += [steps[number] for steps in ends if number < len(steps)]
    return chosen[:num_batches]


@dataclass(frozen=True, kw_only=True)
class _Computed:
    """Of all batches: each one's summed loss, and the gradient of their sum."""

    losses: list[float]
    gradients: list[NDArray[np.float32]]
    loss_scale: float | None

    @property
    def num_nonfinite_gradients(self) -> int:
        return sum(int((~np.isfinite(part)).sum()) for part in self.gradients)

    @property
    def num_nonfinite_losses(self) -> int:
        return int((~np.isfinite(self.losses)).sum())

    @property
    def may_need_lower_scale(self) -> bool:
        """Whether only the gradient overflowed, which a lower loss scale may mend."""
        is_scaled = self.loss_scale is not None
        return is_scaled and not self.num_nonfinite_losses and self.num_nonfinite_gradients > 0

    @property
    def gradient_norm(self) -> float:
        return _norm(self.gradients)


class _Comparison:
    """What all models of a run share."""

    def __init__(self, spec: DeviationSpec, batches: Sequence[Batch], plan: EpochPlan) -> None:
        self._config = spec.config
        self._batches = batches
        self._max_length = max(length for _, length in plan.shapes)
        self._bounds = packed_bounds(plan, spec.config.batching)
        fp32 = _with(spec.config, PrecisionConfig())
        self._device: Device = open_device(fp32, spec.device_id)
        run_op_by_op()
        self._fp32: _Computed | None = None

    def reference(self) -> Reference:
        """Compute in fp32.

        Raises:
            BadInputError: the batches hold no label.
            DivergedError: fp32 itself gives no numbers.
        """
        label_tokens = sum(batch.label_tokens for batch in self._batches)
        if not label_tokens:
            raise BadInputError(
                "the compared batches hold no label", fix="compare more batches, or mend the data"
            )
        fp32 = self._compute(PrecisionConfig())
        if fp32.num_nonfinite_losses or fp32.num_nonfinite_gradients:
            raise DivergedError("fp32 itself gives a loss or a gradient that is not a number")
        self._fp32 = fp32
        return Reference(
            loss=sum(fp32.losses) / label_tokens,
            gradient_norm=fp32.gradient_norm,
            num_gradients=sum(part.size for part in fp32.gradients),
            label_tokens=label_tokens,
            batches=tuple(batch.shape for batch in self._batches),
        )

    def deviation(self, precision: PrecisionConfig) -> Deviation:
        """Compute in another precision, after the reference; a failure is a value."""
        assert self._fp32 is not None
        try:
            check_precision(precision, self._device.name)
            found = self._compute(precision)
        except Exception as error:
            status, reason = failure_of(error)
            return Deviation(precision=precision, status=status, reason=reason)
        return _difference(precision, found, self._fp32)

    def _compute(self, precision: PrecisionConfig) -> _Computed:
        config = _with(self._config, precision)
        engine = Engine(config, self._device, self._max_length, bounds=self._bounds)
        found = self._run(engine, self._batches)
        if found.may_need_lower_scale and self._is_cured_by_scale(engine):
            for scale in _lower_scales(precision.loss_scale):
                engine.loss_scale = LossScale(scale=scale)
                found = self._run(engine, self._batches)
                if not found.num_nonfinite_gradients:
                    break
        # Its weights and buffers go before the next ones come.
        del engine
        gc.collect()
        return found

    def _is_cured_by_scale(self, engine: Engine) -> bool:
        """Whether the smallest batch has a gradient at the lowest scale."""
        engine.loss_scale = LossScale(scale=LEAST_TRIED_SCALE)
        smallest = min(self._batches, key=lambda batch: batch.padded_tokens)
        return not self._run(engine, [smallest]).num_nonfinite_gradients

    def _run(self, engine: Engine, batches: Sequence[Batch]) -> _Computed:
        engine.clear_gradients()
        losses = [engine.run_step(batch) for batch in batches]
        scale = engine.loss_scale.scale if engine.loss_scale else None
        return _Computed(losses=losses, gradients=engine.read_gradients(), loss_scale=scale)


def _lower_scales(scale: float) -> Iterator[float]:
    while scale > LEAST_TRIED_SCALE:
        scale = max(LEAST_TRIED_SCALE, scale / SCALE_DIVISOR)
        yield scale


def _compare(folder: TrialFolder) -> None:
    spec = parse_json(DeviationSpec, folder.spec.read_text(encoding="utf-8"))
    config = spec.config
    dataset = open_mindrecord(config.data.path)
    every_row = Lengths(tokens=np.load(spec.lengths_file), fingerprint=dataset.fingerprint)
    plan = plan_batches(training_part(every_row, config.evaluation), config)
    batches = list(read_batches(dataset, choose_steps(plan, spec.num_batches), config))
    comparison = _Comparison(spec, batches, plan)
    with folder.measured.open("a", encoding="utf-8") as file:

        def keep(line: str) -> None:
            file.write(line + "\n")
            file.flush()

        keep(to_json(comparison.reference()))
        for precision in spec.variants:
            keep(to_json(comparison.deviation(precision)))


def _difference(precision: PrecisionConfig, found: _Computed, fp32: _Computed) -> Deviation:
    loss_deviation = gradient_deviation = None
    if not found.num_nonfinite_losses:
        loss, expected = sum(found.losses), sum(fp32.losses)
        loss_deviation = abs(loss - expected) / abs(expected)
    if not found.num_nonfinite_gradients:
        differences = [
            part.astype(np.float64) - expected
            for part, expected in zip(found.gradients, fp32.gradients, strict=True)
        ]
        gradient_deviation = _norm(differences) / fp32.gradient_norm
    return Deviation(
        precision=precision,
        loss_deviation=loss_deviation,
        gradient_deviation=gradient_deviation,
        num_nonfinite_gradients=found.num_nonfinite_gradients,
        num_nonfinite_losses=found.num_nonfinite_losses,
        loss_scale=found.loss_scale,
    )


def _norm(parts: Sequence[NDArray[Any]]) -> float:
    return float(sum((part.astype(np.float64) ** 2).sum() for part in parts) ** 0.5)


def _with(config: TrainConfig, precision: PrecisionConfig) -> TrainConfig:
    graph = config.graph
    if graph.attention == "flash":
        # It computes in no fp32, as the reference does; auto takes it for the others.
        graph = graph.model_copy(update={"attention": "auto"})
    return config.model_copy(update={"precision": precision, "graph": graph})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a run in lower precision computes otherwise than one in fp32: question and answer.

A deviation run is a process of its own, as a trial is, with the same files in its folder:
spec.json, measured.jsonl (a Reference, then a Deviation for each variant), result.json. However
it ends, the answer is a DeviationResult: what was measured before a failure is kept, and the
variant that was running when the process died gets the status.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

from tuner.config.schema import PrecisionConfig, TrainConfig
from tuner.trial.folder import TrialFolder
from tuner.trial.record import Status, UnreadableRecordError, parse_json


@dataclass(frozen=True, kw_only=True)
class DeviationSpec:
    """What to compare.

    Attributes:
        config: A whole config, boundaries resolved; its precision does not matter.
        lengths_file: `.npy` of the length of every row, int32 [N].
        variants: Precisions to compare with fp32, in this order; at least one.
        num_batches: Real batches that each computes, >= 1, of the largest and of the smallest
            shape of the plan in turn, largest first; fewer where the epoch has no more of these.
        time_limit_s: Wall seconds of the whole process, > 0.
        memory_limit_bytes: Resident set of its process at most, > 0.
        device_id: Of several devices the one to run on.
    """

    config: TrainConfig
    lengths_file: str
    variants: tuple[PrecisionConfig, ...]
    num_batches: int
    time_limit_s: float
    memory_limit_bytes: int
    device_id: int = 0


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What fp32 computes on the batches, with the initial weights.

    Attributes:
        loss: Mean over the labels of all batches.
        gradient_norm: Of the loss summed over all labels.
        num_gradients: Elements of the gradient, over all parameters.
        label_tokens: Labels of all batches.
        batches: (B, L) of each, in order.
    """

    loss: float
    gradient_norm: float
    num_gradients: int
    label_tokens: int
    batches: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far one precision is from fp32, on the same batches with the same weights.

    Attributes:
        precision: The variant.
        status: ok if it was measured, whatever the figures; else how it failed, and there are no
            figures.
        reason: Empty for ok, else one line.
        loss_deviation: |loss - reference| / |reference|; None if a loss is not a number, or if
            it was not measured.
        gradient_deviation: |g - reference| / |reference| in the Euclidean norm over all
            parameters, in float64; None if an element is not a number, or if it was not measured.
        num_nonfinite_gradients: Elements of the gradient that are infinite or not numbers.
        num_nonfinite_losses: Batches whose loss is.
        loss_scale: Of fp16, with which the gradient was computed: the variant's own, or if that
            overflowed a lower one, as dynamic loss scaling comes to, where it helps; else None.
    """

    precision: PrecisionConfig
    status: Status = "ok"
    reason: str = ""
    loss_deviation: float | None = None
    gradient_deviation: float | None = None
    num_nonfinite_gradients: int = 0
    num_nonfinite_losses: int = 0
    loss_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class DeviationResult:
    """What came of a deviation run.

    Attributes:
        status: Of the process; ok if it went through all variants, failed ones included.
        reason: Empty for ok, else one line.
        reference: None if fp32 did not get that far.
        deviations: In the order of the variants; the last one may be that which the process died
            of. Those after it were not tried.
        wall_s: Wall seconds of the process.
    """

    status: Status
    reason: str = ""
    reference: Reference | None = None
    deviations: tuple[Deviation, ...] = ()
    wall_s: float = 0.0


def read_deviation_result(
    folder: TrialFolder, spec: DeviationSpec, death: tuple[Status, str], wall_s: float
) -> DeviationResult:
    """The answer of a process that has ended.

    Args:
        folder: Its files.
        spec: What it was asked.
        death: Status and reason if it left no answer, as seen from outside.
        wall_s: Its wall seconds.
    """
    reference, deviations = _read_measured(folder)
    result = _read_end(folder)
    if result is None or (result.status == "ok" and len(deviations) < len(spec.variants)):
        result = DeviationResult(status=death[0], reason=death[1])
    running = spec.variants[len(deviations) : len(deviations) + 1]
    if result.status != "ok" and reference is not None and running:
        died = Deviation(precision=running[0], status=result.status, reason=result.reason)
        deviations = (*deviations, died)
    return dataclasses.replace(result, reference=reference, deviations=deviations, wall_s=wall_s)


def _read_end(folder: TrialFolder) -> DeviationResult | None:
    try:
        return parse_json(DeviationResult, folder.result.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, UnreadableRecordError):
        return None


def _read_measured(folder: TrialFolder) -> tuple[Reference | None, tuple[Deviation, ...]]:
    """The lines that are whole; without the reference there is none."""
    try:
        lines = folder.measured.read_text(encoding="utf-8", errors="replace").splitlines()
        reference = parse_json(Reference, lines[0])
    except (OSError, IndexError, UnreadableRecordError):
        return None, ()
    deviations = []
    for line in lines[1:]:
        # A last line cut off by a kill is no deviation.
        with contextlib.suppress(UnreadableRecordError):
            deviations.append(parse_json(Deviation, line))
    return reference, tuple(deviations)

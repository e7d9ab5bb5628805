"""The process that tries one capability: `python -m tuner.diagnose.capability_worker FOLDER`.

Like a trial, but on random ids, so that it needs no data: reads spec.json, writes result.json.
`--probe DEVICE` is answered as a trial answers it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tuner.config.codec import write_text
from tuner.simulate.measurement import ShapeMeasurement
from tuner.train.device import memory_bytes, open_device, peak_memory_bytes
from tuner.train.engine import Engine
from tuner.train.loader import Batch
from tuner.trial import worker
from tuner.trial.folder import TrialFolder
from tuner.trial.measure import Steady, measure_shapes, measure_update
from tuner.trial.record import TrialResult, TrialSpec, parse_json, to_json
from tuner.trial.worker import end_with_parent, failure_of


def main(arguments: list[str]) -> int:
    """Try one, or the probe; returns the exit code."""
    if arguments[0] == "--probe":
        return worker.main(arguments)
    end_with_parent()
    folder = TrialFolder(Path(arguments[0]))
    try:
        result = _measure(parse_json(TrialSpec, folder.spec.read_text(encoding="utf-8")))
    except Exception as error:
        status, reason = failure_of(error)
        result = TrialResult(status=status, reason=reason)
    write_text(folder.result, to_json(result))
    return 0


def _measure(spec: TrialSpec) -> TrialResult:
    device = open_device(spec.config, spec.device_id)
    engine = Engine(spec.config, device, max(length for _, length in spec.shapes))
    base_bytes = memory_bytes(device)
    batches = [Batch.full(shape, spec.config) for shape in spec.shapes]
    shapes = measure_shapes(engine, batches, Steady(steps=spec.timed_steps), _keep_nothing)
    return TrialResult(
        status="ok",
        shapes=shapes,
        update=measure_update(engine, spec.config.optimizer.learning_rate, spec.timed_steps),
        base_bytes=base_bytes,
        peak_bytes=peak_memory_bytes(device),
        memory_kind=device.memory_kind,
    )


def _keep_nothing(measurement: ShapeMeasurement) -> None:
    """A capability that fails half way is not there."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

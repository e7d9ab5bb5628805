"""The process of a trial: `python -m tuner.trial.worker FOLDER`, or `--probe DEVICE`.

Reads spec.json, writes measured.jsonl as it goes and result.json at the end. What it cannot catch
(a kill, a crash below Python) the runner sees from outside.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np

from tuner.batching.packed_bounds import packed_bounds
from tuner.batching.plan import plan_batches
from tuner.config.codec import write_text
from tuner.config.schema import DataConfig, ModelConfig, TrainConfig
from tuner.data.held_out import training_part
from tuner.data.lengths import Lengths
from tuner.data.mindrecord import open_mindrecord
from tuner.errors import OUT_OF_MEMORY_TEXT, BadInputError
from tuner.simulate.measurement import ShapeMeasurement
from tuner.train.device import (
    device_model,
    installed_versions,
    memory_bytes,
    open_device,
    peak_memory_bytes,
)
from tuner.train.engine import Engine
from tuner.trial.folder import TrialFolder
from tuner.trial.measure import (
    DivergedError,
    Steady,
    measure_shapes,
    measure_update,
    read_one_batch_each,
)
from tuner.trial.record import (
    Installation,
    Refusal,
    Status,
    TrialResult,
    TrialSpec,
    parse_json,
    to_json,
)
from tuner.trial.runner import PARENT_VARIABLE
from tuner.trial.turns import Turns


def main(arguments: list[str]) -> int:
    """Run one trial or the probe; returns the exit code."""
    if arguments[0] == "--probe":
        print(to_json(_probe(arguments[1])), flush=True)
        return 0
    end_with_parent()
    folder = TrialFolder(Path(arguments[0]))
    result = _answer(folder)
    write_text(folder.result, to_json(result))
    return 0


def _probe(device: str) -> Installation | Refusal:
    config = TrainConfig(
        data=DataConfig(path=""),
        model=ModelConfig(vocab_size=1),
        device=device,  # type: ignore[arg-type]
    )
    try:
        device = open_device(config).name
    except BadInputError as error:
        return Refusal(problem=error.problem, fix=error.fix)
    return Installation(
        device=device, versions=installed_versions(), device_model=device_model(device)
    )


def _answer(folder: TrialFolder) -> TrialResult:
    """Measure; every exception becomes a result."""
    try:
        return _measure(folder)
    except Exception as error:
        status, reason = failure_of(error)
        return TrialResult(status=status, reason=reason)


def failure_of(error: Exception) -> tuple[Status, str]:
    """Status and reason of an exception that is being handled.

    The traceback of one that is not expected goes to standard error.
    """
    if isinstance(error, BadInputError):
        return "refused", str(error)
    if isinstance(error, DivergedError):
        return "diverged", str(error)
    traceback.print_exc()
    text = f"{type(error).__name__}: {error}"
    first_line = next(line for line in text.splitlines() if line.strip())[:300]
    is_memory = isinstance(error, MemoryError) or re.search(OUT_OF_MEMORY_TEXT, text)
    return "oom" if is_memory else "crashed", first_line


def _measure(folder: TrialFolder) -> TrialResult:
    spec = parse_json(TrialSpec, folder.spec.read_text(encoding="utf-8"))
    config = spec.config
    dataset = open_mindrecord(config.data.path)
    every_row = Lengths(tokens=np.load(spec.lengths_file), fingerprint=dataset.fingerprint)
    plan = plan_batches(training_part(every_row, config.evaluation), config)
    batches = read_one_batch_each(dataset, plan, spec.shapes, config)
    device = open_device(config, spec.device_id)
    longest = max(length for _, length in (*plan.shapes, *spec.shapes))
    engine = Engine(config, device, longest, bounds=packed_bounds(plan, config.batching))
    base_bytes = memory_bytes(device)
    with folder.measured.open("a", encoding="utf-8") as file:

        def keep(measurement: ShapeMeasurement) -> None:
            file.write(to_json(measurement) + "\n")
            file.flush()

        turns = Turns(Path(spec.turns_file) if spec.turns_file else None, spec.turn_s)
        steady = Steady(steps=spec.timed_steps, seconds=spec.timed_s, turns=turns)
        measured = measure_shapes(engine, batches, steady, keep)
    # In the last turn, which ends with the process.
    update = measure_update(engine, config.optimizer.learning_rate, spec.timed_steps)
    return TrialResult(
        status="ok",
        shapes=measured,
        update=update,
        base_bytes=base_bytes,
        peak_bytes=peak_memory_bytes(device),
        memory_kind=device.memory_kind,
    )


def end_with_parent() -> None:
    """End this process when the tuner is gone: a killed tuner must leave no trial behind."""
    parent = int(os.environ.get(PARENT_VARIABLE, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

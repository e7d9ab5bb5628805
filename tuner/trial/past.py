"""What the trials of an earlier study measured, for estimates without a trial of their own."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict

from tuner.batching.grouping import Shape
from tuner.errors import BadInputError
from tuner.simulate.cost import CostModel, fit_cost_model
from tuner.simulate.estimate import ShapeMeasurement
from tuner.trial.folder import StudyFolder, TrialFolder
from tuner.trial.record import TrialResult, TrialSpec, parse_json


def measured_cost_model(study: StudyFolder) -> CostModel:
    """Costs of static graphs, fitted to a study's measurements.

    A shape that several trials measured counts with its median. Where trials differ in jit level,
    the level with the most measured shapes is taken.

    Args:
        study: The folder that `varseq-tune` wrote.

    Raises:
        BadInputError: no trial there measured a static graph.
    """
    found: dict[str, list[ShapeMeasurement]] = defaultdict(list)
    num_trials: Counter[str] = Counter()
    for path in sorted(study.trials.glob("*")):
        level, measurements = _read(TrialFolder(path))
        if level is not None and measurements:
            found[level].extend(measurements)
            num_trials[level] += 1
    if not found:
        raise BadInputError(
            f"{study.path} holds no trial that measured a static graph",
            fix="name the --out folder of a finished `varseq-tune`, or leave --study out",
        )
    level = max(found, key=lambda name: len(found[name]))
    steps: dict[Shape, list[float]] = defaultdict(list)
    compiles: dict[Shape, list[float]] = defaultdict(list)
    for item in found[level]:
        steps[item.shape].append(item.step_s)
        compiles[item.shape].append(item.compile_s)
    return fit_cost_model(
        {shape: statistics.median(seconds) for shape, seconds in steps.items()},
        {shape: statistics.median(seconds) for shape, seconds in compiles.items()},
        f"measured by {_trials(num_trials[level])} in {study.path}",
    )


def _trials(count: int) -> str:
    return "1 trial" if count == 1 else f"{count} trials"


def _read(trial: TrialFolder) -> tuple[str | None, tuple[ShapeMeasurement, ...]]:
    """The jit level and what was measured, or None of a trial that is not static or not whole."""
    try:
        spec = parse_json(TrialSpec, trial.spec.read_text(encoding="utf-8"))
        result = parse_json(TrialResult, trial.result.read_text(encoding="utf-8"))
    except (OSError, ValueError, BadInputError):
        return None, ()
    if spec.config.graph.mode != "static":
        return None, ()
    return spec.config.graph.jit_level, result.shapes

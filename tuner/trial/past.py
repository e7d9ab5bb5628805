"""What trials measured, read back: of one that failed, and of a whole earlier study."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter, defaultdict

from tuner.batching.grouping import Shape
from tuner.config.schema import GraphConfig
from tuner.errors import BadInputError
from tuner.simulate.cost import CostModel, fit_cost_model
from tuner.simulate.estimate import ShapeMeasurement
from tuner.trial.folder import StudyFolder, TrialFolder
from tuner.trial.record import TrialSpec, UnreadableRecordError, parse_json


def read_measured(folder: TrialFolder) -> tuple[ShapeMeasurement, ...]:
    """All that a trial measured, whether it ended well or not."""
    if not folder.measured.exists():
        return ()
    measured = []
    for line in folder.measured.read_text(encoding="utf-8", errors="replace").splitlines():
        # A last line cut off by a kill is no measurement.
        with contextlib.suppress(UnreadableRecordError):
            measured.append(parse_json(ShapeMeasurement, line))
    return tuple(measured)


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
        folder = TrialFolder(path)
        graph, measurements = _graph_of(folder), read_measured(folder)
        if graph is not None and graph.mode == "static" and measurements:
            found[graph.jit_level].extend(measurements)
            num_trials[graph.jit_level] += 1
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


def _graph_of(folder: TrialFolder) -> GraphConfig | None:
    """The graph that a trial was asked to measure; None if that cannot be read."""
    try:
        return parse_json(TrialSpec, folder.spec.read_text(encoding="utf-8")).config.graph
    except (OSError, UnicodeDecodeError, UnreadableRecordError):
        return None

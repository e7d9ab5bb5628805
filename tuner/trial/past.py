"""What a trial measured before it failed, read back from its folder."""

from __future__ import annotations

from tuner.batching.grouping import Shape
from tuner.simulate.measurement import ShapeMeasurement
from tuner.trial.folder import TrialFolder
from tuner.trial.record import UnreadableRecordError, is_sound_shape, parse_json


def read_measured(folder: TrialFolder) -> tuple[ShapeMeasurement, ...]:
    """All that a trial measured, whether it ended well or not.

    A shape that was told again has its last figures, at the place of its first.
    """
    if not folder.measured.exists():
        return ()
    measured: dict[Shape, ShapeMeasurement] = {}
    for line in folder.measured.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            item = parse_json(ShapeMeasurement, line)
        except UnreadableRecordError:
            # A last line cut off by a kill is no measurement.
            continue
        if is_sound_shape(item):
            measured[item.shape] = item
    return tuple(measured.values())

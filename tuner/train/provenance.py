"""Comparing a tuned config with the world it is about to run in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

from tuner.batching.grouping import Shape
from tuner.config.codec import to_plain
from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.train.checkpoint import TrainState
from tuner.train.device import installed_versions

DECIDING_SECTIONS = (
    "data",
    "batching",
    "graph",
    "precision",
    "model",
    "optimizer",
    "schedule",
    "train",
)
# What may change between a run and its resumption without changing the steps already planned.
FREE_FIELDS = {
    "data": {"path"},
    "train": {"epochs", "max_steps", "out", "checkpoint_every_steps", "keep_last"},
}


def check_provenance(
    config: TrainConfig,
    *,
    data_fingerprint: str,
    shapes: Sequence[Shape],
    device: str,
    notice: Callable[[str], None],
) -> None:
    """Refuse other data or shapes than were tuned; warn about another device or version.

    Args:
        config: With or without provenance; without, nothing is compared.
        data_fingerprint: Of the set that is there now.
        shapes: Of the plan that is about to run.
        device: Name of the opened device.
        notice: Told every difference that is only warned about.

    Raises:
        BadInputError: the data or the planned shapes differ.
    """
    tuned = config.provenance
    if tuned is None:
        return
    if tuned.data_fingerprint != data_fingerprint:
        raise BadInputError(
            f"{config.data.path} is not the data this config was tuned on (fingerprint "
            f"{data_fingerprint[:12]}, tuned on {tuned.data_fingerprint[:12]})",
            fix="run varseq-tune on it, or set provenance to null to train all the same",
        )
    if set(tuned.shapes) != set(shapes):
        raise BadInputError(
            f"the plan has other shapes than were tuned ({_listed(shapes)} instead of "
            f"{_listed(tuned.shapes)})",
            fix="undo the change to data or batching, or set provenance to null",
        )
    if tuned.device != device:
        notice(
            f"tuned on {tuned.device}, running on {device}: timings do not carry over; "
            "tune again on this device"
        )
    for name, version in installed_versions().items():
        before = tuned.versions.get(name)
        if before is not None and before != version:
            notice(f"tuned with {name} {before}, running with {version}")


def config_fingerprint(config: TrainConfig) -> str:
    """sha256 of every field that decides which steps a run takes and what they compute."""
    plain = to_plain(config)
    deciding = {
        section: {
            name: value
            for name, value in plain[section].items()
            if name not in FREE_FIELDS.get(section, set())
        }
        for section in DECIDING_SECTIONS
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def check_resumable(state: TrainState, config: TrainConfig, data_fingerprint: str) -> None:
    """Refuse to go on with other data or another config than the checkpoint's.

    Raises:
        BadInputError: either differs.
    """
    if state.data_fingerprint != data_fingerprint:
        raise BadInputError(
            f"the checkpoint belongs to other data (fingerprint {state.data_fingerprint[:12]}, "
            f"{config.data.path} has {data_fingerprint[:12]})",
            fix="give the same data, or another train.out to start over",
        )
    fingerprint = config_fingerprint(config)
    if state.config_fingerprint != fingerprint:
        raise BadInputError(
            f"the checkpoint belongs to another config (fingerprint "
            f"{state.config_fingerprint[:12]}, this one has {fingerprint[:12]})",
            fix="give the same config; only epochs, max_steps and output fields may change",
        )


def _listed(shapes: Sequence[Shape]) -> str:
    names = [f"{size}x{length}" for size, length in shapes]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

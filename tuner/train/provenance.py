"""Comparing a tuned config with the world it is about to run in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuner.batching.grouping import Shape
from tuner.config.codec import to_plain
from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.train.device import installed_versions
from tuner.train.source import source_fingerprint
from tuner.train.state import TrainState

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
    "data": {"path", "read_workers", "read_ahead_batches"},
    "graph": {"compile_cache"},
    "model": {"source"},
    "optimizer": {"sharded"},
    "train": {
        "epochs",
        "max_steps",
        "out",
        "checkpoint_every_steps",
        "keep_last",
        "keep_best",
        "async_checkpoint",
        "tensorboard",
    },
}


def is_other_data(config: TrainConfig, data_fingerprint: str) -> bool:
    """Whether a config was tuned on other data than is there now."""
    tuned = config.provenance
    return tuned is not None and tuned.data_fingerprint != data_fingerprint


def other_data_refused(config: TrainConfig, data_fingerprint: str) -> BadInputError:
    """The refusal of other data than a config was tuned on."""
    tuned = config.provenance
    before = tuned.data_fingerprint[:12] if tuned else "nothing"
    return BadInputError(
        f"{config.data.path} is not the data this config was tuned on (fingerprint "
        f"{data_fingerprint[:12]}, tuned on {before})",
        fix="run varseq-tune on it, or give --accept-data to train with the tuned shapes and see "
        "what tuning again would gain",
    )


def check_provenance(
    config: TrainConfig,
    *,
    shapes: Sequence[Shape],
    accepts_fewer: bool,
    device: str,
    notice: Callable[[str], None],
) -> None:
    """Refuse other shapes than were tuned; warn about another device or version.

    Args:
        config: With or without provenance; without, nothing is compared.
        shapes: Of the plan that is about to run.
        accepts_fewer: Whether some of the tuned shapes may be missing, as other data has them.
        device: Name of the opened device.
        notice: Told every difference that is only warned about.

    Raises:
        BadInputError: the planned shapes differ.
    """
    tuned = config.provenance
    if tuned is None:
        return
    is_missing = set(tuned.shapes) != set(shapes) and not accepts_fewer
    if is_missing or not set(shapes) <= set(tuned.shapes):
        raise BadInputError(
            f"the plan has other shapes than were tuned ({_listed(shapes)} instead of "
            f"{_listed(tuned.shapes)})",
            fix="undo the change to data, batching or evaluation, or set provenance to null",
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


def deciding_fields(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Every field that decides which steps a run takes and what they compute, as plain data.

    Raises:
        BadInputError: the weights that adapters are trained on cannot be read.
    """
    plain = to_plain(config)
    sections = {
        section: {
            name: value
            for name, value in plain[section].items()
            if name not in FREE_FIELDS.get(section, set())
        }
        for section in DECIDING_SECTIONS
    }
    held_out = config.evaluation
    if held_out is not None and held_out.fraction is not None:
        # They decide which rows are trained on.
        sections["evaluation"] = {"fraction": held_out.fraction, "seed": held_out.seed}
    # Where the first weights came from says nothing later; frozen ones are read again.
    if config.model.source is not None and config.model.lora is not None:
        sections["model"]["source_fingerprint"] = source_fingerprint(config.model.source)
    return sections


def planned_world_size(saved: TrainState | None, num_ranks: int) -> int:
    """Ranks that the plan of a run is for: all that train it, or more where fewer go on with it.

    Who is batched with whom follows from that number, so a run keeps it. Fewer ranks that divide
    it take the batches of several each, in the same steps, shapes and updates.

    Args:
        saved: What the run goes on from; None: it starts.
        num_ranks: That train it now.

    Raises:
        BadInputError: they cannot share the batches of a step evenly.
    """
    if saved is None:
        return num_ranks
    if saved.world_size % num_ranks:
        fitting = [n for n in range(1, saved.world_size + 1) if not saved.world_size % n]
        numbers = ", ".join(map(str, fitting))
        raise BadInputError(
            f"the checkpoint belongs to a run on {saved.world_size} devices, this one has "
            f"{num_ranks}, which cannot share its batches evenly",
            fix=f"go on with {numbers if len(fitting) < 2 else f'one of {numbers}'}, or give "
            "another train.out to start over",
        )
    return saved.world_size


def check_resumable(saved: TrainState, now: TrainState, data_path: str) -> None:
    """Refuse to go on with other data, config or plan than the checkpoint's.

    Args:
        saved: The checkpoint's.
        now: As a new run of this config on this data would start.
        data_path: Of the data, for the message.

    Raises:
        BadInputError: one differs; says which fields.
    """
    if saved.data_fingerprint != now.data_fingerprint:
        raise BadInputError(
            f"the checkpoint belongs to other data (fingerprint {saved.data_fingerprint[:12]}, "
            f"{data_path} has {now.data_fingerprint[:12]})",
            fix="give the same data, or another train.out to start over",
        )
    differences = _differences(saved.config, now.config)
    if differences:
        more = f" and {len(differences) - 3} more fields" if len(differences) > 3 else ""
        raise BadInputError(
            f"the checkpoint belongs to another config: {'; '.join(differences[:3])}{more}",
            fix="give the same config; epochs, max_steps and what is only written may change",
        )
    if saved.plan_fingerprint != now.plan_fingerprint:
        raise BadInputError(
            "the checkpoint belongs to another plan of the same data and config (fingerprint "
            f"{saved.plan_fingerprint[:12]}, now {now.plan_fingerprint[:12]})",
            fix="go on with the version of varseq-tuner that began the run, or start over",
        )


def _differences(
    saved: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """A phrase for each field that differs, in the order of the config."""
    phrases = []
    for section in dict.fromkeys([*now, *saved]):
        left, right = saved.get(section, {}), now.get(section, {})
        phrases += [
            f"{section}.{name} {_shown(right, name)}, the checkpoint has {_shown(left, name)}"
            for name in dict.fromkeys([*right, *left])
            if left.get(name, _ABSENT) != right.get(name, _ABSENT)
        ]
    return phrases


_ABSENT = object()


def _shown(section: Mapping[str, Any], name: str) -> str:
    if name not in section:
        return "not set"
    text = json.dumps(section[name])
    return text if len(text) <= 60 else f"{text[:57]}..."


def _listed(shapes: Sequence[Shape]) -> str:
    names = [f"{size}x{length}" for size, length in shapes]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

"""Before the first step: whether all ranks are about to train the same thing.

Each rank writes what it is going to do to a file. When they have met, each reads the files of all,
so that a difference ends the run before anything is compiled. After the warm-up the hashes go
through the sum that the gradients take, which decides it whatever became of the files, and so do
checksums of the weights.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tuner.config.codec import to_plain
from tuner.errors import BadInputError
from tuner.train.device import Device, cann_version, installed_versions
from tuner.train.engine import Engine
from tuner.train.provenance import deciding_fields
from tuner.train.rank_files import RankFolder
from tuner.train.ranks import Ranks
from tuner.train.run_inputs import RunInputs
from tuner.train.source import source_fingerprint
from tuner.train.state import TrainState

FIX = "give all ranks the same data, config and versions"

FREE_FIELDS = ("evaluation.path",)
"""Fields that machines may have each their own of."""


def values_of(inputs: RunInputs, device: Device, saved: TrainState | None) -> dict[str, Any]:
    """What a rank is going to train, by name, as JSON can hold it.

    Args:
        inputs: Rows and plan.
        device: The opened device.
        saved: What it goes on from; None: it starts.
    """
    plain = {**deciding_fields(inputs.config), "evaluation": to_plain(inputs.config)["evaluation"]}
    config = {name: value for name, value in _leaves("", plain) if name not in FREE_FIELDS}
    loop = {
        f"train.{name}": getattr(inputs.config.train, name)
        for name in ("epochs", "max_steps", "checkpoint_every_steps", "keep_best")
    }
    loop["optimizer.sharded"] = inputs.config.optimizer.sharded
    evaluated, source = inputs.evaluation, inputs.config.model.source
    values = {
        "data": inputs.dataset.fingerprint,
        "config": {**config, **loop},
        "plan": inputs.plan.fingerprint,
        "shapes": [list(shape) for shape in inputs.plan.shapes],
        "first weights": source_fingerprint(source) if source and saved is None else "",
        "evaluated data": evaluated.dataset.fingerprint if evaluated else "",
        "versions": {**installed_versions(), "cann": cann_version(), "device": device.name},
        "steps done": saved.steps if saved else 0,
    }
    # Through JSON, so that it equals what is read back.
    return dict(json.loads(json.dumps(values)))


def check_files(folder: RankFolder, world_size: int) -> None:
    """Compare what the ranks have written, as far as it is there.

    Raises:
        BadInputError: a rank differs; names it and both values.
    """
    first = folder.read_values(0)
    for rank in range(1, world_size):
        theirs = folder.read_values(rank)
        if first is not None and theirs is not None and theirs != first:
            raise _refusal(rank, first, theirs)


def check_agreement(ranks: Ranks, values: Mapping[str, Any], folder: RankFolder) -> None:
    """Compare hashes of all ranks; all of them call it.

    Args:
        ranks: Of the run.
        values: Of this rank; `values_of` made them.
        folder: With the values of all, for the message.

    Raises:
        BadInputError: a rank differs; names it and, where the files can be read, both values.
    """
    found = ranks.gather(_pieces(values))
    for rank in range(1, ranks.world.size):
        if np.array_equal(found[rank], found[0]):
            continue
        first, theirs = folder.read_values(0), folder.read_values(rank)
        if first is not None and theirs is not None and first != theirs:
            raise _refusal(rank, first, theirs)
        raise BadInputError(f"rank {rank} is about to train something else than rank 0", fix=FIX)


def check_weights(ranks: Ranks, engine: Engine) -> None:
    """Compare the weights that the first step starts from; all ranks call it.

    Raises:
        BadInputError: a rank has others.
    """
    checksum = 0
    for weight in engine.weights:
        checksum = zlib.crc32(weight.asnumpy().tobytes(), checksum)
    found = ranks.gather([float(checksum)])[:, 0]
    for rank in np.flatnonzero(found != found[0]).tolist():
        raise BadInputError(
            f"rank {rank} starts from other weights than rank 0",
            fix="give all ranks the same model.source and the same train.out",
        )


def _pieces(values: Mapping[str, Any]) -> list[float]:
    """A hash as numbers of 16 bits, which float32 holds exactly."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()
    return [float(piece) for piece in np.frombuffer(digest, dtype="<u2")]


def _refusal(rank: int, first: Mapping[str, Any], theirs: Mapping[str, Any]) -> BadInputError:
    left, right = dict(_leaves("", first)), dict(_leaves("", theirs))
    name = next(name for name in {**left, **right} if left.get(name, ...) != right.get(name, ...))
    return BadInputError(
        f"rank {rank} differs from rank 0 in {name}: {_shown(right, name)} there, "
        f"{_shown(left, name)} on rank 0",
        fix=FIX,
    )


def _leaves(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        dotted = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping):
            yield from _leaves(dotted, value)
        else:
            yield dotted, value


def _shown(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "not set"
    value = values[name]
    text = value[:12] if isinstance(value, str) and len(value) == 64 else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

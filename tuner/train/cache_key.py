"""What decides the graphs of a run: the key of its compile cache.

MindSpore looks at nothing but the order of compiles and the sources of the entry script, so all
else that changes a graph is gathered here: any difference gives another folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tuner
from tuner.batching.grouping import Shape
from tuner.config.codec import to_plain
from tuner.config.schema import TrainConfig
from tuner.train.device import Device, cann_version, installed_versions
from tuner.train.loader import Batch

# Fields of train that a graph may hold.
TRAIN_FIELDS = ("clip_norm", "clip_quantile", "clip_window", "seed")


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """Everything that changes a graph, or the values it is checked with.

    Attributes:
        parts: By name, as JSON can hold it; for people too.
    """

    parts: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """sha256 of the parts."""
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()


def cache_key(
    config: TrainConfig, device: Device, shapes: Sequence[Shape], num_lengths: int = 0
) -> CacheKey:
    """The key of a run's graphs. Call it when the model is built, so that a factory is loaded.

    Args:
        config: The whole config.
        device: The opened device.
        shapes: (B, L) of the graphs of a step, in the order in which they are compiled.
        num_lengths: Cumulative lengths that a step takes beside.
    """
    plain = to_plain(config)
    plain["graph"].pop("compile_cache")
    parts = {
        "shapes": [list(shape) for shape in shapes],
        **{section: plain[section] for section in ("graph", "precision", "model", "optimizer")},
        "train": {name: plain["train"][name] for name in TRAIN_FIELDS},
        "strategy": config.batching.strategy,
        "num_inputs": len(Batch.empty((1, 1), config).arrays),
        "num_lengths": num_lengths,
        "versions": {**installed_versions(), "cann": cann_version()},
        "device": device.name,
        "world_size": os.environ.get("RANK_SIZE", "1"),
        "rank": os.environ.get("RANK_ID", "0"),
        "package_sources": sources_digest(Path(tuner.__file__).parent.rglob("*.py")),
        # MindSpore compares the sources that its imports reach, so it has to be the same one.
        "entry_script": os.path.realpath(sys.argv[0]) if sys.argv else "",
        "model_sources": sources_digest(_model_sources(config)),
    }
    # Through JSON, so that it equals what is read back.
    return CacheKey(parts=json.loads(json.dumps(parts)))


def sources_digest(paths: Iterable[Path]) -> str:
    """sha256 of files in the order of their paths; the paths themselves do not count."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _model_sources(config: TrainConfig) -> set[Path]:
    """Files outside of this package that the model follows from."""
    files: set[Path] = set()
    if config.model.source is not None:
        files.update(Path(config.model.source).glob("config.json"))
    if config.model.factory is not None:
        package = config.model.factory.partition(":")[0].partition(".")[0]
        files.update(_loaded_sources(package))
    return files


def _loaded_sources(package: str) -> Iterator[Path]:
    """Sources of the loaded modules that a package has, or that no installation put there.

    A factory may take layers from modules beside it, so its own file would not do.
    """
    places = [*site.getsitepackages(), site.getusersitepackages()]
    installed = tuple(map(os.path.realpath, [*places, sysconfig.get_path("stdlib")]))
    own = os.path.realpath(Path(tuner.__file__).parent)
    for name, module in list(sys.modules.items()):
        file = os.path.realpath(getattr(module, "__file__", None) or "")
        if not file.endswith(".py") or file.startswith(own):
            continue
        if name.partition(".")[0] == package or not file.startswith(installed):
            yield Path(file)

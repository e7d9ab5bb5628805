"""What a study is about and within which limits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner.config.codec import to_plain
from tuner.config.schema import TrainConfig
from tuner.simulate.cost import CostModel
from tuner.simulate.measurement import CostKey
from tuner.simulate.memory import MemoryCost
from tuner.study.base import TunedData
from tuner.study.space import SearchSpace
from tuner.trial.folder import StudyFolder
from tuner.trial.record import Installation

STUDY_NAME = "varseq-tune"


@dataclass(frozen=True, kw_only=True)
class StudySetup:
    """What a study is about and within which limits.

    Attributes:
        base: Config that the choices are written into.
        has_own_config: The base is the user's own, and a baseline.
        data: The data and its lengths.
        space: Fitted to the device.
        folder: Where everything goes.
        storage: Optuna's storage; None: the folder's own file.
        study_name: In that storage.
        installation: What trials run on.
        trials: Trials in all besides the baselines, finished ones of an earlier start and those
            of other tuners on the study included; >= 1.
        jobs: Trials at a time, each on a device of its own; >= 1.
        time_limit_s: Of one trial.
        deadline_s: Reading of time.monotonic() after which nothing new is started; None: no limit.
        memory_limit_bytes: Of one trial.
        confirm_rounds: Times that the best and the baselines are measured again; 0: not at all.
        confirm_s: Seconds of steady steps of each in a round that are wanted, at least.
        seed: Of the sampler.
        models: Fits given from elsewhere, used where nothing was measured yet.
    """

    base: TrainConfig
    has_own_config: bool = False
    data: TunedData
    space: SearchSpace
    folder: StudyFolder
    storage: str | None = None
    study_name: str = STUDY_NAME
    installation: Installation
    trials: int
    jobs: int = 1
    time_limit_s: float
    deadline_s: float | None = None
    memory_limit_bytes: int
    confirm_rounds: int = 0
    confirm_s: float = 0.0
    seed: int
    models: Mapping[CostKey, tuple[CostModel, MemoryCost | None]] = field(default_factory=dict)

    @property
    def timed_s(self) -> float:
        """Seconds of steady steps of each in a round: compiles get half of the limit at least."""
        return min(self.confirm_s, self.time_limit_s / 2)


def study_identity(setup: StudySetup) -> dict[str, str]:
    """What a study must not change between two starts."""
    base = to_plain(setup.base)
    # Where the file lies may change; what is in it is the data's fingerprint.
    base["data"]["path"] = ""
    if base["evaluation"] is not None and base["evaluation"]["path"] is not None:
        base["evaluation"]["path"] = ""
    return {
        "data": setup.data.dataset.fingerprint[:16],
        "base config": fingerprint(base),
        "search space": fingerprint(to_plain(setup.space)),
        "device": setup.installation.device,
        "MindSpore version": setup.installation.versions.get("mindspore", "unknown"),
    }


def cost_identity(base_config: TrainConfig) -> str:
    """What a cost model belongs to: model and optimizer; not the data, not the device."""
    base = to_plain(base_config)
    return fingerprint({name: base[name] for name in ("model", "optimizer")})


def fingerprint(plain: Mapping[str, object]) -> str:
    """16 hex digits of plain data."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]

"""A study without a device: rows, a space and a folder, to be run with a FakeRunner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from strategies import make_config

from tuner.config.codec import parse_model
from tuner.config.schema import TrainConfig
from tuner.data.lengths import Lengths
from tuner.data.mindrecord import MindRecordSet
from tuner.study.base import TunedData
from tuner.study.result import StudyResult
from tuner.study.setup import StudySetup
from tuner.study.space import SearchSpace
from tuner.study.watch import StudyWatch
from tuner.trial.folder import StudyFolder
from tuner.trial.record import Installation

# One point: whatever a test does not ask for does not vary.
ONE_POINT: dict[str, Any] = {
    "strategy": ["fixed"],
    "num_buckets": {"low": 2, "high": 2},
    "align": [8],
    "longest_rows_per_batch": [4],
    "graph_mode": ["static"],
    "jit_level": ["O0"],
}


def make_space(**changes: Any) -> SearchSpace:
    """A space of a single point with some fields changed."""
    return parse_model(SearchSpace, {**ONE_POINT, **changes}, source="test")


def make_setup(
    folder: Path,
    tokens: Sequence[int],
    space: SearchSpace,
    *,
    base: Mapping[str, Any] | None = None,
    trials: int = 30,
    seed: int = 0,
    fingerprint: str = "f" * 64,
    device: str = "CPU",
    versions: Mapping[str, str] | None = None,
    **more: Any,
) -> StudySetup:
    """A study of rows of these lengths, in a folder that exists; more: any other field."""
    dataset = MindRecordSet(
        path="data.mindrecord",
        files=(),
        num_samples=len(tokens),
        rows_per_file=(),
        columns={"input_ids": "int32", "labels": "int32"},
        blob_columns=("input_ids", "labels"),
        index_columns=(),
        description={},
        fingerprint=fingerprint,
    )
    lengths = Lengths(tokens=np.array(tokens, np.int32), fingerprint=fingerprint)
    return StudySetup(
        base=make_config(base),
        data=TunedData(dataset=dataset, lengths=lengths, longest=max(tokens)),
        space=space,
        folder=StudyFolder(folder),
        installation=Installation(
            device=device, versions=dict(versions or {"mindspore": "2.10.0"})
        ),
        trials=trials,
        seed=seed,
        **{"time_limit_s": 60.0, "memory_limit_bytes": 10**9, **more},
    )


@dataclass
class Seen:
    """Everything that a study told its caller."""

    notices: list[str] = field(default_factory=list)
    started: list[TrainConfig] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Outcomes known at each call."""

    @property
    def watch(self) -> StudyWatch:
        def on_result(result: StudyResult) -> None:
            self.counts.append(len(result.outcomes))

        return StudyWatch(
            on_notice=self.notices.append,
            on_trial=lambda number, config: self.started.append(config),
            on_result=on_result,
        )

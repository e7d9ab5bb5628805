"""A machine that is well, and a runner that does as it is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tuner.diagnose.host import Host
from tuner.errors import BadInputError
from tuner.trial.fake import FakeRunner, HiddenCost
from tuner.trial.record import Installation

SPACIOUS = Host(
    num_cores=8,
    memory_bytes=64 * 10**9,
    free_memory_bytes=50 * 10**9,
    folder=Path("results"),
    free_disk_bytes=100 * 10**9,
    can_write=True,
    num_npus=8,
)


def host(**changes):
    return dataclasses.replace(SPACIOUS, **changes)


class Runner(FakeRunner):
    """The shipped fake, whose probe may refuse."""

    def __init__(self, fails=lambda config: None, refusal=None, versions=None):
        super().__init__(HiddenCost(), fails=fails)
        self._refusal = refusal
        self._versions = versions or {"mindspore": "2.10.0"}

    def probe(self, device):
        if self._refusal is not None:
            raise BadInputError(self._refusal, fix="install it")
        return Installation(device="CPU", versions=self._versions)

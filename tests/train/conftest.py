"""Fixtures of the trainer's tests."""

from __future__ import annotations

import os

import pytest
from strategies import make_config

from tuner.config.schema import TrainConfig

os.environ.setdefault("GLOG_v", "4")

from tiny_model import TINY_MODEL


@pytest.fixture(scope="session")
def tiny_config() -> TrainConfig:
    return make_config(TINY_MODEL)


@pytest.fixture(scope="session")
def device(tiny_config):
    from tuner.train.device import open_device

    return open_device(tiny_config)

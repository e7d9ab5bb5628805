"""Calls of flash attention as its NumPy model takes them."""

from __future__ import annotations

import dataclasses

import numpy as np

from tuner.train.flash_arguments import FlashCall


def as_arrays(call: FlashCall) -> dict[str, object]:
    """A call's arguments as the NumPy model takes them."""
    fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    return {
        name: value.asnumpy() if hasattr(value, "asnumpy") else value
        for name, value in fields.items()
    }


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)

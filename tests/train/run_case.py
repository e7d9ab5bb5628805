"""The config of a run that the command makes in seconds: two shapes, several steps a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 20


def small_run(folder: Path, out: str, max_steps: int) -> dict[str, Any]:
    """Of data.mindrecord in a folder, with ids below VOCAB; more epochs than max_steps needs."""
    return {
        "data": {"path": str(folder / "data.mindrecord")},
        "batching": {"num_buckets": 2, "tokens_per_batch": 128},
        "model": {
            "vocab_size": VOCAB, "width": 16, "num_layers": 1, "num_heads": 2,
            "num_kv_heads": 1, "ffn_width": 16,
        },
        "optimizer": {"learning_rate": 0.02},
        "train": {
            "epochs": 3, "max_steps": max_steps, "tokens_per_update": 150,
            "checkpoint_every_steps": 5, "out": str(folder / out),
        },
    }  # fmt: skip

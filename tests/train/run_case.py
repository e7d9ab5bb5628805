"""The config of a run that the command makes in seconds: two shapes, several steps a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tuner.data.mindrecord import MindRecordWriter

VOCAB = 20


def write_counting_rows(path: Path, num_rows: int, lengths: tuple[int, int], seed: int = 0) -> str:
    """Rows that count upwards modulo VOCAB, of lengths from the first up to below the second."""
    rng = np.random.default_rng(seed)
    with MindRecordWriter(path, description={"length_of": "input_ids"}) as writer:
        for _ in range(num_rows):
            ids = (rng.integers(VOCAB) + np.arange(rng.integers(*lengths))) % VOCAB
            ids = ids.astype(np.int32)
            writer.write([{"input_ids": ids, "labels": ids, "length": len(ids)}])
    return str(path)


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

"""What a checkpoint holds, read by its own bytes."""

from __future__ import annotations

from tuner.train.tensor_file import read_tensors


def parameter_bytes(run, steps):
    """Name -> bytes of everything in the checkpoint of a run's folder after so many steps."""
    file = run / "checkpoints" / f"step_{steps:08d}" / "parameters.safetensors"
    return {name: array.tobytes() for name, array in read_tensors(file).items()}

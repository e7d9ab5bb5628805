"""Records of steps as a loop makes them."""

from __future__ import annotations

from tuner.train.metrics import EvaluationRecord, LengthLoss, StepRecord


def record(step, shape=(2, 8), step_s=0.1, **changes):
    size, length = shape
    fields = {
        "step": step, "epoch": 0, "step_in_epoch": step - 1, "batch_size": size,
        "padded_length": length, "step_s": step_s, "data_wait_s": 0.0, "real_tokens": 10,
        "padded_tokens": size * length, "label_tokens": 8, "loss": 1.5, "updates": step,
        "grad_norm": 0.5, "learning_rate": 1e-3, "recompiles": 0, "memory_bytes": 1,
    }  # fmt: skip
    return StepRecord(**{**fields, **changes})


def evaluation_record(step, loss, perplexity):
    """Of two rows of one class."""
    figures = {"rows": 2, "label_tokens": 9, "loss": loss, "perplexity": perplexity}
    part = LengthLoss(up_to=64, **figures)
    return EvaluationRecord(step=step, seconds=0.5, by_length=(part,), **figures)

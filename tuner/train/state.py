"""Where a run stands, as a value and as the text that a checkpoint holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tuner.train.checksum import plain_sha256
from tuner.train.scaling import LossScale


@dataclass(frozen=True, kw_only=True)
class BestEvaluation:
    """The lowest loss of an evaluation so far.

    Attributes:
        loss: Mean over the evaluated labels.
        steps: Steps that were done then.
    """

    loss: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Where a run stands; with the parameters it is everything that resuming needs.

    Attributes:
        epoch: Epoch of the next step.
        step_in_epoch: Steps of that epoch done.
        steps: Steps done in all.
        updates: Optimizer updates done.
        skipped_updates: Updates of fp16 left out because their gradients overflowed.
        loss_scale: Of fp16; None in fp32 and bf16.
        window_label_tokens: Labels in the gradient buffers.
        norms: Gradient norms of the last updates, for a clipping threshold that follows them.
        real_tokens: Tokens of rows so far.
        padded_tokens: Padded tokens so far.
        evaluated_steps: Steps done at the last evaluation; 0 before the first.
        best: The lowest evaluation so far; None before the first.
        config: The fields that decide the course of training, section by section, as plain data.
        data_fingerprint: Of the MindRecord set.
        plan_fingerprint: Of the plan of epoch 0: its rows, shapes and order.
        world_size: Ranks that the plan is for; of fewer ranks each takes the batches of several.
        shapes: The shape record: planned (B, L) in warm-up order.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    steps: int = 0
    updates: int = 0
    skipped_updates: int = 0
    loss_scale: LossScale | None = None
    window_label_tokens: int = 0
    norms: tuple[float, ...] = ()
    real_tokens: int = 0
    padded_tokens: int = 0
    evaluated_steps: int = 0
    best: BestEvaluation | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    data_fingerprint: str = ""
    plan_fingerprint: str = ""
    world_size: int = 1
    shapes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What a checkpoint holds besides the parameters.

    Attributes:
        state: Where the run stood.
        parameters_sha256: Of the file of the parameters.
        evaluation_loss: Of an evaluation of just these parameters; None if there was none.
    """

    state: TrainState
    parameters_sha256: str
    evaluation_loss: float | None


def format_saved(saved: SavedState) -> str:
    """As JSON with a checksum of itself; every number comes back to the bit."""
    plain = asdict(saved)
    return json.dumps({"saved": plain, "sha256": plain_sha256(plain)}, indent=1)


def parse_saved(text: str) -> SavedState:
    """The inverse of `format_saved`.

    Raises:
        ValueError: not JSON, or not what was written.
        KeyError, TypeError: of another form.
    """
    content = json.loads(text)
    plain = content["saved"]
    if content["sha256"] != plain_sha256(plain):
        raise ValueError("the state does not match its checksum")
    state = plain.pop("state")
    state["shapes"] = tuple((size, length) for size, length in state["shapes"])
    state["norms"] = tuple(state["norms"])
    if state["loss_scale"] is not None:
        state["loss_scale"] = LossScale(**state["loss_scale"])
    if state["best"] is not None:
        state["best"] = BestEvaluation(**state["best"])
    return SavedState(state=TrainState(**state), **plain)

"""What a run reads: rows, their plan, rows to evaluate on, what it goes on from.

All of it is checked before any compile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.batching.packed_bounds import PackedBounds, packed_bounds
from tuner.batching.pinned_shapes import pin_shapes
from tuner.batching.plan import EpochPlan, plan_batches, resolve_boundaries
from tuner.batching.slabs import SlabPlan
from tuner.config.positions import check_length
from tuner.config.schema import TrainConfig
from tuner.data.held_out import training_part
from tuner.data.lengths import Lengths, scan_lengths
from tuner.data.mindrecord import MindRecordSet, open_mindrecord
from tuner.errors import BadInputError
from tuner.train.checkpoint import CheckpointFolder
from tuner.train.evaluation_rows import EvaluationRows, open_rows
from tuner.train.loader import check_some_rows
from tuner.train.loop import run_folder
from tuner.train.metrics import METRICS_FILE
from tuner.train.provenance import (
    check_resumable,
    deciding_fields,
    is_other_data,
    other_data_refused,
)
from tuner.train.state import TrainState

OnOtherData = Callable[[TrainConfig, Lengths], None]
"""Takes a tuned config and the lengths of rows that it was not tuned on."""


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a run works on.

    Attributes:
        config: Boundaries resolved; its shapes are pinned to the tuned ones on other
            data than was tuned, and on several ranks.
        dataset: The opened MindRecord set.
        lengths: Of all its rows; those held out are left out.
        plan: Of epoch 0.
        evaluation: Rows to evaluate on; None: none.
        is_other_data: Whether the config was tuned on other data, and that is accepted.
    """

    config: TrainConfig
    dataset: MindRecordSet
    lengths: Lengths
    plan: EpochPlan
    evaluation: EvaluationRows | None
    is_other_data: bool

    @property
    def longest(self) -> int:
        """Tokens of the longest padded row."""
        return max(length for _, length in self.plan.shapes)

    @property
    def has_pinned_shapes(self) -> bool:
        """Whether a tuned config may meet a part of its shapes only."""
        return self.is_other_data or self.plan.world_size > 1

    @property
    def bounds(self) -> PackedBounds | None:
        """Of all batches of packed rows, in whichever epoch; None where rows are not packed."""
        return packed_bounds(self.plan, self.config.batching)

    def notices(self) -> list[str]:
        """What became of rows that are not batched as they are."""
        lines = [
            f"{count} rows left out ({reason})"
            for reason, count in self.plan.dropped.items()
            if count
        ]
        if self.plan.num_truncated:
            lines.append(f"{self.plan.num_truncated} rows truncated to the longest padded length")
        if isinstance(self.plan, SlabPlan):
            lines.append(self.plan.loss.text)
        return lines + (self._evaluation_notices() if self.evaluation else [])

    def _evaluation_notices(self) -> list[str]:
        assert self.evaluation is not None
        rows, plan = self.evaluation, self.evaluation.plan
        shapes = len(plan.shapes) if self.config.graph.mode == "static" else 1
        lines = [f"evaluation: {plan.num_rows} rows, graphs of its own: {shapes}"]
        if rows.dataset.fingerprint == self.dataset.fingerprint and rows.config.data.path != (
            self.config.data.path
        ):
            lines.append("evaluation: its rows are those that are trained on")
        if plan.num_truncated:
            lines.append(f"evaluation: {plan.num_truncated} rows truncated")
        return lines


def open_inputs(
    config: TrainConfig, on_other_data: OnOtherData | None, world_size: int = 1
) -> RunInputs:
    """Open, check and plan.

    Args:
        config: The whole of best.yaml.
        on_other_data: Told when the data is not what was tuned, which is then accepted; None:
            that is refused.
        world_size: Ranks that the plan is for, >= 1.

    Raises:
        BadInputError: data and config do not fit together or cannot be read.
    """
    dataset = open_mindrecord(config.data.path)
    is_other = is_other_data(config, dataset.fingerprint)
    if is_other and on_other_data is None:
        raise other_data_refused(config, dataset.fingerprint)
    check_some_rows(dataset, config)
    every_row = scan_lengths(dataset, config.data.input_column, cache=run_folder(config))
    lengths = training_part(every_row, config.evaluation)
    if is_other and on_other_data is not None:
        on_other_data(config, lengths)
    if config.provenance is not None and (is_other or world_size > 1):
        # Rows spread over more ranks would fill batches of other sizes than were tuned.
        config = pin_shapes(config, config.provenance.shapes)
    config = resolve_boundaries(lengths, config)
    plan = plan_batches(lengths, config, world_size=world_size)
    check_length(config.model, max(length for _, length in plan.shapes))
    has_evaluation = config.evaluation is not None
    return RunInputs(
        config=config,
        dataset=dataset,
        lengths=lengths,
        plan=plan,
        evaluation=open_rows(config, dataset, every_row, plan) if has_evaluation else None,
        is_other_data=is_other,
    )


def check_folder(
    inputs: RunInputs,
    checkpoints: CheckpointFolder,
    found: TrainState | None,
    notice: Callable[[str], None],
    *,
    resume: bool,
) -> TrainState | None:
    """Refuse to mix runs, before anything dear is done.

    Args:
        inputs: What the run reads.
        checkpoints: Of its folder.
        found: The state of the newest checkpoint there; None: there is none.
        notice: Told that the run starts again.
        resume: Whether it is to go on.

    Returns:
        What it goes on from; None: it starts.

    Raises:
        BadInputError: a run is there and is not to go on, there is none to go on from, or it is
            not of this config and data.
    """
    folder = run_folder(inputs.config)
    if resume:
        if found is None and (folder / METRICS_FILE).exists() and checkpoints.is_empty():
            notice("the run ended before its first checkpoint: it starts again")
            return None
        if found is None:
            raise BadInputError(
                f"no checkpoint to resume from in {folder}", fix="start without --resume"
            )
        check_resumable(found, initial_state(inputs), inputs.config.data.path)
        return found
    if found is not None or (folder / METRICS_FILE).exists():
        done = f" of {found.steps} steps" if found else ""
        raise BadInputError(
            f"{folder} already holds a run{done}",
            fix="go on with --resume, or choose another folder with --set train.out=FOLDER",
        )
    return None


def initial_state(inputs: RunInputs) -> TrainState:
    """A run of these inputs before its first step."""
    return TrainState(
        config=deciding_fields(inputs.config),
        data_fingerprint=inputs.dataset.fingerprint,
        plan_fingerprint=inputs.plan.fingerprint,
        world_size=inputs.plan.world_size,
        shapes=inputs.plan.shapes,
    )

"""The training loop: plan an epoch, take its steps, update, record, save.

A step is one batch; an update follows when the window is full, and always at the end of an epoch.
A window without any label skips its update and changes no state. Between two steps come, in this
order: the record, an evaluation if one is due, a checkpoint if one is due.

Several ranks take the same steps in the same shapes, each with rows of its own. What a step comes
to is added up over all of them, so that they decide alike; the first alone writes files. Where a
run goes on with fewer of them than its plan is for, each takes the batches of several in a step,
one after another.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tuner.batching.grouping import Shape
from tuner.batching.plan import EpochPlan, PlannedBatch, plan_batches
from tuner.batching.windows import update_after_step
from tuner.config.schema import TrainConfig
from tuner.data.lengths import Lengths
from tuner.data.mindrecord import MindRecordSet
from tuner.train.checkpoint import CheckpointFolder
from tuner.train.checkpoint_writer import CheckpointWriter
from tuner.train.clipping import clip_threshold, is_clipped, norms_after
from tuner.train.device import memory_bytes
from tuner.train.engine import Engine
from tuner.train.loader import Batch, read_ahead, read_batches
from tuner.train.metrics import StepRecord
from tuner.train.profiling import StepProfiler
from tuner.train.ranks import OneRank, Ranks, StepTotals, total_step
from tuner.train.run_length import total_real_tokens, total_steps
from tuner.train.run_log import RunLog
from tuner.train.scaling import LEAST_SCALE
from tuner.train.schedule import describe_peak, learning_rate_at, peak_rate
from tuner.train.shape_check import FirstBatches
from tuner.train.state import BestEvaluation, TrainState

Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What the loop works with.

    Attributes:
        config: The whole config, boundaries resolved.
        dataset: The opened MindRecord set.
        lengths: Of all its rows.
        engine: Warmed up, parameters loaded.
        checkpoints: Where states go.
        log: Where records go.
        on_step: Called with every record, for progress.
        on_notice: Called with every line for the user.
        stop_requested: Asked after every step; True saves and ends the run.
        evaluate: Called between two steps with the steps done, every evaluation.every_steps at
            the next update and after the last step; returns the mean loss over the evaluated
            labels, None without any. It must leave weights and buffers as they are. None: there
            is no evaluation.
        profiler: Of some steps; its own time and that of evaluations and saves is not in theirs.
        ranks: All that take the steps together.
    """

    config: TrainConfig
    dataset: MindRecordSet
    lengths: Lengths
    engine: Engine
    checkpoints: CheckpointFolder
    log: RunLog
    on_step: Callable[[StepRecord], None]
    on_notice: Notice
    stop_requested: Callable[[], bool]
    evaluate: Callable[[int], float | None] | None = None
    profiler: StepProfiler | None = None
    ranks: Ranks = field(default_factory=OneRank)


class DivergedError(Exception):
    """Loss or gradients are no numbers any more; the weights of the last checkpoint are good."""

    def __init__(self, step: int, shape: Shape, problem: str, saved_steps: int) -> None:
        super().__init__(
            f"step {step} (B={shape[0]} L={shape[1]}): {problem}; training stopped, and nothing "
            f"of that step is saved. The last checkpoint is of step {saved_steps}: lower "
            "optimizer.learning_rate or train.clip_norm, keep more of precision.fp32_ops if "
            "precision.compute_dtype is not fp32, or look at the rows of that step"
        )


class _Update(NamedTuple):
    learning_rate: float
    grad_norm: float
    clip_norm: float
    """The threshold that held; infinite: none."""
    is_skipped: bool
    """In fp16, whether the gradients overflowed."""


class _Seconds(NamedTuple):
    step_s: float
    data_wait_s: float
    update_s: float
    """Among step_s."""


class Loop:
    """The state of a run between two steps."""

    def __init__(self, parts: RunParts, state: TrainState, plan: EpochPlan) -> None:
        """Prepare to go on from a state.

        Args:
            parts: What to work with.
            state: Where to go on.
            plan: Of any epoch; all have as many steps and real tokens. The ranks that it is for
                are a multiple of those that there are.
        """
        config = parts.config
        self._parts = parts
        self.state = state
        self._world_size = plan.world_size
        self._total_steps = total_steps(config, plan.num_steps)
        self._total_progress = (
            self._total_steps
            if config.schedule.progress == "steps"
            else total_real_tokens(parts.lengths, config, plan)
        )
        self._peak_rate = peak_rate(config)
        self._first_batches = FirstBatches(config, max(length for _, length in plan.shapes))
        parts.engine.recompiles.arm(parts.on_notice)
        self._writer = CheckpointWriter(
            parts.checkpoints,
            in_background=config.train.async_checkpoint,
            saved_steps=state.steps,
        )
        self._last_save = state.steps
        self._has_agreed_to_stop = False

    def run(self) -> TrainState:
        """Train to the end or to a requested stop; the last state is saved when this returns."""
        scaled = describe_peak(self._parts.config)
        if scaled is not None:
            self._parts.on_notice(scaled)
        ranks = self._parts.ranks
        if not ranks.world.is_alone:
            self._has_agreed_to_stop = bool(ranks.gather([self._parts.stop_requested()]).any())
        with self._writer, self._parts.profiler or nullcontext():
            while not self._is_over():
                self._run_epoch(self._plan_of_epoch())
            self._save()
        return self.state

    def _plan_of_epoch(self) -> EpochPlan:
        self._parts.ranks.at("plan", self.state.steps)
        return plan_batches(
            self._parts.lengths,
            self._parts.config,
            epoch=self.state.epoch,
            world_size=self._world_size,
        )

    def _is_over(self) -> bool:
        return self.state.steps >= self._total_steps or self._is_stopping()

    def _is_stopping(self) -> bool:
        """One rank may stop at once; several stop after a step whose totals say so to all."""
        if self._parts.ranks.world.is_alone:
            return self._parts.stop_requested()
        return self._has_agreed_to_stop

    def _run_epoch(self, plan: EpochPlan) -> None:
        config = self._parts.config
        first = self.state.step_in_epoch
        last = min(plan.num_steps, first + self._total_steps - self.state.steps)
        own = itertools.islice(self._own_steps(plan, first), last - first)
        steps = itertools.chain.from_iterable(own)
        ends_window = update_after_step(
            plan.real_tokens, config.train.tokens_per_update, config.train.steps_per_update
        )
        batches = read_batches(self._parts.dataset, steps, config, self._parts.on_notice)
        taken_in_step = plan.world_size // self._parts.ranks.world.size
        with read_ahead(batches, config.data.read_ahead_batches) as ready:
            steps_with_wait = _with_wait(ready, taken_in_step)
            for step_in_epoch, (taken, wait_s) in enumerate(steps_with_wait, start=first):
                self._run_step(taken, wait_s, bool(ends_window[step_in_epoch]), plan.num_steps)
                if self._is_stopping():
                    return

    def _own_steps(self, plan: EpochPlan, first: int) -> Iterator[tuple[PlannedBatch, ...]]:
        """The batches of this rank, step by step."""
        world = self._parts.ranks.world
        places = range(world.rank, plan.world_size, world.size)
        return zip(*(plan.steps_of_rank(place, first) for place in places), strict=True)

    def _run_step(
        self, batches: Sequence[Batch], wait_s: float, ends_window: bool, num_steps: int
    ) -> None:
        self._writer.raise_failure()
        self._parts.ranks.at("step", self.state.steps)
        engine = self._parts.engine
        engine.recompiles.step = self.state.steps + 1
        for batch in batches:
            self._first_batches.check(batch)
        shape = batches[0].shape
        profiler = self._parts.profiler
        if profiler is not None:
            profiler.before_step()
        started = time.perf_counter()
        totals = self._totals(batches, sum(map(engine.run_step, batches)))
        state = self._state_after(totals, num_steps)
        if not math.isfinite(totals.loss_sum):
            raise self._diverged(state, shape, f"the loss is {totals.loss_sum}")
        updating = time.perf_counter()
        update = self._update(state) if ends_window else None
        if update is not None:
            state = self._state_after_update(state, shape, update)
        update_s = time.perf_counter() - updating if ends_window else 0.0
        seconds = _Seconds(time.perf_counter() - started, wait_s, update_s)
        if profiler is not None:
            # On Ascend what was collected is analysed here: minutes in which others wait.
            self._parts.ranks.at("profile", state.steps)
            profiler.after_step()
            self._parts.ranks.at("step", state.steps)
        before, self.state = self.state, state
        self._tell(self._record(shape, totals, update, before, seconds))
        self._evaluate_if_due(ends_window)
        if state.steps - self._last_save >= self._parts.config.train.checkpoint_every_steps:
            self._save()

    def _totals(self, batches: Sequence[Batch], loss_sum: float) -> StepTotals:
        totals = total_step(
            self._parts.ranks,
            batches,
            loss_sum,
            step=self.state.steps + 1,
            stop_requested=self._parts.stop_requested(),
        )
        self._has_agreed_to_stop = totals.stop_requested
        return totals

    def _evaluate_if_due(self, ends_window: bool) -> None:
        """Evaluate between two updates, before saving: what is saved knows the result."""
        evaluate, section = self._parts.evaluate, self._parts.config.evaluation
        if evaluate is None or section is None:
            return
        steps, every = self.state.steps, section.every_steps
        is_passed = every is not None and steps // every > self.state.evaluated_steps // every
        if steps < self._total_steps and not (ends_window and is_passed):
            return
        self._parts.ranks.at("evaluation", steps)
        loss = evaluate(steps)
        best = self.state.best
        if loss is not None and math.isfinite(loss) and (best is None or loss < best.loss):
            best = BestEvaluation(loss=loss, steps=steps)
        self.state = dataclasses.replace(self.state, evaluated_steps=steps, best=best)
        if loss is not None and self._parts.config.train.keep_best:
            is_best = self._is_among_best(loss) if self._parts.ranks.world.is_first else False
            if self._parts.ranks.gather([is_best]).any():
                self._save(loss)

    def _is_among_best(self, loss: float) -> bool:
        # What is in flight may be one of the best.
        self._writer.last_saved_steps()
        return self._parts.checkpoints.is_among_best(loss, self.state.steps)

    def _state_after(self, totals: StepTotals, num_steps: int) -> TrainState:
        before = self.state
        ends_epoch = before.step_in_epoch + 1 == num_steps
        return dataclasses.replace(
            before,
            epoch=before.epoch + ends_epoch,
            step_in_epoch=0 if ends_epoch else before.step_in_epoch + 1,
            steps=before.steps + 1,
            window_label_tokens=before.window_label_tokens + totals.label_tokens,
            real_tokens=before.real_tokens + totals.real_tokens,
            padded_tokens=before.padded_tokens + totals.padded_tokens,
        )

    def _state_after_update(self, state: TrainState, shape: Shape, update: _Update) -> TrainState:
        loss_scale = self._parts.engine.loss_scale
        state = dataclasses.replace(state, window_label_tokens=0, loss_scale=loss_scale)
        if not update.is_skipped or loss_scale is None:
            if not math.isfinite(update.grad_norm):
                raise self._diverged(state, shape, f"the gradient norm is {update.grad_norm}")
            norms = norms_after(state.norms, update.grad_norm, self._parts.config.train)
            return dataclasses.replace(state, updates=state.updates + 1, norms=norms)
        if loss_scale.scale < LEAST_SCALE:
            problem = f"the gradients overflow fp16 at any loss scale down to {LEAST_SCALE:g}"
            raise self._diverged(state, shape, problem)
        self._parts.on_notice(
            f"step {state.steps}: the gradients overflow fp16; update skipped, loss scale now "
            f"{loss_scale.scale:g}"
        )
        return dataclasses.replace(state, skipped_updates=state.skipped_updates + 1)

    def _diverged(self, state: TrainState, shape: Shape, problem: str) -> DivergedError:
        is_first = self._parts.ranks.world.is_first
        saved_steps = self._writer.last_saved_steps() if is_first else self._last_save
        return DivergedError(state.steps, shape, problem, saved_steps)

    def _update(self, state: TrainState) -> _Update | None:
        """Update from the window's gradients; None if the window holds no label."""
        if not state.window_label_tokens:
            self._parts.on_notice(
                f"step {state.steps}: no label in the whole update window; update skipped"
            )
            return None
        config = self._parts.config
        by_steps = config.schedule.progress == "steps"
        learning_rate = learning_rate_at(
            state.steps if by_steps else state.real_tokens,
            self._total_progress,
            self._peak_rate,
            config.schedule,
        )
        clip_norm = clip_threshold(state.norms, config.train)
        self._parts.ranks.sum_gradients()
        norm = self._parts.engine.run_update(
            learning_rate, state.updates + 1, state.window_label_tokens, clip_norm
        )
        self._parts.ranks.share_weights()
        is_scaled = self._parts.engine.loss_scale is not None
        return _Update(learning_rate, norm, clip_norm, is_scaled and not math.isfinite(norm))

    def _record(
        self,
        shape: Shape,
        totals: StepTotals,
        update: _Update | None,
        before: TrainState,
        seconds: _Seconds,
    ) -> StepRecord:
        size, length = shape
        made = None if update is None or update.is_skipped else update
        recompiles = self._parts.engine.recompiles
        return StepRecord(
            step=self.state.steps,
            epoch=before.epoch,
            step_in_epoch=before.step_in_epoch,
            batch_size=size,
            padded_length=length,
            step_s=seconds.step_s,
            update_s=seconds.update_s,
            data_wait_s=seconds.data_wait_s,
            real_tokens=totals.real_tokens,
            padded_tokens=totals.padded_tokens,
            label_tokens=totals.label_tokens,
            loss=totals.loss_sum / totals.label_tokens if totals.label_tokens else None,
            updates=self.state.updates,
            grad_norm=made.grad_norm if made else None,
            learning_rate=made.learning_rate if made else None,
            clip_norm=made.clip_norm if made and math.isfinite(made.clip_norm) else None,
            clipped=is_clipped(made.grad_norm, made.clip_norm) if made else None,
            recompiles=len(recompiles.found),
            recompile_s=recompiles.seconds,
            memory_bytes=memory_bytes(self._parts.engine.device),
            skipped_updates=self.state.skipped_updates,
            loss_scale=self.state.loss_scale.scale if self.state.loss_scale else None,
        )

    def _tell(self, record: StepRecord) -> None:
        self._parts.on_step(self._parts.log.append(record))

    def _save(self, evaluation_loss: float | None = None) -> None:
        if self.state.steps == self._last_save:
            return
        self._last_save = self.state.steps
        ranks, engine = self._parts.ranks, self._parts.engine
        ranks.at("save", self.state.steps)
        # Between two windows the buffers of all ranks are 0.
        buffers = ranks.gradients_of_others() if self.state.window_label_tokens else {}
        others = {**buffers, **ranks.moments_of_others()}
        if ranks.world.is_first:
            self._writer.save(self.state, engine.parameters, evaluation_loss, others)
        self._parts.log.pause()


def run_folder(config: TrainConfig) -> Path:
    """Folder of a run's metrics and checkpoints."""
    return Path(config.train.out)


def _with_wait(
    batches: Iterator[Batch], taken_in_step: int
) -> Iterator[tuple[tuple[Batch, ...], float]]:
    """The batches of each step with the seconds that the loop waited for them."""
    while True:
        started = time.perf_counter()
        taken = tuple(itertools.islice(batches, taken_in_step))
        if not taken:
            return
        yield taken, time.perf_counter() - started

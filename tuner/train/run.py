"""A whole training run: open, check, warm up, loop, and the figures at the end.

Several ranks do all of it together: they meet when the device is open, agree on what they train,
and wait for each other's warm-up. The first alone writes files.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from mindspore import nn

from tuner.config.override import override_config
from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.train.agreement import check_weights
from tuner.train.cached_graphs import warm_up
from tuner.train.checkpoint import CheckpointFolder
from tuner.train.compile_cache import CACHE_FOLDER, UnsoundCacheError
from tuner.train.device import CACHE_VARIABLE, Device, open_device, peak_memory_bytes
from tuner.train.engine import Engine
from tuner.train.evaluation import Evaluation
from tuner.train.flash import attention_of
from tuner.train.loader import Batch
from tuner.train.loop import DivergedError, Loop, RunParts, run_folder
from tuner.train.meeting import meet, wait_and_agree
from tuner.train.metrics import EvaluationRecord, StepRecord
from tuner.train.profiling import StepProfiler
from tuner.train.provenance import check_provenance, planned_world_size
from tuner.train.rank_watch import RankWatch
from tuner.train.ranks import OneRank, Ranks
from tuner.train.recompiles import Recompile
from tuner.train.run_inputs import (
    OnOtherData,
    RunInputs,
    check_folder,
    initial_state,
    open_inputs,
)
from tuner.train.run_length import total_steps
from tuner.train.run_log import RunLog
from tuner.train.run_summary import RunFigures, RunSummary, sum_up, write_summary
from tuner.train.state import TrainState
from tuner.train.warmup import StoppedError, WarmUpWatch, shapes_in_order
from tuner.train.world import ALONE

CHECKPOINT_FOLDER = "checkpoints"
PROFILE_FOLDER = "profile"

OnFailure = Callable[[Exception, nn.Cell, TrainConfig, Batch], None]


@dataclass(frozen=True, kw_only=True)
class RunWatch:
    """How a run talks to its caller.

    Attributes:
        on_start: Called once before the first step with the steps of the run and those done.
        on_step: Called with every record.
        on_notice: Called with every line for the user.
        stop_requested: Asked after every step; True saves and ends the run.
        on_stuck: Called from another thread when a cached graph does not answer: the process
            has to start over or end.
        on_evaluation: Called with every evaluation.
        on_other_data: Called with the config and the lengths of the rows when the config was
            tuned on other data, which is then accepted; None: that is refused.
        on_failure: Called with an exception of a step or of the warm-up, the model, the config and
            the batch, before the exception goes on; it may raise a clearer one in its place.
        profile_steps: Steps to take under MindSpore's profiler, into train.out/profile; 0: none.
    """

    on_start: Callable[[int, int], None]
    on_step: Callable[[StepRecord], None]
    on_notice: Callable[[str], None]
    stop_requested: Callable[[], bool]
    on_stuck: Callable[[], None]
    on_evaluation: Callable[[EvaluationRecord], None] = lambda record: None
    on_other_data: OnOtherData | None = None
    on_failure: OnFailure = lambda error, model, config, batch: None
    profile_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Figures of a run, or of the part since it was resumed.

    Attributes:
        state: Where the run stands.
        planned_steps: Steps of the whole run.
        summary: Figures of the steps of this process; None if there was nothing left to do.
        recompiles: Compiles that no warm-up planned.
        is_other_data: Whether the config was tuned on other data.
    """

    state: TrainState
    planned_steps: int
    summary: RunSummary | None = None
    recompiles: tuple[Recompile, ...] = ()
    is_other_data: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all planned steps are done."""
        return self.state.steps >= self.planned_steps


def train_run(
    config: TrainConfig, watch: RunWatch, *, resume: bool, together: RankWatch | None = None
) -> RunReport:
    """Train as the config says.

    Args:
        config: The whole of best.yaml.
        watch: Progress, notices, stop requests.
        resume: Go on from the newest checkpoint in train.out; where a run ended before its
            first, start again.
        together: This rank among those that train the run; None: it is the only one.

    Raises:
        BadInputError: data, config and checkpoint do not fit together or cannot be read.
        DivergedError: the loss is not a number any more.
        StoppedError: a stop was requested before the first step.
        UnsoundCacheError: a cached graph is wrong; its folder is removed, start over in a new
            process.
    """
    world = together.world if together else ALONE
    if together is not None:
        watch = _telling_others(watch, together)
    checkpoints = CheckpointFolder(
        run_folder(config) / CHECKPOINT_FOLDER, config.train.keep_last, config.train.keep_best
    )
    found = checkpoints.newest_state(watch.on_notice if resume else lambda line: None)
    inputs = open_inputs(
        config if world.is_alone else _without_cache(config, watch),
        watch.on_other_data,
        planned_world_size(found if resume else None, world.size),
    )
    planned_steps = total_steps(config, inputs.plan.num_steps)
    saved = check_folder(inputs, checkpoints, found, watch.on_notice, resume=resume)
    if saved is not None and saved.steps >= planned_steps:
        return RunReport(state=saved, planned_steps=planned_steps)
    if os.environ.get(CACHE_VARIABLE):
        watch.on_notice(
            f"{CACHE_VARIABLE} is not followed, since MindSpore checks nothing about the graphs "
            "it finds; set graph.compile_cache to true"
        )
    ready = _make_ready(inputs, checkpoints, saved, watch, together)
    watch.on_start(planned_steps, ready.state.steps)
    log = _open_log(config, ready, watch)
    with closing(log):
        started = time.perf_counter()
        end = _loop(inputs, ready, log, checkpoints, watch)
        run = _figures(inputs, ready, time.perf_counter() - started)
    summary = sum_up(log.figures(), run, config.provenance)
    if world.is_first:
        write_summary(run_folder(config), summary)
    return RunReport(
        state=end,
        planned_steps=planned_steps,
        summary=summary,
        recompiles=ready.engine.recompiles.found,
        is_other_data=inputs.is_other_data,
    )


def _without_cache(config: TrainConfig, watch: RunWatch) -> TrainConfig:
    """A cached graph that is wrong makes a process start over, which a rank cannot."""
    if not config.graph.compile_cache:
        return config
    watch.on_notice("going on without a compile cache: it is for runs on one device")
    return override_config(config, {"graph.compile_cache": False}, source="several ranks")


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """What the loop starts from: everything compiled, parameters loaded."""

    engine: Engine
    evaluation: Evaluation | None
    state: TrainState
    warm_up_s: float
    ranks: Ranks


def _make_ready(
    inputs: RunInputs,
    checkpoints: CheckpointFolder,
    saved: TrainState | None,
    watch: RunWatch,
    together: RankWatch | None,
) -> _Ready:
    config = inputs.config
    device = open_device(config, together.world.local_rank if together else 0)
    values = meet(together, inputs, device, saved) if together else {}
    warming = _with_signs(watch, together) if together else watch
    _check_world(inputs, device, watch)
    engine = Engine(
        config,
        device,
        inputs.longest,
        bounds=inputs.bounds,
        reads_source=saved is None or config.model.lora is not None,
    )
    if together is not None:
        engine.share_out(together.world)
    evaluation = Evaluation(engine, inputs.evaluation) if inputs.evaluation else None
    with _told(engine, config, watch):
        warm_up_s = _warm_up(engine, inputs, saved, warming)
    if evaluation is not None:
        warm_up_s += evaluation.warm_up(warming.on_notice, watch.stop_requested)
    ranks: Ranks = OneRank()
    if together is not None:
        ranks = wait_and_agree(together, engine, values, watch.on_notice, watch.stop_requested)
    state = dataclasses.replace(initial_state(inputs), loss_scale=engine.loss_scale)
    if saved is not None:
        # What had to be passed over was said when the folder was checked.
        state = checkpoints.load_newest(
            engine.parameters,
            lambda line: None,
            ranks.world,
            own=[gradient.name for gradient in engine.gradients],
            elsewhere=engine.moments_elsewhere,
        )
        engine.loss_scale = state.loss_scale
        watch.on_notice(f"resumed after step {state.steps}")
        _tell_sharing(inputs, ranks, watch)
    if together is not None:
        check_weights(ranks, engine)
        _tell_kept_moments(engine, watch)
    return _Ready(
        engine=engine, evaluation=evaluation, state=state, warm_up_s=warm_up_s, ranks=ranks
    )


def _figures(inputs: RunInputs, ready: _Ready, run_s: float) -> RunFigures:
    device = ready.engine.device
    return RunFigures(
        run_s=run_s,
        warm_up_s=ready.warm_up_s,
        peak_bytes=peak_memory_bytes(device),
        memory_kind=device.memory_kind,
        batches_per_step=inputs.plan.world_size // ready.ranks.world.size,
    )


def _tell_sharing(inputs: RunInputs, ranks: Ranks, watch: RunWatch) -> None:
    planned, num_ranks = inputs.plan.world_size, ranks.world.size
    if planned > num_ranks:
        watch.on_notice(
            f"the run was planned for {planned} devices: on {num_ranks} each takes "
            f"{planned // num_ranks} batches a step, one after another"
        )


def _tell_kept_moments(engine: Engine, watch: RunWatch) -> None:
    if engine.owners is None:
        return
    kept = sum(moment.nbytes for moment in engine.moments.values())
    elsewhere = sum(4 * math.prod(shape) for shape in engine.moments_elsewhere.values())
    watch.on_notice(
        f"optimizer.sharded: this rank keeps {kept / 1e6:,.1f} of "
        f"{(kept + elsewhere) / 1e6:,.1f} MB of moments"
    )


def _telling_others(watch: RunWatch, together: RankWatch) -> RunWatch:
    """The others hear of a failure before seconds go into explaining it."""

    def on_failure(error: Exception, model: nn.Cell, config: TrainConfig, batch: Batch) -> None:
        if together.fail(error):
            watch.on_failure(error, model, config, batch)

    return dataclasses.replace(watch, on_failure=on_failure)


def _with_signs(watch: RunWatch, together: RankWatch) -> RunWatch:
    """During the warm-up the others are told its last line, for those who wait."""

    def notice(line: str) -> None:
        together.at("warm-up", detail=line)
        watch.on_notice(line)

    together.at("warm-up")
    return dataclasses.replace(watch, on_notice=notice)


def _loop(
    inputs: RunInputs,
    ready: _Ready,
    log: RunLog,
    checkpoints: CheckpointFolder,
    watch: RunWatch,
) -> TrainState:
    parts = RunParts(
        config=inputs.config,
        dataset=inputs.dataset,
        lengths=inputs.lengths,
        engine=ready.engine,
        checkpoints=checkpoints,
        log=log,
        on_step=watch.on_step,
        on_notice=watch.on_notice,
        stop_requested=watch.stop_requested,
        evaluate=_evaluate_with(ready, log, watch),
        profiler=_profiler(inputs.config, ready, watch),
        ranks=ready.ranks,
    )
    with _told(ready.engine, inputs.config, watch):
        return Loop(parts, ready.state, inputs.plan).run()


def _open_log(config: TrainConfig, ready: _Ready, watch: RunWatch) -> RunLog:
    return RunLog(
        run_folder(config),
        ready.state.steps,
        watch.on_notice,
        writes_events=config.train.tensorboard,
        writes=ready.ranks.world.is_first,
    )


def _profiler(config: TrainConfig, ready: _Ready, watch: RunWatch) -> StepProfiler | None:
    if not watch.profile_steps or not ready.ranks.world.is_first:
        return None
    folder = run_folder(config) / PROFILE_FOLDER
    return StepProfiler(folder, watch.profile_steps, ready.engine.device, watch.on_notice)


@contextmanager
def _told(engine: Engine, config: TrainConfig, watch: RunWatch) -> Iterator[None]:
    """Tell of what a step raises, unless it is told already or the run goes on by it."""
    try:
        yield
    except (BadInputError, DivergedError, StoppedError, UnsoundCacheError):
        raise
    except Exception as error:
        if engine.in_flight is not None:
            watch.on_failure(error, engine.model, config, engine.in_flight)
        raise


def _evaluate_with(
    ready: _Ready, log: RunLog, watch: RunWatch
) -> Callable[[int], float | None] | None:
    evaluation = ready.evaluation
    if evaluation is None:
        return None

    def evaluate(step: int) -> float | None:
        record = evaluation.run(step, ready.ranks)
        log.evaluated(record)
        watch.on_evaluation(record)
        return record.loss

    return evaluate


def _check_world(inputs: RunInputs, device: Device, watch: RunWatch) -> None:
    watch.on_notice(f"device: {device.name}")
    for line in device.notes:
        watch.on_notice(line)
    if inputs.config.model.factory is None:
        most_rows = max(size for size, _ in inputs.plan.shapes)
        attention = attention_of(
            inputs.config, device.name, inputs.longest, most_rows, inputs.bounds
        )
        watch.on_notice(str(attention))
    check_provenance(
        inputs.config,
        shapes=inputs.plan.shapes,
        accepts_fewer=inputs.has_pinned_shapes,
        device=device.name,
        notice=watch.on_notice,
    )
    for line in inputs.notices():
        watch.on_notice(line)


def _warm_up(
    engine: Engine, inputs: RunInputs, saved: TrainState | None, watch: RunWatch
) -> float:
    config, recorded = inputs.config, saved.shapes if saved else ()
    return warm_up(
        engine,
        config,
        shapes_in_order(inputs.plan.shapes, recorded, config.graph),
        run_folder(config) / CACHE_FOLDER,
        WarmUpWatch(
            notice=watch.on_notice,
            stop_requested=watch.stop_requested,
            on_stuck=watch.on_stuck,
        ),
    )

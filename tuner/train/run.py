"""A whole training run: open, check, warm up, loop, and the figures at the end."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from mindspore import nn

from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.train.cached_graphs import warm_up
from tuner.train.checkpoint import CheckpointFolder
from tuner.train.compile_cache import CACHE_FOLDER, UnsoundCacheError
from tuner.train.device import CACHE_VARIABLE, Device, open_device, peak_memory_bytes
from tuner.train.engine import Engine
from tuner.train.evaluation import Evaluation
from tuner.train.flash import attention_of
from tuner.train.loader import Batch
from tuner.train.loop import DivergedError, Loop, RunParts, run_folder
from tuner.train.metrics import METRICS_FILE, EvaluationRecord, StepRecord
from tuner.train.profiling import StepProfiler
from tuner.train.provenance import check_provenance, check_resumable, deciding_fields
from tuner.train.recompiles import Recompile
from tuner.train.run_inputs import OnOtherData, RunInputs, open_inputs
from tuner.train.run_length import total_steps
from tuner.train.run_log import RunLog
from tuner.train.run_summary import RunFigures, RunSummary, sum_up, write_summary
from tuner.train.state import TrainState
from tuner.train.warmup import StoppedError, WarmUpWatch, shapes_in_order

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


def train_run(config: TrainConfig, watch: RunWatch, *, resume: bool) -> RunReport:
    """Train as the config says.

    Args:
        config: The whole of best.yaml.
        watch: Progress, notices, stop requests.
        resume: Go on from the newest checkpoint in train.out; where a run ended before its
            first, start again.

    Raises:
        BadInputError: data, config and checkpoint do not fit together or cannot be read.
        DivergedError: the loss is not a number any more.
        StoppedError: a stop was requested before the first step.
        UnsoundCacheError: a cached graph is wrong; its folder is removed, start over in a new
            process.
    """
    inputs = open_inputs(config, watch.on_other_data)
    checkpoints = CheckpointFolder(
        run_folder(config) / CHECKPOINT_FOLDER, config.train.keep_last, config.train.keep_best
    )
    planned_steps = total_steps(config, inputs.plan.num_steps)
    saved = _check_folder(inputs, checkpoints, watch, resume=resume)
    if saved is not None and saved.steps >= planned_steps:
        return RunReport(state=saved, planned_steps=planned_steps)
    if os.environ.get(CACHE_VARIABLE):
        watch.on_notice(
            f"{CACHE_VARIABLE} is not followed, since MindSpore checks nothing about the graphs "
            "it finds; set graph.compile_cache to true"
        )
    ready = _make_ready(inputs, checkpoints, saved, watch)
    watch.on_start(planned_steps, ready.state.steps)
    log = RunLog(
        run_folder(config),
        ready.state.steps,
        watch.on_notice,
        writes_events=config.train.tensorboard,
    )
    with closing(log):
        started = time.perf_counter()
        end = _loop(inputs, ready, log, checkpoints, watch)
        run = RunFigures(
            run_s=time.perf_counter() - started,
            warm_up_s=ready.warm_up_s,
            peak_bytes=peak_memory_bytes(ready.engine.device),
            memory_kind=ready.engine.device.memory_kind,
        )
    summary = sum_up(log.figures(), run, config.provenance)
    write_summary(run_folder(config), summary)
    return RunReport(
        state=end,
        planned_steps=planned_steps,
        summary=summary,
        recompiles=ready.engine.recompiles.found,
        is_other_data=inputs.is_other_data,
    )


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """What the loop starts from: everything compiled, parameters loaded."""

    engine: Engine
    evaluation: Evaluation | None
    state: TrainState
    warm_up_s: float


def _make_ready(
    inputs: RunInputs, checkpoints: CheckpointFolder, saved: TrainState | None, watch: RunWatch
) -> _Ready:
    config = inputs.config
    device = open_device(config)
    _check_world(inputs, device, watch)
    engine = Engine(
        config,
        device,
        inputs.longest,
        bounds=inputs.bounds,
        reads_source=saved is None or config.model.lora is not None,
    )
    evaluation = Evaluation(engine, inputs.evaluation) if inputs.evaluation else None
    with _told(engine, config, watch):
        warm_up_s = _warm_up(engine, inputs, saved, watch)
    if evaluation is not None:
        warm_up_s += evaluation.warm_up(watch.on_notice, watch.stop_requested)
    state = dataclasses.replace(_initial_state(inputs), loss_scale=engine.loss_scale)
    if saved is not None:
        # What had to be passed over was said when the folder was checked.
        state = checkpoints.load_newest(engine.parameters, lambda line: None)
        engine.loss_scale = state.loss_scale
        watch.on_notice(f"resumed after step {state.steps}")
    return _Ready(engine=engine, evaluation=evaluation, state=state, warm_up_s=warm_up_s)


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
        evaluate=_evaluate_with(ready.evaluation, log, watch),
        profiler=_profiler(inputs.config, ready.engine.device, watch),
    )
    with _told(ready.engine, inputs.config, watch):
        return Loop(parts, ready.state, inputs.plan).run()


def _profiler(config: TrainConfig, device: Device, watch: RunWatch) -> StepProfiler | None:
    if not watch.profile_steps:
        return None
    folder = run_folder(config) / PROFILE_FOLDER
    return StepProfiler(folder, watch.profile_steps, device, watch.on_notice)


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
    evaluation: Evaluation | None, log: RunLog, watch: RunWatch
) -> Callable[[int], float | None] | None:
    if evaluation is None:
        return None

    def evaluate(step: int) -> float | None:
        record = evaluation.run(step)
        log.evaluated(record)
        watch.on_evaluation(record)
        return record.loss

    return evaluate


def _check_folder(
    inputs: RunInputs, checkpoints: CheckpointFolder, watch: RunWatch, *, resume: bool
) -> TrainState | None:
    """Refuse to mix runs, before anything dear is done; what will be gone on from, if anything."""
    folder = run_folder(inputs.config)
    if resume:
        state = checkpoints.newest_state(watch.on_notice)
        if state is None and (folder / METRICS_FILE).exists() and checkpoints.is_empty():
            watch.on_notice("the run ended before its first checkpoint: it starts again")
            return None
        if state is None:
            raise BadInputError(
                f"no checkpoint to resume from in {folder}", fix="start without --resume"
            )
        check_resumable(state, _initial_state(inputs), inputs.config.data.path)
        return state
    state = checkpoints.newest_state(lambda line: None)
    if state is not None or (folder / METRICS_FILE).exists():
        done = f" of {state.steps} steps" if state else ""
        raise BadInputError(
            f"{folder} already holds a run{done}",
            fix="go on with --resume, or choose another folder with --set train.out=FOLDER",
        )
    return None


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
        accepts_fewer=inputs.is_other_data,
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


def _initial_state(inputs: RunInputs) -> TrainState:
    return TrainState(
        config=deciding_fields(inputs.config),
        data_fingerprint=inputs.dataset.fingerprint,
        plan_fingerprint=inputs.plan.fingerprint,
        world_size=inputs.plan.world_size,
        shapes=inputs.plan.shapes,
    )

"""A whole training run: open, check, warm up, loop, and the figures at the end."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from tuner.batching.plan import BatchPlan, plan_batches, resolve_boundaries
from tuner.config.positions import check_length
from tuner.config.schema import TrainConfig
from tuner.data.content import check_content
from tuner.data.lengths import Lengths, scan_lengths
from tuner.data.mindrecord import MindRecordSet, open_mindrecord, require_columns
from tuner.errors import BadInputError
from tuner.train.cached_graphs import warm_up
from tuner.train.checkpoint import CheckpointFolder
from tuner.train.compile_cache import CACHE_FOLDER
from tuner.train.device import CACHE_VARIABLE, Device, open_device, peak_memory_bytes
from tuner.train.engine import Engine
from tuner.train.loader import columns_to_read
from tuner.train.loop import Loop, RunParts, run_folder
from tuner.train.metrics import METRICS_FILE, MetricsFile, StepRecord
from tuner.train.provenance import check_provenance, check_resumable, deciding_fields
from tuner.train.recompiles import Recompile
from tuner.train.run_length import total_steps
from tuner.train.state import TrainState
from tuner.train.warmup import WarmUpWatch, shapes_in_order

CHECKPOINT_FOLDER = "checkpoints"
CHECKED_ROWS = 2_000


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
    """

    on_start: Callable[[int, int], None]
    on_step: Callable[[StepRecord], None]
    on_notice: Callable[[str], None]
    stop_requested: Callable[[], bool]
    on_stuck: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Figures of a run, or of the part since it was resumed.

    Attributes:
        state: Where the run stands.
        planned_steps: Steps of the whole run.
        warm_up_s: Seconds of compiling before the first step.
        loop_s: Seconds of the loop, data and checkpoints included.
        real_tokens: Tokens of rows in those seconds.
        peak_bytes: Largest memory of the process.
        memory_kind: What peak_bytes is.
        recompiles: Compiles that no warm-up planned.
        was_complete: Whether all planned steps were done before; nothing was run.
    """

    state: TrainState
    planned_steps: int
    warm_up_s: float
    loop_s: float
    real_tokens: int
    peak_bytes: int
    memory_kind: str
    recompiles: tuple[Recompile, ...] = ()
    was_complete: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all planned steps are done."""
        return self.state.steps >= self.planned_steps


@dataclass(frozen=True, kw_only=True)
class _Opened:
    config: TrainConfig
    dataset: MindRecordSet
    lengths: Lengths
    plan: BatchPlan


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
        UnsoundCacheError: a cached graph is wrong; start over in a new process.
    """
    opened = _open(config)
    checkpoints = CheckpointFolder(
        run_folder(config) / CHECKPOINT_FOLDER, config.train.keep_last, config.train.keep_best
    )
    planned_steps = total_steps(config, opened.plan.num_steps)
    saved = _check_folder(opened, checkpoints, watch, resume=resume)
    if saved is not None and saved.steps >= planned_steps:
        return _nothing_left(saved, planned_steps)
    device = _open_device(opened, watch)
    engine = Engine(
        opened.config,
        device,
        _longest(opened.plan),
        reads_source=saved is None or config.model.lora is not None,
    )
    warm_up_s = _warm_up(engine, opened, saved, watch)
    state = dataclasses.replace(_initial_state(opened), loss_scale=engine.loss_scale)
    if saved is not None:
        state = _load_newest(checkpoints, engine, watch)
    watch.on_start(planned_steps, state.steps)
    metrics = MetricsFile(run_folder(config), keep_steps=state.steps)
    parts = RunParts(
        config=opened.config,
        dataset=opened.dataset,
        lengths=opened.lengths,
        engine=engine,
        checkpoints=checkpoints,
        metrics=metrics,
        on_step=watch.on_step,
        on_notice=watch.on_notice,
        stop_requested=watch.stop_requested,
    )
    started = time.perf_counter()
    end = Loop(parts, state, opened.plan).run()
    metrics.close()
    return RunReport(
        state=end,
        planned_steps=planned_steps,
        warm_up_s=warm_up_s,
        loop_s=time.perf_counter() - started,
        real_tokens=end.real_tokens - state.real_tokens,
        peak_bytes=peak_memory_bytes(device),
        memory_kind=device.memory_kind,
        recompiles=engine.recompiles.found,
    )


def _open(config: TrainConfig) -> _Opened:
    dataset = open_mindrecord(config.data.path)
    require_columns(dataset, columns_to_read(config.data))
    # A look at some rows now, so that a wrong vocabulary shows before the compiles; the loader
    # checks every row as it comes.
    check_content(
        dataset,
        config.data.input_column,
        config.data.label_column,
        config.model.vocab_size,
        limit_rows=CHECKED_ROWS,
    )
    lengths = scan_lengths(dataset, config.data.input_column, cache=run_folder(config))
    resolved = resolve_boundaries(lengths, config)
    plan = plan_batches(lengths, resolved)
    check_length(config.model, _longest(plan))
    return _Opened(config=resolved, dataset=dataset, lengths=lengths, plan=plan)


def _longest(plan: BatchPlan) -> int:
    return max(length for _, length in plan.shapes)


def _check_folder(
    opened: _Opened, checkpoints: CheckpointFolder, watch: RunWatch, *, resume: bool
) -> TrainState | None:
    """Refuse to mix runs, before anything dear is done; what will be gone on from, if anything."""
    folder = run_folder(opened.config)
    if resume:
        state = checkpoints.newest_state(watch.on_notice)
        if state is None and (folder / METRICS_FILE).exists() and checkpoints.is_empty():
            watch.on_notice("the run ended before its first checkpoint: it starts again")
            return None
        if state is None:
            raise BadInputError(
                f"no checkpoint to resume from in {folder}", fix="start without --resume"
            )
        check_resumable(state, _initial_state(opened), opened.config.data.path)
        return state
    state = checkpoints.newest_state(lambda line: None)
    if state is not None or (folder / METRICS_FILE).exists():
        done = f" of {state.steps} steps" if state else ""
        raise BadInputError(
            f"{folder} already holds a run{done}",
            fix="go on with --resume, or choose another folder with --set train.out=FOLDER",
        )
    return None


def _nothing_left(state: TrainState, planned_steps: int) -> RunReport:
    """The report of a run that was over before it was resumed."""
    return RunReport(
        state=state,
        planned_steps=planned_steps,
        warm_up_s=0.0,
        loop_s=0.0,
        real_tokens=0,
        peak_bytes=0,
        memory_kind="",
        was_complete=True,
    )


def _check_world(opened: _Opened, device: Device, watch: RunWatch) -> None:
    watch.on_notice(f"device: {device.name}")
    check_provenance(
        opened.config,
        data_fingerprint=opened.dataset.fingerprint,
        shapes=opened.plan.shapes,
        device=device.name,
        notice=watch.on_notice,
    )
    plan = opened.plan
    for reason, count in plan.dropped.items():
        if count:
            watch.on_notice(f"{count} rows left out ({reason})")
    if plan.num_truncated:
        watch.on_notice(f"{plan.num_truncated} rows truncated to the longest padded length")


def _open_device(opened: _Opened, watch: RunWatch) -> Device:
    if os.environ.get(CACHE_VARIABLE):
        watch.on_notice(
            f"{CACHE_VARIABLE} is not followed, since MindSpore checks nothing about the graphs "
            "it finds; set graph.compile_cache to true"
        )
    device = open_device(opened.config)
    _check_world(opened, device, watch)
    return device


def _load_newest(checkpoints: CheckpointFolder, engine: Engine, watch: RunWatch) -> TrainState:
    # What had to be passed over was said when the folder was checked.
    state = checkpoints.load_newest(engine.parameters, lambda line: None)
    engine.loss_scale = state.loss_scale
    watch.on_notice(f"resumed after step {state.steps}")
    return state


def _warm_up(engine: Engine, opened: _Opened, saved: TrainState | None, watch: RunWatch) -> float:
    config, recorded = opened.config, saved.shapes if saved else ()
    return warm_up(
        engine,
        config,
        shapes_in_order(opened.plan.shapes, recorded, config.graph),
        run_folder(config) / CACHE_FOLDER,
        WarmUpWatch(
            notice=watch.on_notice,
            stop_requested=watch.stop_requested,
            on_stuck=watch.on_stuck,
        ),
    )


def _initial_state(opened: _Opened) -> TrainState:
    return TrainState(
        config=deciding_fields(opened.config),
        data_fingerprint=opened.dataset.fingerprint,
        plan_fingerprint=opened.plan.fingerprint,
        world_size=opened.plan.world_size,
        shapes=opened.plan.shapes,
    )

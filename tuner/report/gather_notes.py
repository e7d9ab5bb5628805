"""What the report page says about machine, software, assumptions and what was left out; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from tuner.config.schema import ComputeDtype, GraphConfig, StrategyName
from tuner.report.contents import NamedValue
from tuner.report.study import StudyContext
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.screen import Screen
from tuner.simulate.slab_loss import estimate_slab_loss
from tuner.study.optuna_storage import describe_storage
from tuner.study.result import StudyResult
from tuner.study.search import BUSY_CORES
from tuner.study.setup import StudySetup
from tuner.study.space import SearchSpace

SPELLED = {"mindspore": "MindSpore", "numpy": "NumPy", "python": "Python"}
"""Names of versions as they are written."""

METHOD = (
    "Run times are estimates from measurements, not whole runs: every trial is a process of its "
    "own that compiles shapes and times real steps at each. A run's seconds are the compile "
    "seconds of its shapes, plus the median steady step of each shape times its exact number of "
    "steps, plus the updates, over the planned epochs.",
    "Measurements are shared by all trials; a shape that no trial measured is estimated by a cost "
    "model fitted to those that were, with its error in the interval.",
    "Every config gathers the same number of real tokens for an optimizer update, so that all "
    "train the same thing.",
    "What else runs on the machine makes steps look slower. The rounds of the confirmation are "
    "interleaved, so that it meets all configs alike.",
)

ON_CPU = (
    "Figures of a CPU do not rank jit levels or precisions for an NPU: on a CPU every level "
    "compiles to the same kernels and fp32 is the fastest precision. Tune on the device that "
    "will train."
)


def gather_notes(result: StudyResult, setup: StudySetup, context: StudyContext) -> tuple[str, ...]:
    """Assumptions and what was left out, one sentence or two each."""
    on_device = (ON_CPU,) if context.device == "CPU" else ()
    busy = _of_other_programs(result, setup)
    slabs = _of_slabs(result, setup)
    return (*context.notes, *METHOD, busy, *slabs, *on_device, *_not_proposed(setup.space))


def disturbed_by(result: StudyResult) -> Mapping[str, float]:
    """Trial or round -> cores that other programs took meanwhile, where they are worth a word."""
    rounds = result.confirmation.rounds if result.confirmation else ()
    cores = {f"trial {item.number}": item.outcome.other_cores for item in result.outcomes}
    cores |= {f"{item.candidate}, round {item.number + 1}": item.other_cores for item in rounds}
    return {name: value for name, value in cores.items() if value >= BUSY_CORES}


def _of_other_programs(result: StudyResult, setup: StudySetup) -> str:
    if setup.jobs > 1:
        return (
            f"{setup.jobs} trials ran at a time, so that what other programs took of the machine "
            "is not known."
        )
    disturbed = disturbed_by(result)
    if not disturbed:
        return f"No other program took {BUSY_CORES:g} cores or more while something was timed."
    told = "; ".join(f"{name}: {cores:.1f}" for name, cores in disturbed.items())
    return f"Cores that other programs took while something was timed: {told}."


def _of_slabs(result: StudyResult, setup: StudySetup) -> list[str]:
    """What planning the best config slab by slab costs it."""
    if result.best is None:
        return []
    config = result.best.outcome.config
    if setup.data.lengths.num_samples <= config.batching.rows_per_slab:
        return []
    screen = Screen(LengthHistogram.from_tokens(setup.data.lengths.own_tokens))
    loss = estimate_slab_loss(screen, config)
    return [] if loss is None else [f"The best config: {loss.text}."]


def gather_environment(setup: StudySetup, context: StudyContext) -> tuple[NamedValue, ...]:
    """What the figures belong to."""
    storage = describe_storage(setup.storage or setup.folder.storage)
    pairs = [
        ("device", context.device),
        *((SPELLED.get(name, name), version) for name, version in context.versions.items()),
        ("processor cores", "not known" if not context.num_cores else str(context.num_cores)),
        ("memory limit of a trial", f"{setup.memory_limit_bytes / 1e9:.1f} GB"),
        ("time limit of a trial", f"{setup.time_limit_s:,.0f} s"),
        ("trials at a time", str(setup.jobs)),
        ("seed of the search", str(setup.seed)),
        ("study", setup.study_name),
        ("storage", storage),
        ("fingerprint of the data", setup.data.dataset.fingerprint[:16]),
    ]
    return tuple(NamedValue(name=name, value=value) for name, value in pairs)


def _not_proposed(space: SearchSpace) -> list[str]:
    """What the config knows and the space does not list."""
    kinds: Sequence[tuple[str, Sequence[Any], Any]] = (
        ("strategy", space.strategy, StrategyName),
        ("graph mode", space.graph_mode, GraphConfig.model_fields["mode"].annotation),
        ("jit_level", space.jit_level, GraphConfig.model_fields["jit_level"].annotation),
        ("compute_dtype", space.compute_dtype, ComputeDtype),
    )
    told = []
    for name, listed, known in kinds:
        missing = [value for value in get_args(known) if value not in listed]
        if missing:
            told.append(f"{name} {', '.join(missing)}")
    if not told:
        return []
    return [
        f"Not proposed: {'; '.join(told)}. The search space does not list them, or the device "
        "does not take them."
    ]

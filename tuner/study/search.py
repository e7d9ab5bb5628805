"""The search: propose, plan, measure, tell, write; until the wanted number of trials is told."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.batching.plan import BatchPlan, plan_batches, resolve_boundaries
from tuner.config.codec import to_plain
from tuner.config.override import override_config
from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.simulate.estimate import estimate_run
from tuner.simulate.stats import PlanStats, count_plan
from tuner.study.base import TunedData
from tuner.study.optuna_study import STUDY_NAME, OptunaStudy
from tuner.study.outcome import (
    NumberedOutcome,
    Outcome,
    outcome_from_plain,
    outcome_to_plain,
)
from tuner.study.space import (
    Choice,
    SearchSpace,
    all_choices,
    choice_overrides,
    first_choices,
    tokens_per_update,
)
from tuner.trial.folder import StudyFolder
from tuner.trial.record import Installation, TrialResult, TrialSpec
from tuner.trial.runner import TrialRunner

# A dynamic graph needs no compile for a new shape, so a few shapes and the fit between them do.
MAX_MEASURED_SHAPES_DYNAMIC = 6
TIMED_STEPS = 4
# A sampler that has found its corner proposes what was tried before; after so many in a row a
# point that was not is drawn. Repeats cost milliseconds.
MAX_REPEATS_IN_A_ROW = 4


@dataclass(frozen=True, kw_only=True)
class StudySetup:
    """What a study is about and within which limits.

    Attributes:
        base: Config that the choices are written into.
        data: The data and its lengths.
        space: Fitted to the device.
        folder: Where everything goes.
        installation: What trials run on.
        trials: Trials in all, finished ones of an earlier start included; >= 1.
        time_limit_s: Of one trial.
        memory_limit_bytes: Of one trial.
        seed: Of the sampler.
    """

    base: TrainConfig
    data: TunedData
    space: SearchSpace
    folder: StudyFolder
    installation: Installation
    trials: int
    time_limit_s: float
    memory_limit_bytes: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class StudyWatch:
    """How a study talks to its caller.

    Attributes:
        on_notice: Called with a line for the user.
        on_trial: Called with the number and config of a trial that starts.
        on_outcome: Called with all outcomes so far, the newest last; none yet on a new study.
    """

    on_notice: Callable[[str], None]
    on_trial: Callable[[int, TrainConfig], None]
    on_outcome: Callable[[Sequence[NumberedOutcome]], None]


def run_search(
    setup: StudySetup, runner: TrialRunner, watch: StudyWatch
) -> tuple[NumberedOutcome, ...]:
    """Run the study, or the rest of it.

    Returns:
        All outcomes, those of earlier starts included, by trial number.

    Raises:
        BadInputError: the folder holds the study of something else.
    """
    study = OptunaStudy(setup.folder.storage, STUDY_NAME, setup.space, setup.seed)
    study.check_identity(study_identity(setup))
    for number in study.recover():
        watch.on_notice(f"trial {number} was interrupted and is run again")
    study.enqueue(first_choices(setup.space))
    np.save(setup.folder.lengths, setup.data.lengths.tokens)
    outcomes = [
        NumberedOutcome(number=told.number, outcome=outcome_from_plain(told.outcome))
        for told in study.told()
    ]
    watch.on_outcome(outcomes)
    repeats = 0
    while len(outcomes) < setup.trials:
        if repeats >= MAX_REPEATS_IN_A_ROW and not _enqueue_untried(study, setup):
            watch.on_notice(f"the space holds no more than {len(outcomes)} different configs")
            break
        proposal = study.ask()
        number = proposal.number
        # Nothing enqueues baselines yet, so every proposal is a point.
        assert proposal.choice is not None
        config, same = _configure(setup, proposal.choice, outcomes)
        if same is not None:
            study.tell_repeat(number, same)
            repeats += 1
            continue
        repeats = 0
        watch.on_trial(number, config)
        outcome = try_config(setup, config, runner, number)
        _tell(study, number, outcome)
        outcomes.append(NumberedOutcome(number=number, outcome=outcome))
        watch.on_outcome(outcomes)
    return tuple(outcomes)


def study_identity(setup: StudySetup) -> dict[str, str]:
    """What a study must not change between two starts."""
    base = to_plain(setup.base)
    # Where the file lies may change; what is in it is the data's fingerprint.
    base["data"]["path"] = ""
    return {
        "data": setup.data.dataset.fingerprint[:16],
        "base config": _fingerprint(base),
        "search space": _fingerprint(to_plain(setup.space)),
        "device": setup.installation.device,
        "MindSpore version": setup.installation.versions.get("mindspore", "unknown"),
    }


def configure(setup: StudySetup, choice: Choice) -> TrainConfig:
    """The whole config of a choice; boundaries are not solved yet."""
    overrides = choice_overrides(choice, setup.data.longest)
    overrides["train.tokens_per_update"] = tokens_per_update(
        setup.space, setup.base, setup.data.longest
    )
    return override_config(setup.base, overrides, source="search space")


def try_config(
    setup: StudySetup, config: TrainConfig, runner: TrialRunner, number: int
) -> Outcome:
    """Plan a config and measure it; whatever goes wrong is an outcome."""
    try:
        plan = plan_batches(setup.data.lengths, config)
    except BadInputError as error:
        return _outcome(config, None, TrialResult(status="refused", reason=str(error)))
    stats = count_plan(plan, config.train.tokens_per_update)
    is_static = config.graph.mode == "static"
    if is_static and len(plan.shapes) > setup.space.max_static_shapes:
        reason = (
            f"{len(plan.shapes)} static shapes, over max_static_shapes "
            f"{setup.space.max_static_shapes}"
        )
        return _outcome(config, (plan, stats), TrialResult(status="refused", reason=reason))
    spec = TrialSpec(
        config=config,
        lengths_file=str(setup.folder.lengths.absolute()),
        max_shapes=len(plan.shapes) if is_static else MAX_MEASURED_SHAPES_DYNAMIC,
        timed_steps=TIMED_STEPS,
        time_limit_s=setup.time_limit_s,
        memory_limit_bytes=setup.memory_limit_bytes,
    )
    return _outcome(config, (plan, stats), runner.run(spec, setup.folder.trial(number)))


def _configure(
    setup: StudySetup, choice: Choice, outcomes: Sequence[NumberedOutcome]
) -> tuple[TrainConfig, int | None]:
    """The config of a choice, and the number of the trial that had the same one."""
    config = configure(setup, choice)
    # `try_config` meets the same error and makes it an outcome.
    with contextlib.suppress(BadInputError):
        config = resolve_boundaries(setup.data.lengths, config)
    for item in outcomes:
        if item.outcome.config == config:
            return config, item.number
    return config, None


def _enqueue_untried(study: OptunaStudy, setup: StudySetup) -> bool:
    """Propose a point that was never tried, drawn at random; False if there is none left."""
    tried = study.tried()
    untried = [choice for choice in all_choices(setup.space) if choice not in tried]
    if not untried:
        return False
    study.enqueue([random.Random(f"{setup.seed} {len(untried)}").choice(untried)])
    return True


def _outcome(
    config: TrainConfig, planned: tuple[BatchPlan, PlanStats] | None, result: TrialResult
) -> Outcome:
    estimate = None
    if result.status == "ok" and planned and result.update:
        estimate = estimate_run(planned[1], config, result.shapes, result.update)
    return Outcome(
        config=config,
        status=result.status,
        reason=result.reason,
        num_measured_shapes=len(result.shapes),
        shapes=planned[0].shapes if planned else (),
        effective_token_fraction=planned[1].effective_token_fraction if planned else 0.0,
        num_steps=planned[1].num_steps if planned else 0,
        length_autocorrelation=planned[1].length_autocorrelation if planned else 0.0,
        estimate=estimate,
        peak_bytes=result.peak_bytes,
        memory_kind=result.memory_kind,
        wall_s=result.wall_s,
    )


def _tell(study: OptunaStudy, number: int, outcome: Outcome) -> None:
    plain = outcome_to_plain(outcome)
    if outcome.real_tokens_per_s is None:
        study.tell_failed(number, plain)
    else:
        study.tell_measured(number, outcome.real_tokens_per_s, plain)


def _fingerprint(plain: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]

"""The only place that imports Optuna: proposals out, outcomes in, all state in its storage.

A trial is told exactly once, after its process has ended. A tuner that was killed leaves its trial
running in the storage: the next one marks it as failed and proposes the same point again. Failures
are told as pruned with a violated constraint: TPE learns from complete and pruned trials only, so
a plain failure would teach it nothing and the same corner would be proposed again.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from tuner.config.codec import to_plain
from tuner.config.schema import AlignRule
from tuner.errors import BadInputError
from tuner.study.space import Align, Choice, SearchSpace

STUDY_NAME = "varseq-tune"
OUTCOME_KEY = "outcome"
REPEAT_KEY = "repeat_of"
IDENTITY_KEY = "identity"
ENQUEUED_KEY = "enqueued"
TOLD_STATES = (TrialState.COMPLETE, TrialState.PRUNED)


Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class ToldTrial:
    """A trial that has its outcome.

    Attributes:
        number: In the study.
        choice: The point that was tried.
        outcome: The plain data that was told with it.
    """

    number: int
    choice: Choice
    outcome: Mapping[str, Any]


def _with_storage_errors(
    method: Callable[Concatenate[OptunaStudy, Parameters], Answer],
) -> Callable[Concatenate[OptunaStudy, Parameters], Answer]:
    """Turn what the storage raises (a full disk, a file that is gone) into one line."""

    @functools.wraps(method)
    def wrapped(
        self: OptunaStudy, /, *arguments: Parameters.args, **options: Parameters.kwargs
    ) -> Answer:
        try:
            return method(self, *arguments, **options)
        except optuna.exceptions.StorageInternalError as error:
            cause = error.__cause__ or error
            raise BadInputError(
                f"{self.path} cannot be read or written: {str(cause).splitlines()[0]}",
                fix="make room for it; the same command goes on from the finished trials",
            ) from error

    return wrapped


class OptunaStudy:
    """One study in one storage."""

    def __init__(self, storage: Path, space: SearchSpace, seed: int) -> None:
        """Open or create.

        Args:
            storage: SQLite file.
            space: What may be proposed, already fitted to the device.
            seed: Of the sampler.

        Raises:
            BadInputError: the file is not a study.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        self._space = space
        self.path = storage
        self._study = _open(storage)
        # With the trials so far in the seed, a resumed study does not propose the same again.
        self._study.sampler = optuna.samplers.TPESampler(
            seed=seed + len(self._study.trials),
            multivariate=True,
            group=True,
            n_startup_trials=8,
        )
        self._running: dict[int, Trial] = {}

    @_with_storage_errors
    def check_identity(self, identity: Mapping[str, str]) -> None:
        """Refuse to go on with other data, space, base config or device than the study's.

        Args:
            identity: What must stay equal, name -> fingerprint or value; kept by a new study.

        Raises:
            BadInputError: something differs.
        """
        known = self._study.user_attrs.get(IDENTITY_KEY)
        if known is None:
            self._study.set_user_attr(IDENTITY_KEY, dict(identity))
            return
        for name, value in identity.items():
            if known.get(name) != value:
                raise BadInputError(
                    f"{self.path} is a study of another {name} ({known.get(name)}, now {value})",
                    fix="give --new-study to start over, or another --out",
                )

    @_with_storage_errors
    def recover(self) -> list[int]:
        """Mark trials that a killed tuner left running as failed, and propose them again first.

        Returns:
            Their numbers.
        """
        interrupted = self._study.get_trials(states=(TrialState.RUNNING,))
        for trial in interrupted:
            self._study.tell(trial.number, state=TrialState.FAIL)
        known = [params for trial in interrupted if (params := _known_params(trial))]
        self.enqueue([_from_params(params) for params in known])
        return [trial.number for trial in interrupted]

    @_with_storage_errors
    def enqueue(self, choices: Sequence[Choice]) -> None:
        """Propose these first; those that wait already or were tried before are left out."""
        # Not Optuna's skip_if_exists: it takes an interrupted trial for a tried one.
        present = [
            _known_params(trial) for trial in self._study.trials if trial.state != TrialState.FAIL
        ]
        for choice in choices:
            params = _to_params(choice)
            if params not in present:
                self._study.enqueue_trial(params, user_attrs={ENQUEUED_KEY: params})
                present.append(params)

    @_with_storage_errors
    def ask(self) -> tuple[int, Choice]:
        """The next proposal and its trial number."""
        trial = self._study.ask()
        choice = _suggest(trial, self._space)
        self._running[trial.number] = trial
        return trial.number, choice

    @_with_storage_errors
    def tell_measured(
        self, number: int, real_tokens_per_s: float, outcome: Mapping[str, Any]
    ) -> None:
        """Tell a trial that was measured: the value to maximise, and what else to keep."""
        trial = self._running.pop(number)
        trial.set_constraint("failed", 0.0)
        trial.set_user_attr(OUTCOME_KEY, dict(outcome))
        self._study.tell(trial, real_tokens_per_s)

    @_with_storage_errors
    def tell_failed(self, number: int, outcome: Mapping[str, Any]) -> None:
        """Tell a trial that failed: pruned, with a violated constraint."""
        trial = self._running.pop(number)
        trial.set_constraint("failed", 1.0)
        trial.set_user_attr(OUTCOME_KEY, dict(outcome))
        self._study.tell(trial, state=TrialState.PRUNED)

    @_with_storage_errors
    def tell_repeat(self, number: int, of_number: int) -> None:
        """Tell a proposal whose config was tried before: the same value again, without a trial."""
        before = self._study.trials[of_number]
        trial = self._running.pop(number)
        trial.set_user_attr(REPEAT_KEY, of_number)
        if before.state == TrialState.COMPLETE:
            trial.set_constraint("failed", 0.0)
            self._study.tell(trial, before.value)
        else:
            trial.set_constraint("failed", 1.0)
            self._study.tell(trial, state=TrialState.PRUNED)

    @_with_storage_errors
    def told(self) -> list[ToldTrial]:
        """All trials with an outcome, in order; repeats and interrupted ones have none."""
        return [
            ToldTrial(
                number=trial.number,
                choice=_from_params(trial.params),
                outcome=trial.user_attrs[OUTCOME_KEY],
            )
            for trial in self._study.trials
            if OUTCOME_KEY in trial.user_attrs and trial.state in TOLD_STATES
        ]

    @_with_storage_errors
    def tried(self) -> set[Choice]:
        """Every point that has its value: told trials and repeats."""
        return {_from_params(trial.params) for trial in self._study.get_trials(states=TOLD_STATES)}


def _open(storage: Path) -> optuna.Study:
    try:
        return optuna.create_study(
            storage=f"sqlite:///{storage}",
            study_name=STUDY_NAME,
            direction="maximize",
            load_if_exists=True,
        )
    except Exception as error:
        # Whatever SQLAlchemy or Optuna says of a broken file, the way out is the same.
        reason = str(error).splitlines()[0]
        raise BadInputError(
            f"{storage} cannot be opened as a study: {reason}",
            fix="give --new-study to start over, or another --out",
        ) from error


def _suggest(trial: Trial, space: SearchSpace) -> Choice:
    strategy = trial.suggest_categorical("strategy", list(space.strategy))
    buckets = None
    if strategy == "bucketed":
        buckets = trial.suggest_int("num_buckets", space.num_buckets.low, space.num_buckets.high)
    return Choice(
        strategy=strategy,
        num_buckets=buckets,
        align=_parse_align(
            trial.suggest_categorical("align", [_format_align(align) for align in space.align])
        ),
        longest_rows_per_batch=trial.suggest_categorical(
            "longest_rows_per_batch", list(space.longest_rows_per_batch)
        ),
        graph_mode=trial.suggest_categorical("graph_mode", list(space.graph_mode)),
        jit_level=trial.suggest_categorical("jit_level", list(space.jit_level)),
    )


def _to_params(choice: Choice) -> dict[str, Any]:
    params: dict[str, Any] = {
        "strategy": choice.strategy,
        "align": _format_align(choice.align),
        "longest_rows_per_batch": choice.longest_rows_per_batch,
        "graph_mode": choice.graph_mode,
        "jit_level": choice.jit_level,
    }
    if choice.num_buckets is not None:
        params["num_buckets"] = choice.num_buckets
    return params


def _from_params(params: Mapping[str, Any]) -> Choice:
    return Choice(
        strategy=params["strategy"],
        num_buckets=params.get("num_buckets"),
        align=_parse_align(params["align"]),
        longest_rows_per_batch=params["longest_rows_per_batch"],
        graph_mode=params["graph_mode"],
        jit_level=params["jit_level"],
    )


def _known_params(trial: FrozenTrial) -> dict[str, Any] | None:
    """The point of a trial in any state; None if the tuner was killed before it was known."""
    params: dict[str, Any] = trial.user_attrs.get(ENQUEUED_KEY, trial.params)
    needed = {"strategy", "align", "longest_rows_per_batch", "graph_mode", "jit_level"}
    return params if needed <= set(params) else None


def _format_align(align: Align) -> str:
    """Optuna's categories are plain values: a number as it is, a table as JSON."""
    plain = align if isinstance(align, int) else [to_plain(rule) for rule in align]
    return json.dumps(plain)


def _parse_align(text: str) -> Align:
    plain = json.loads(text)
    return plain if isinstance(plain, int) else tuple(AlignRule(**rule) for rule in plain)

"""The study of many processes on one storage: proposals out, outcomes in, all state in there.

- A trial is told exactly once, after its process has ended. A tuner that was killed leaves its
  trial running in the storage: another marks it as failed once the owner is dead, and proposes
  the same point again. Live owners are left alone.
- Failures are told as pruned with a violated constraint: TPE learns from complete and pruned
  trials only, so a plain failure would teach it nothing and the same corner would be proposed
  again.
- What must happen once over all processes (a baseline, an enqueued point, a place among the
  trials that were asked for) goes to the lowest trial number: every storage gives them one after
  the other.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from tuner.errors import BadInputError
from tuner.study.liveness import this_process
from tuner.study.optuna_claims import Claims, with_claim, with_granted
from tuner.study.optuna_json import join_attribute, split_attribute
from tuner.study.optuna_owner import BEAT_KEY, OWNER_KEY, Beats, dead_trials, give_up, is_dead
from tuner.study.optuna_params import Sensitive, suggest_choice, to_params
from tuner.study.optuna_sampler import BASELINE_KEY, PointSampler
from tuner.study.optuna_storage import (
    describe_storage,
    open_storage,
    open_study,
    with_storage_errors,
)
from tuner.study.optuna_trials import (
    ATTRIBUTES_KEY,
    CLAIM_KEY,
    ENQUEUED_KEY,
    OUTCOME_KEY,
    REPEAT_KEY,
    TOLD_STATES,
    baseline_unit,
    counts_as_trial,
    is_second,
    known_choice,
    point_unit,
    read_proposal,
    read_running,
    read_told,
    unit_of,
    violation_of,
)
from tuner.study.proposal import Proposal, RunningTrial, ToldTrial
from tuner.study.space import Choice, SearchSpace

STUDY_NAME = "varseq-tune"
IDENTITY_KEY = "identity"
NOTE_PREFIX = "note:"
CONSTRAINT = "violation"


class OptunaStudy:
    """One study in one storage, as one process sees it.

    A process makes one of these for a study: it takes the running trials of an earlier one in the
    same process for left over.
    """

    def __init__(self, storage: str | Path, name: str, space: SearchSpace, seed: int) -> None:
        """Open or create.

        Args:
            storage: As in `open_storage`.
            name: Of the study in it.
            space: What may be proposed, already fitted to the device.
            seed: Of the sampler.

        Raises:
            BadInputError: the storage cannot be opened, or is not one of Optuna.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        self.place = describe_storage(storage)
        self._storage = open_storage(storage)
        self._study = open_study(self._storage, storage, name, PointSampler(seed))
        self._space = space
        self._sensitive: Sensitive = {}
        self._running: dict[int, Trial] = {}
        self._beats = Beats()
        self._told: dict[int, ToldTrial] = {}
        self._claims = Claims(self._storage, name)

    @with_storage_errors
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
                    f"{self.place} is a study of another {name} ({known.get(name)}, now {value})",
                    fix="give --new-study to start over, or another --study/--out",
                )

    def set_sensitive(self, groups: Sensitive) -> None:
        """Op groups that proposals from now on decide about.

        Args:
            groups: Compute dtype -> groups; those that are not named run in the compute dtype.
        """
        self._sensitive = dict(groups)

    @with_storage_errors
    def set_note(self, key: str, value: Any) -> None:
        """Keep something about the whole study; of several processes the last one's stays.

        Args:
            key: Its name.
            value: Plain JSON of any size.
        """
        for name, part in split_attribute(NOTE_PREFIX + key, value):
            self._study.set_user_attr(name, part)

    @with_storage_errors
    def note(self, key: str) -> Any:
        """What was kept under a name by whatever process; None if nothing was."""
        return join_attribute(self._study.user_attrs, NOTE_PREFIX + key)

    @with_storage_errors
    def recover(self) -> list[int]:
        """Mark trials of dead processes as failed, and propose them again first.

        Returns:
            The numbers of those that this call has taken over.
        """
        found = dead_trials(self._study, self._running)
        dead = [trial for trial in found if give_up(self._study, trial)]
        for trial in dead:
            if (baseline := trial.user_attrs.get(BASELINE_KEY)) is not None:
                self.enqueue_baselines([baseline])
            elif (choice := known_choice(trial)) is not None:
                self.enqueue([choice], [trial.user_attrs.get(ATTRIBUTES_KEY, {})])
        return [trial.number for trial in dead]

    @with_storage_errors
    def enqueue(
        self, choices: Sequence[Choice], attributes: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Propose these first; those that wait already or were tried before are left out.

        Args:
            choices: Points.
            attributes: Of each, plain JSON that its proposal carries; `boundaries` among them are
                those of the proposal. The same point with other attributes is another one.
        """
        # Not Optuna's skip_if_exists: it takes an interrupted trial for a tried one.
        present = {unit_of(trial) for trial in self._valid()}
        for choice, attached in zip(choices, attributes or [{}] * len(choices), strict=True):
            unit = point_unit(choice, attached)
            if unit in present:
                continue
            present.add(unit)
            params = to_params(choice)
            more = {ATTRIBUTES_KEY: dict(attached)} if attached else {}
            self._study.enqueue_trial(params, user_attrs={ENQUEUED_KEY: params, **more})

    @with_storage_errors
    def enqueue_baselines(self, names: Iterable[str]) -> None:
        """Propose the baselines of these names first, each once in the study."""
        present = {unit_of(trial) for trial in self._valid()}
        for name in names:
            if baseline_unit(name) not in present:
                self._study.enqueue_trial({}, user_attrs={BASELINE_KEY: name})

    @with_storage_errors
    def ask(self) -> Proposal:
        """The next proposal."""
        while True:
            trial = self._study.ask()
            trial.set_user_attr(OWNER_KEY, this_process())
            # Two processes may have enqueued the same thing at the same time.
            if not is_second(trial.number, self._valid()):
                break
            self._study.tell(trial, state=TrialState.FAIL)
        attributes = trial.user_attrs
        choice = None
        if BASELINE_KEY not in attributes:
            fixed = attributes.get(ENQUEUED_KEY, {})
            choice = suggest_choice(trial, self._space, self._sensitive, fixed)
        self._running[trial.number] = trial
        # The first beat says as well that the point is known.
        self.beat(trial.number)
        return read_proposal(trial.number, choice, attributes)

    @with_storage_errors
    def ask_within(self, max_trials: int) -> Proposal | None:
        """The next proposal, or None once all processes together have as many trials as wanted.

        Args:
            max_trials: Trials in all, told and running, without repeats; baselines come on top.
        """
        while self._count() < max_trials or self._has_waiting_baseline():
            proposal = self.ask()
            # Another process may have asked at the same moment: the lower number stays.
            if proposal.baseline is not None or self._count(proposal.number) < max_trials:
                return proposal
            self._study.tell(self._running.pop(proposal.number), state=TrialState.FAIL)
        return None

    @with_storage_errors
    def beat(self, number: int) -> bool:
        """Say that a trial is being worked on; cheap enough to be called every second.

        Returns:
            False if another process has taken the trial over.
        """
        try:
            if self._beats.is_due(number):
                self._running[number].set_user_attr(BEAT_KEY, time.time())
        except optuna.exceptions.UpdateFinishedTrialError:
            return False
        return True

    @with_storage_errors
    def report(self, number: int, step: int, real_tokens_per_s: float) -> None:
        """Keep a partial estimate of a trial's value, for the dashboard; `step` rises from 0."""
        self._running[number].report(real_tokens_per_s, step)

    @with_storage_errors
    def tell_measured(
        self,
        number: int,
        real_tokens_per_s: float,
        outcome: Mapping[str, Any],
        violation: float = 0.0,
    ) -> bool:
        """Tell a trial that was measured: the value to maximise, and what else to keep.

        Args:
            number: Of the trial.
            real_tokens_per_s: The value.
            outcome: Plain JSON of any size.
            violation: By how much it breaks a constraint; feasible at 0 or below.

        Returns:
            False if another process has taken the trial over: then nothing is kept.
        """
        return self._finish(number, violation, real_tokens_per_s, outcome)

    @with_storage_errors
    def tell_failed(self, number: int, outcome: Mapping[str, Any]) -> bool:
        """Tell a trial that failed: pruned, with a violated constraint; as `tell_measured`."""
        return self._finish(number, 1.0, None, outcome)

    @with_storage_errors
    def tell_pruned(self, number: int, outcome: Mapping[str, Any]) -> bool:
        """Tell a trial that was ended because it is slow; as `tell_measured`."""
        return self._finish(number, 0.0, None, outcome)

    @with_storage_errors
    def tell_repeat(self, number: int, of_number: int) -> bool:
        """Tell a proposal whose config was tried before: the same value again, without a trial.

        Args:
            number: Of the proposal.
            of_number: Of the trial; while that one runs there is no value, and the proposal is
                dropped.
        """
        before = self._study.get_trials(deepcopy=False)[of_number]
        trial = self._running[number]
        if before.state not in TOLD_STATES:
            return give_up(self._study, self._running.pop(number))
        trial.set_user_attr(REPEAT_KEY, of_number)
        for step, value in before.intermediate_values.items():
            trial.report(value, step)
        value = before.value if before.state == TrialState.COMPLETE else None
        return self._finish(number, violation_of(before), value, None)

    @with_storage_errors
    def told(self) -> list[ToldTrial]:
        """All trials with an outcome, in order; repeats and interrupted ones have none."""
        finished = self._study.get_trials(deepcopy=False, states=TOLD_STATES)
        for trial in finished:
            if trial.number not in self._told and OUTCOME_KEY in trial.user_attrs:
                self._told[trial.number] = read_told(trial)
        return [self._told[number] for number in sorted(self._told)]

    @with_storage_errors
    def tried(self) -> set[Choice]:
        """Every point that has its value: told trials and repeats."""
        finished = self._study.get_trials(deepcopy=False, states=TOLD_STATES)
        return {choice for trial in finished if (choice := known_choice(trial))}

    @with_storage_errors
    def has_waiting(self) -> bool:
        """Whether something was enqueued that nobody has asked for yet."""
        return bool(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    @with_storage_errors
    def running(self) -> list[RunningTrial]:
        """The trials that live processes are busy with, this one's included."""
        return [read_running(trial, trial.number in self._running) for trial in self._living()]

    @with_storage_errors
    def count_finished(self) -> int:
        """Trials that are told or that others are running; without baselines and repeats."""
        return self._count() - sum(trial.own and not trial.baseline for trial in self.running())

    @with_storage_errors
    def claim(self, number: int, claim: Mapping[str, Any]) -> None:
        """Keep what a trial is going to measure, for others to see.

        Args:
            number: Of the trial.
            claim: Plain JSON; what `claim_free` has granted stays beside it.
        """
        trial = self._running[number]
        trial.set_user_attr(CLAIM_KEY, with_claim(trial.user_attrs, claim))

    @with_storage_errors
    def claims(self) -> dict[int, Mapping[str, Any]]:
        """The claims of all running trials of live processes, by trial number."""
        return {trial.number: trial.claim for trial in self.running() if trial.claim}

    @with_storage_errors
    def claim_free(self, number: int, wanted: Sequence[str]) -> tuple[str, ...]:
        """Claim things to measure, and learn which of them are this trial's.

        Args:
            number: Of the trial.
            wanted: Their names, equal in all processes.

        Returns:
            Those that no running trial of another process has claimed before, in order.
        """
        entry = self._claims.enter(number, wanted)
        others = {trial.number: trial for trial in self._living() if trial.number != number}
        free = self._claims.free_items(entry, others)
        trial = self._running[number]
        trial.set_user_attr(CLAIM_KEY, with_granted(trial.user_attrs, entry.number, free))
        return free

    def _finish(
        self,
        number: int,
        violation: float,
        value: float | None,
        outcome: Mapping[str, Any] | None,
    ) -> bool:
        trial = self._running[number]
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        try:
            trial.set_constraint(CONSTRAINT, violation)
            # The form before Optuna 5, the only one that the dashboard (0.21) shows.
            self._storage.set_trial_system_attr(trial._trial_id, "constraints", [violation])
            if outcome is not None:
                for key, part in split_attribute(OUTCOME_KEY, dict(outcome)):
                    trial.set_user_attr(key, part)
            self._study.tell(trial, value, state=state)
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
            # Another process held this one for dead and closed its trial; else it is our error.
            if self._study.get_trials(deepcopy=False)[number].state == TrialState.RUNNING:
                raise
            return False
        finally:
            self._running.pop(number)
        return True

    def _valid(self) -> list[FrozenTrial]:
        """All trials but those that were given up."""
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.state != TrialState.FAIL]

    def _living(self) -> list[FrozenTrial]:
        """Trials that a live process is busy with."""
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [trial for trial in running if not is_dead(trial, self._running)]

    def _count(self, before: int | None = None) -> int:
        """Trials that count and have a lower number; None for all."""
        return sum(
            counts_as_trial(trial) and (before is None or trial.number < before)
            for trial in self._study.get_trials(deepcopy=False)
        )

    def _has_waiting_baseline(self) -> bool:
        waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return any(BASELINE_KEY in trial.user_attrs for trial in waiting)

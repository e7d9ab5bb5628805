"""What is tried next, and as which unit of work.

Baselines come first. Then come in turn the optimum under all that is known (guide.py), a proposal
of Optuna's, which also looks where the cost model sees nothing, the point that may be the fastest
by the lower end of its interval, of the kind that was proposed the least, and another of Optuna's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tuner.batching.align import align_length
from tuner.config.override import override_config
from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.simulate.cost_book import CostBook
from tuner.simulate.measurement import CostKey
from tuner.study.baselines import (
    TEN_QUANTILES,
    YOUR_CONFIG,
    baseline_names,
    baseline_overrides,
)
from tuner.study.fill import FILLED, config_to_fill, needs_filling
from tuner.study.guide import WORTH_ANOTHER_TRIAL, Guide, configure, with_boundaries
from tuner.study.kinds import least_proposed_first
from tuner.study.knowledge import Knowledge
from tuner.study.optuna_study import OptunaStudy
from tuner.study.precision import SENSITIVITY, low_dtypes
from tuner.study.proposal import Proposal
from tuner.study.setup import StudySetup
from tuner.study.space import Choice, all_choices, tokens_per_update
from tuner.study.unit import Unit, half_budget, is_hopeless, partial_estimate, plan_unit, refused
from tuner.trial.record import TrialResult

# A sampler that has found its corner proposes what was tried before; after so many in a row a
# point that was not is drawn. Repeats cost milliseconds.
MAX_REPEATS_IN_A_ROW = 4


class Proposer:
    """The next unit of one tuner."""

    def __init__(
        self,
        setup: StudySetup,
        study: OptunaStudy,
        knowledge: Knowledge,
        on_notice: Callable[[str], None],
    ) -> None:
        """Enqueue what every study begins with.

        Args:
            setup: What the study is about.
            study: Keeps who tries what.
            knowledge: Grows while the study runs.
            on_notice: Told when there is nothing left to try.
        """
        self._setup = setup
        self._study = study
        self._knowledge = knowledge
        self._on_notice = on_notice
        self._guide = Guide(setup)
        self._random = random.Random(setup.seed)
        self._repeats = 0
        self._turn = 0
        self._handed_out: dict[int, TrainConfig] = {}
        names = baseline_names(setup.has_own_config)
        passes = (SENSITIVITY + dtype for dtype in low_dtypes(setup))
        study.enqueue_baselines([*names, *passes])

    def next(self) -> Unit | None:
        """The next unit, planned.

        Returns:
            None if the study has its trials, its space no more points, or if what there is left to
            try is known only once a trial that runs has ended.
        """
        while self._enqueue():
            proposal = self._study.ask_within(self._setup.trials)
            if proposal is None:
                return None
            unit = self._plan(proposal)
            if unit is not None:
                if unit.figures is not None:
                    self._handed_out[unit.number] = unit.config
                return unit
            if self._repeats > MAX_REPEATS_IN_A_ROW and self._running():
                return None
        return None

    def _running(self) -> dict[int, TrainConfig]:
        """Configs of the trials that this tuner is busy with."""
        told = {item.number for item in self._knowledge.tried()}
        return {number: item for number, item in self._handed_out.items() if number not in told}

    def _enqueue(self) -> bool:
        """Enqueue a point when it is its turn; False if there is no other one left."""
        if self._study.has_waiting():
            return True
        if not self._study.running() and needs_filling(self._setup, self._knowledge.outcomes()):
            self._study.enqueue_baselines([FILLED])
        # A point worked out now for a later start would have stale boundaries then.
        if self._study.count_finished() >= self._setup.trials:
            return True
        self._study.set_sensitive(self._knowledge.groups_to_decide())
        if self._repeats >= MAX_REPEATS_IN_A_ROW:
            if not (self._enqueue_best() or self._enqueue_any()):
                if not self._running():
                    count = len({item.outcome.config for item in self._knowledge.tried()})
                    self._on_notice(f"the space holds no more than {count} different configs")
                return False
        elif self._turn % 2 == 0:
            self._enqueue_best(at_lower_end=self._turn % 4 == 2)
        self._turn += 1
        return True

    def _enqueue_best(self, *, at_lower_end: bool = False) -> bool:
        """The untried point that is or may be the fastest, with its boundaries."""
        book = self._knowledge.book
        candidates = self._guide.candidates(book, self._knowledge.precisions())
        points = self._guide.rank(book, candidates, at_lower_end=at_lower_end)
        if at_lower_end:
            proposed = [
                item.outcome.config
                for item in self._knowledge.tried()
                if item.outcome.baseline is None
            ]
            points = least_proposed_first(points, proposed, self._knowledge.best_speed())
        for point in points:
            if point.fits and self._same_as(point.config) is None:
                self._study.enqueue([point.choice], [{"boundaries": list(point.boundaries)}])
                return True
        return False

    def _enqueue_any(self) -> bool:
        """A point that was never asked for, drawn at random."""
        tried = self._study.tried() | {trial.choice for trial in self._study.running()}
        untried = [
            choice
            for plain in all_choices(self._setup.space)
            for dtype, groups in self._knowledge.precisions()
            if (choice := replace(plain, compute_dtype=dtype, fp32_ops=groups)) not in tried
        ]
        if not untried:
            return False
        self._study.enqueue([self._random.choice(untried)])
        return True

    def _plan(self, proposal: Proposal) -> Unit | None:
        """The unit of a proposal; None if it is told already, as the repeat of another."""
        number, baseline = proposal.number, proposal.baseline
        if baseline is not None and baseline.startswith(SENSITIVITY):
            key = CostKey.of(self._setup.base, self._setup.installation.device)
            return Unit(number=number, config=self._setup.base, key=key, baseline=baseline)
        if baseline == FILLED:
            return plan_unit(self._setup, number, self._to_fill(), CostBook(), FILLED)
        if baseline is not None:
            self._repeats = 0
            return self._claimed(self._with_precision(self._baseline_unit(number, baseline)))
        if proposal.choice is not None:
            config = self._configure(proposal.choice, proposal.boundaries)
            same = self._same_as(config)
            if same is not None:
                self._study.tell_repeat(number, same)
                self._repeats += 1
                return None
        self._repeats = 0
        unit = plan_unit(self._setup, number, config, self._knowledge.book)
        return self._claimed(self._unless_hopeless(self._with_precision(unit)))

    def _baseline_unit(self, number: int, name: str) -> Unit:
        """With half the token budget as often as its shapes together would not fit in memory.

        A baseline that cannot run is none to hold against.
        """
        unit = self._planned(number, name, self._baseline(name))
        smaller = half_budget(unit.config, self._setup)
        while name != YOUR_CONFIG and _is_over_memory(unit) and smaller is not None:
            unit = self._planned(number, name, smaller)
            smaller = half_budget(smaller, self._setup)
        return unit

    def _planned(self, number: int, name: str, config: TrainConfig) -> Unit:
        return plan_unit(self._setup, number, config, self._knowledge.book, name)

    def _unless_hopeless(self, unit: Unit) -> Unit:
        """Not measured where what is known says already that it cannot become the best."""
        if not unit.needs_process:
            return unit
        estimate = partial_estimate(unit, (), self._knowledge.book)
        best = self._knowledge.best_speed()
        if not is_hopeless(estimate, best):
            return unit
        at_most = estimate.estimated_real_tokens_per_s * estimate.estimated_run_s
        reason = (
            f"not measured: at most {at_most / estimate.low_run_s:,.0f} real tokens/s by what is "
            f"known, the best reaches {best:,.0f}"
        )
        self._study.report(unit.number, 0, estimate.estimated_real_tokens_per_s)
        unit = replace(unit, shapes=())
        return replace(unit, outcome=unit.finish(TrialResult(status="pruned", reason=reason)))

    def _claimed(self, unit: Unit) -> Unit:
        """Of what it would measure what no other tuner is measuring."""
        wanted = {unit.claim_of(shape): shape for shape in unit.shapes}
        if not wanted:
            return unit
        free = self._study.claim_free(unit.number, tuple(wanted))
        return replace(unit, shapes=tuple(wanted[name] for name in free))

    def _with_precision(self, unit: Unit) -> Unit:
        """What is known of its precision; what is known to be too far from fp32 is refused."""
        precision = unit.config.precision
        if precision.compute_dtype == "fp32" or unit.outcome is not None:
            return unit
        known = self._knowledge.check_of(precision)
        if known is None:
            return replace(unit, checks_precision=True)
        unit = replace(unit, precision=known[0])
        return refused(unit, known[1]) if known[1] else unit

    def _configure(self, choice: Choice, boundaries: tuple[int, ...] | None) -> TrainConfig:
        if boundaries is not None:
            config = configure(self._setup, choice)
            return with_boundaries(config, boundaries) if boundaries else config
        try:
            return self._guide.resolve(choice, self._knowledge.book)
        except BadInputError:
            # Planning meets the same error and makes it an outcome.
            return configure(self._setup, choice)

    def _baseline(self, name: str) -> TrainConfig:
        setup = self._setup
        overrides = baseline_overrides(name, setup.space, setup.data.longest)
        overrides["train.tokens_per_update"] = tokens_per_update(
            setup.space, setup.base, setup.data.longest
        )
        return override_config(setup.base, overrides, source=name)

    def _to_fill(self) -> TrainConfig:
        # Memory may be short before any buckets were planned: then those of the baseline.
        return config_to_fill(self._knowledge.outcomes()) or self._baseline(TEN_QUANTILES)

    def _same_as(self, config: TrainConfig) -> int | None:
        """The trial that has this config, or boundaries so near that a trial would not tell."""
        longest = self._setup.data.longest
        wanted = as_planned(config, longest)
        tried = {item.number: item.outcome.config for item in self._knowledge.tried()}
        for number, other in (tried | self._running()).items():
            if as_planned(other, longest) == wanted:
                return number
            if _differ_in_boundaries(other, config) and not self._is_worth(other, config):
                return number
        return None

    def _is_worth(self, tried: TrainConfig, config: TrainConfig) -> bool:
        book = self._knowledge.book
        before_s = self._guide.run_s(tried, book)
        return self._guide.run_s(config, book) < before_s * (1.0 - WORTH_ANOTHER_TRIAL)


def as_planned(config: TrainConfig, longest: int) -> TrainConfig:
    """The config with an alignment that says no more than its plan does.

    Boundaries that are written out are aligned already; of `fixed` only the aligned length of the
    longest row counts. Two configs that plan the same batches are equal in this form.

    Args:
        config: Boundaries resolved.
        longest: Tokens of the longest row after truncation.
    """
    batching = config.batching
    if batching.strategy == "fixed":
        update = {"align": align_length(longest, batching.align)}
    elif batching.boundaries:
        update = {"align": 1}
    else:
        return config
    return config.model_copy(update={"batching": batching.model_copy(update=update)})


def _differ_in_boundaries(one: TrainConfig, other: TrainConfig) -> bool:
    return len(one.batching.boundaries) == len(other.batching.boundaries) and (
        with_boundaries(one, ()) == with_boundaries(other, ())
    )


def _is_over_memory(unit: Unit) -> bool:
    return unit.outcome is not None and unit.outcome.is_over_memory

"""Confirmation: the best few and the baselines measured again, whole, interleaved, repeated.

Every measurement is a fresh process that compiles every shape of the plan and steps at each; its
run seconds come from its own measurements alone. Rounds are interleaved, so that a machine that
slows down slows all candidates down. Several tuners share the rounds of one study.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from tuner.batching.grouping import Shape
from tuner.simulate.cost_book import CostBook
from tuner.simulate.estimate import estimate_run
from tuner.simulate.measurement import CostKey, ProcessMeasurement, ShapeMeasurement
from tuner.simulate.to_measure import largest_first
from tuner.study.choose import choose_best, is_feasible, simplicity
from tuner.study.kinds import kind_of
from tuner.study.outcome import NumberedOutcome, Outcome
from tuner.study.setup import StudySetup
from tuner.study.unit import TIMED_STEPS
from tuner.study.verdict import Candidate, Verdict, judge
from tuner.trial.folder import TrialFolder
from tuner.trial.record import TrialSpec
from tuner.trial.runner import TrialRunner

if TYPE_CHECKING:
    from tuner.study.optuna_board import ConfirmationBoard
    from tuner.study.proposal import ConfirmationRun

BEAT_S = 1.0
"""Between two signs of life."""

NUM_BEST = 3
"""Proposals that are confirmed at most, the baselines aside."""
CALLS_BEFORE_STEADY = 5
"""Of a shape in a trial, about: to foretell how long a round takes."""
MANY_SHAPES = 12
FEW_TIMED_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Round:
    """One measurement of one candidate.

    Attributes:
        candidate: Its name.
        number: Of the round, from 1.
        status: As in TrialResult.
        reason: Why it failed; empty if it did not.
        run_s: Seconds of the planned run by this process's measurements; 0 if it failed.
        compile_s: Of that, all compiles.
        real_tokens_per_s: Real tokens of the run over run_s; 0 if it failed.
        shapes: All that were measured.
        peak_bytes: Largest memory of the process.
        wall_s: Wall seconds of the process.
        other_cores: Cores that other programs took meanwhile, on average.
    """

    candidate: str
    number: int
    status: str
    reason: str = ""
    run_s: float = 0.0
    compile_s: float = 0.0
    real_tokens_per_s: float = 0.0
    shapes: tuple[ShapeMeasurement, ...] = ()
    peak_bytes: int = 0
    wall_s: float = 0.0
    other_cores: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """All rounds, and what follows.

    Attributes:
        candidates: Name -> the outcome that is confirmed, the baselines last.
        rounds: All that were run, in order.
        verdict: None as long as no candidate has a whole round.
        is_complete: All rounds of all candidates were run.
    """

    candidates: Mapping[str, NumberedOutcome]
    rounds: tuple[Round, ...]
    verdict: Verdict | None
    is_complete: bool

    @property
    def winner(self) -> NumberedOutcome | None:
        """The outcome to take."""
        return self.candidates[self.verdict.winner] if self.verdict else None

    def processes(self, device: str) -> tuple[ProcessMeasurement, ...]:
        """What the rounds measured, on this device."""
        return tuple(
            ProcessMeasurement(
                key=CostKey.of(self.candidates[item.candidate].outcome.config, device),
                shapes=item.shapes,
                update=None,
                base_bytes=0,
                peak_bytes=0,
            )
            for item in self.rounds
            if item.status == "ok"
        )


def choose_candidates(outcomes: Sequence[NumberedOutcome]) -> dict[str, NumberedOutcome]:
    """Name -> what to confirm: the best few proposals, then all baselines that were measured.

    The best, and of the others whose interval reaches its own two that may win: the best of
    another strategy or graph mode, which was measured at another time, when the machine may have
    been slower; and of the simplest the best, if the best of all is ahead by noise alone.
    """
    feasible = [item for item in outcomes if is_feasible(item.outcome)]
    proposals = [item for item in feasible if item.outcome.baseline is None]
    chosen: dict[str, NumberedOutcome] = {}
    best = choose_best(proposals)
    if best is not None:
        chosen[name_of(best)] = best
        rivals = [item for item in proposals if item is not best and _may_equal(item, best)]
        kind = kind_of(best.outcome.config)
        others = [item for item in rivals if kind_of(item.outcome.config) != kind]
        for rival in (choose_best(others), _simplest(rivals, best)):
            if rival is not None:
                chosen[name_of(rival)] = rival
    baselines = [item for item in feasible if item.outcome.baseline is not None]
    configs = [item.outcome.config for item in chosen.values()]
    return chosen | {
        name_of(item): item for item in baselines if item.outcome.config not in configs
    }


def name_of(item: NumberedOutcome) -> str:
    """A candidate's name: that of the baseline, or its trial."""
    return item.outcome.baseline or f"trial {item.number}"


def expected_seconds(outcomes: Sequence[NumberedOutcome], rounds: int, timed_s: float) -> float:
    """About how long a confirmation takes: every shape compiles and steps a few times.

    Args:
        outcomes: Of all trials.
        rounds: >= 0.
        timed_s: Seconds of steady steps of each candidate in a round, at least.
    """
    one_round_s = 0.0
    for item in choose_candidates(outcomes).values():
        outcome = item.outcome
        assert outcome.estimate is not None and outcome.figures is not None
        steps = max(1.0, float(sum(outcome.figures.shape_counts.values())))
        running_s = outcome.estimate.estimated_run_s - outcome.estimate.estimated_compile_s
        mean_step_s = running_s / outcome.config.train.epochs / steps
        num_shapes = len(_met_shapes(outcome))
        steady_s = max(timed_s, _timed_steps(outcome) * num_shapes * mean_step_s)
        one_round_s += outcome.estimate.estimated_compile_s + steady_s
        one_round_s += CALLS_BEFORE_STEADY * num_shapes * mean_step_s
    return rounds * one_round_s


def _met_shapes(outcome: Outcome) -> tuple[Shape, ...]:
    """The shapes of a planned config that an epoch meets, the largest first."""
    assert outcome.figures is not None
    return largest_first([shape for shape, count in outcome.figures.shape_counts.items() if count])


def _timed_steps(outcome: Outcome) -> int:
    """Steady steps of each shape: few where a dynamic graph has many, whose errors even out."""
    is_dynamic = outcome.config.graph.mode == "dynamic"
    has_many = is_dynamic and len(_met_shapes(outcome)) > MANY_SHAPES
    return FEW_TIMED_STEPS if has_many else TIMED_STEPS


def run_confirmation(
    setup: StudySetup,
    runner: TrialRunner,
    board: ConfirmationBoard,
    candidates: Mapping[str, NumberedOutcome],
    on_notice: Callable[[str], None],
) -> Confirmation:
    """Run the rounds that are not run yet, one at a time: they must not disturb each other.

    A candidate that has failed is not run again.

    Args:
        setup: Limits, and how many rounds.
        runner: Runs them.
        board: Who runs which round, and what came of it.
        candidates: As `choose_candidates` gives them.
        on_notice: Told what runs.
    """
    while not is_late(setup):
        rounds = _rounds(board)
        standing = _standing(candidates, rounds)
        taken = board.take(list(standing), setup.confirm_rounds)
        if taken is None:
            break
        done = len(rounds)
        num_out = sum(item.candidate not in standing for item in rounds)
        total = num_out + len(standing) * setup.confirm_rounds
        on_notice(f"confirming ({done + 1} of {total}): {taken.candidate}, round {taken.round}")
        measured = _measure(setup, runner, board, candidates[taken.candidate].outcome, taken)
        board.put(taken.number, measured.real_tokens_per_s or None, _to_plain(measured))
    return read_confirmation(board, candidates, setup.confirm_rounds)


def _measure(
    setup: StudySetup,
    runner: TrialRunner,
    board: ConfirmationBoard,
    outcome: Outcome,
    taken: ConfirmationRun,
) -> Round:
    """In a thread, so that signs of life go on meanwhile."""
    folder = setup.folder.confirmation(taken.number)
    place = (taken.candidate, taken.round)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(measure_whole, setup, runner, outcome, folder, place)
        try:
            while not wait([future], timeout=BEAT_S).done:
                board.beat(taken.number)
        except BaseException:
            # The pool waits for its thread: without this, for the whole measurement.
            runner.stop()
            raise
        return future.result()


def is_late(setup: StudySetup, reserve_s: float = 0.0) -> bool:
    """Whether the time of the whole study is up, but for a reserve."""
    return setup.deadline_s is not None and time.monotonic() + reserve_s > setup.deadline_s


def measure_whole(
    setup: StudySetup,
    runner: TrialRunner,
    outcome: Outcome,
    folder: TrialFolder,
    place: tuple[str, int],
) -> Round:
    """Measure every shape of a plan in one process; whatever goes wrong is a value.

    Args:
        setup: Limits.
        runner: Runs it.
        outcome: Of a config that was planned.
        folder: For its files.
        place: Name and round.
    """
    assert outcome.figures is not None
    key = CostKey.of(outcome.config, setup.installation.device)
    spec = TrialSpec(
        config=outcome.config,
        lengths_file=str(setup.folder.lengths.absolute()),
        shapes=_met_shapes(outcome),
        timed_steps=_timed_steps(outcome),
        timed_s=setup.timed_s,
        time_limit_s=setup.time_limit_s,
        memory_limit_bytes=setup.memory_limit_bytes,
    )
    result = runner.run(spec, folder)
    name, number = place
    measured = Round(
        candidate=name,
        number=number,
        status=result.status,
        reason=result.reason,
        shapes=result.shapes,
        peak_bytes=result.peak_bytes,
        wall_s=result.wall_s,
        other_cores=result.other_cores,
    )
    if result.status != "ok":
        return measured
    process = ProcessMeasurement(
        key=key, shapes=result.shapes, update=result.update, base_bytes=0, peak_bytes=0
    )
    costs = CostBook([process]).known(key)
    estimate = estimate_run(outcome.figures, outcome.config.train.epochs, costs)
    return dataclasses.replace(
        measured,
        run_s=estimate.estimated_run_s,
        compile_s=estimate.estimated_compile_s,
        real_tokens_per_s=estimate.estimated_real_tokens_per_s,
    )


def read_confirmation(
    board: ConfirmationBoard, candidates: Mapping[str, NumberedOutcome], num_rounds: int
) -> Confirmation:
    """What the rounds so far say; rounds that not all candidates have yet are left out.

    A candidate that failed in any round is out: a run of it would fail, too.
    """
    rounds = _rounds(board)
    standing = _standing(candidates, rounds)
    run_s = {
        name: {item.number: item.run_s for item in rounds if item.candidate == name}
        for name in standing
    }
    numbers = range(1, num_rounds + 1)
    whole = [number for number in numbers if all(number in of for of in run_s.values())]
    verdict = None
    if standing and whole:
        verdict = judge(
            [
                Candidate(name=name, simplicity=simplicity(item.outcome))
                for name, item in standing.items()
            ],
            {name: [run_s[name][number] for number in whole] for name in standing},
        )
    return Confirmation(
        candidates=dict(candidates),
        rounds=rounds,
        verdict=verdict,
        is_complete=len(whole) == num_rounds,
    )


def _rounds(board: ConfirmationBoard) -> tuple[Round, ...]:
    return tuple(_ROUND.validate_python(item.result) for item in board.results())


def _standing(
    candidates: Mapping[str, NumberedOutcome], rounds: Sequence[Round]
) -> dict[str, NumberedOutcome]:
    """The candidates without those that failed in any round."""
    failed = {item.candidate for item in rounds if item.status != "ok"}
    return {name: item for name, item in candidates.items() if name not in failed}


def _simplest(rivals: Sequence[NumberedOutcome], best: NumberedOutcome) -> NumberedOutcome | None:
    """Of those that are simpler than the best the simplest; of equally simple ones the best."""
    least = min(simplicity(item.outcome) for item in (*rivals, best))
    if least == simplicity(best.outcome):
        return None
    return choose_best([item for item in rivals if simplicity(item.outcome) == least])


def _may_equal(item: NumberedOutcome, best: NumberedOutcome) -> bool:
    own, other = item.outcome.estimate, best.outcome.estimate
    return own is not None and other is not None and own.low_run_s <= other.high_run_s


_ROUND = TypeAdapter(Round)


def _to_plain(measured: Round) -> dict[str, Any]:
    plain: dict[str, Any] = _ROUND.dump_python(measured, mode="json")
    return plain

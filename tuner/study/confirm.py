"""Confirmation: the best few and the baselines measured again, whole, side by side, repeated.

Every measurement is a fresh process that compiles every shape of the plan and steps at each; its
run seconds come from its own measurements alone. In a round the processes of all candidates step
in turn (confirm_turns.py), so that a machine that slows down slows all of them down. Several
tuners share the rounds of one study.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from tuner.simulate.measurement import CostKey, ProcessMeasurement
from tuner.study.choose import choose_best, is_feasible, simplicity
from tuner.study.confirm_round import Round, Task, mean_step_s, met_shapes, steady_seconds
from tuner.study.confirm_turns import TaskWatch, may_step_in_turn, measure_together
from tuner.study.kinds import kind_of
from tuner.study.outcome import NumberedOutcome, Outcome
from tuner.study.proposal import ConfirmationRun
from tuner.study.setup import StudySetup
from tuner.study.verdict import Candidate, Verdict, judge
from tuner.trial.runner import TrialRunner

if TYPE_CHECKING:
    from tuner.study.optuna_board import ConfirmationBoard

ROUND_IN_TIME = 0.8
"""Share of a round that must fit in what is left of the time: its length is an estimate."""

NUM_BEST = 3
"""Proposals that are confirmed at most, the baselines aside."""
CALLS_BEFORE_STEADY = 5
"""Of a shape in a trial, about: to foretell how long a round takes."""


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
    """About how long a confirmation takes.

    Args:
        outcomes: Of all trials.
        rounds: >= 0.
        timed_s: Seconds of steady steps of each candidate in a round, at least.
    """
    return rounds * round_seconds(choose_candidates(outcomes), timed_s)


def round_seconds(candidates: Mapping[str, NumberedOutcome], timed_s: float) -> float:
    """About how long a round takes: every shape compiles and steps a few times.

    Args:
        candidates: Name -> what is confirmed.
        timed_s: Seconds of steady steps of each, at least.
    """
    one_round_s = 0.0
    for item in candidates.values():
        outcome = item.outcome
        assert outcome.estimate is not None
        one_round_s += outcome.estimate.estimated_compile_s + steady_seconds(outcome, timed_s)
        one_round_s += CALLS_BEFORE_STEADY * len(met_shapes(outcome)) * mean_step_s(outcome)
    return one_round_s


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
    while True:
        rounds = _rounds(board)
        standing = _standing(candidates, rounds)
        in_turn = may_step_in_turn(setup, [item.outcome for item in standing.values()])
        if is_late(setup, ROUND_IN_TIME * round_seconds(standing, setup.timed_s) * in_turn):
            break
        taken = _take(board, list(standing), setup.confirm_rounds, whole_round=in_turn)
        if not taken:
            break
        num_out = sum(item.candidate not in standing for item in rounds)
        total = num_out + len(standing) * setup.confirm_rounds
        numbers = itertools.count(len(rounds) + 1)
        texts = {
            run: f"confirming ({next(numbers)} of {total}): {run.candidate}, round {run.round}"
            for run in taken
        }
        tasks = {run: _task_of(setup, run, standing[run.candidate].outcome) for run in taken}
        watch = TaskWatch(
            on_start=functools.partial(_announce, on_notice, texts),
            on_end=functools.partial(_put, board),
            beat=lambda run: board.beat(run.number),
            on_turns=functools.partial(_tell_of_turns, on_notice),
        )
        measure_together(setup, runner, tasks, watch)
    return read_confirmation(board, candidates, setup.confirm_rounds)


def _take(
    board: ConfirmationBoard, names: Sequence[str], rounds: int, *, whole_round: bool
) -> list[ConfirmationRun]:
    """The next run that nobody has taken, or all of its round; none if there is none left."""
    first = board.take(names, rounds)
    taken = [first] if first else []
    while taken and whole_round:
        another = board.take(names, rounds, taken[0].round)
        if another is None:
            break
        taken.append(another)
    return taken


def _task_of(setup: StudySetup, run: ConfirmationRun, outcome: Outcome) -> Task:
    folder = setup.folder.confirmation(run.number)
    return Task(candidate=run.candidate, number=run.round, outcome=outcome, folder=folder)


def _announce(
    on_notice: Callable[[str], None], texts: Mapping[ConfirmationRun, str], run: ConfirmationRun
) -> None:
    on_notice(texts[run])


def _tell_of_turns(on_notice: Callable[[str], None], num_processes: int, steady_s: float) -> None:
    on_notice(f"all {num_processes} step in turn now, for about {steady_s / 60.0:.1f} minutes")


def _put(board: ConfirmationBoard, run: ConfirmationRun, measured: Round) -> None:
    board.put(run.number, measured.real_tokens_per_s or None, _to_plain(measured))


def is_late(setup: StudySetup, reserve_s: float = 0.0) -> bool:
    """Whether the time of the whole study is up, but for a reserve."""
    return setup.deadline_s is not None and time.monotonic() + reserve_s > setup.deadline_s


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

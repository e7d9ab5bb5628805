"""A tuner of nothing, as a process of its own: asks, claims, tells, and says so in lines of JSON.

python tests/tuner_process.py work|hang|confirm|hang-confirm STORAGE STUDY [MAX_TRIALS]
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tuner.config.codec import parse_model
from tuner.study.optuna_board import ConfirmationBoard
from tuner.study.optuna_study import OptunaStudy
from tuner.study.space import Choice, SearchSpace, first_choices

SPACE = parse_model(
    SearchSpace,
    {
        "strategy": ["fixed", "dynamic", "bucketed"],
        "num_buckets": {"low": 2, "high": 6},
        "align": [8, 32, [{"up_to": 64, "multiple": 8}, {"multiple": 32}]],
        "longest_rows_per_batch": [1, 2, 4],
        "graph_mode": ["static", "dynamic"],
        "jit_level": ["O0", "O1"],
        "compute_dtype": ["fp32", "fp16"],
    },
    source="test",
)
BASELINES = ["pad to longest", "packing"]
CANDIDATES = ["trial 3", "baseline packing"]
ROUNDS = 2
SHAPES = ["8x128", "4x256", "2x512"]
WORK_S = 0.02


def value_of(choice: Choice | None) -> float:
    """A made-up value that rewards buckets and small alignment."""
    if choice is None:
        return 500.0
    return 100.0 * (choice.num_buckets or 1) + choice.longest_rows_per_batch


def say(**line: Any) -> None:
    """One line for the test."""
    print(json.dumps(line), flush=True)


def wait_for_the_others() -> None:
    """Begin when the test says so, so that processes that were started together meet."""
    say(ready=True)
    sys.stdin.readline()


def work(study: OptunaStudy, max_trials: int) -> None:
    """Tune until all processes together have enough."""
    wait_for_the_others()
    study.enqueue_baselines(BASELINES)
    study.enqueue(first_choices(SPACE))
    while (proposal := study.ask_within(max_trials)) is not None:
        mine = study.claim_free(proposal.number, SHAPES)
        begin = time.monotonic()
        time.sleep(WORK_S)
        end = time.monotonic()
        kept = study.tell_measured(
            proposal.number, value_of(proposal.choice), {"shapes": list(mine)}
        )
        say(
            number=proposal.number,
            baseline=proposal.baseline,
            choice=repr(proposal.choice),
            shapes=mine,
            begin=begin,
            end=end,
            kept=kept,
        )


def hang(study: OptunaStudy) -> None:
    """Take a trial and be killed in it."""
    study.enqueue_baselines(BASELINES[:1])
    proposal = study.ask()
    mine = study.claim_free(proposal.number, SHAPES)
    say(number=proposal.number, baseline=proposal.baseline, shapes=mine)
    time.sleep(600)


def confirm(board: ConfirmationBoard) -> None:
    """Confirm until nothing is left."""
    wait_for_the_others()
    while (run := board.take(CANDIDATES, ROUNDS)) is not None:
        time.sleep(WORK_S)
        kept = board.put(run.number, 10.0 * run.round, {"by": run.candidate})
        say(number=run.number, candidate=run.candidate, round=run.round, kept=kept)


def hang_confirm(board: ConfirmationBoard) -> None:
    """Take a run and be killed in it."""
    run = board.take(CANDIDATES, ROUNDS)
    assert run is not None
    say(number=run.number, candidate=run.candidate, round=run.round)
    time.sleep(600)


def main(task: str, storage: str, name: str, max_trials: str = "0") -> None:
    """Do what the command line says."""
    if task == "work":
        work(OptunaStudy(storage, name, SPACE, seed=0), int(max_trials))
    elif task == "hang":
        hang(OptunaStudy(storage, name, SPACE, seed=0))
    elif task == "confirm":
        confirm(ConfirmationBoard(storage, name))
    else:
        hang_confirm(ConfirmationBoard(storage, name))


if __name__ == "__main__":
    main(*sys.argv[1:])

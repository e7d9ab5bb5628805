"""The contract of a study, on every kind of storage, by one process and by several."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from tuner_process import BASELINES, CANDIDATES, ROUNDS, SHAPES, SPACE, value_of

from tuner.config.schema import OP_GROUPS
from tuner.errors import BadInputError
from tuner.study.liveness import BEAT_INTERVAL_S, GRACE_S, is_alive, this_process
from tuner.study.optuna_board import ConfirmationBoard
from tuner.study.optuna_params import to_choice, to_params
from tuner.study.optuna_storage import open_storage
from tuner.study.optuna_study import OptunaStudy
from tuner.study.space import Choice, all_choices

ROOT = Path(__file__).resolve().parents[2]
POINT = Choice(
    strategy="bucketed",
    num_buckets=4,
    align=8,
    longest_rows_per_batch=2,
    graph_mode="static",
    jit_level="O0",
)
FIXED = Choice(
    strategy="fixed",
    num_buckets=None,
    align=32,
    longest_rows_per_batch=4,
    graph_mode="static",
    jit_level="O1",
)


def open_study(storage: str, name: str, seed: int = 0) -> OptunaStudy:
    return OptunaStudy(storage, name, SPACE, seed)


def raw_study(storage: str, name: str) -> optuna.Study:
    """The study as Optuna alone opens it."""
    return optuna.load_study(study_name=name, storage=open_storage(storage))


def frozen(storage: str, name: str) -> list[FrozenTrial]:
    return raw_study(storage, name).trials


def command(task: str, storage: str, name: str, *more: str) -> list[str]:
    return [sys.executable, str(ROOT / "tests" / "tuner_process.py"), task, storage, name, *more]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def run_together(count: int, *arguments: str) -> list[list[dict[str, Any]]]:
    """The lines of several processes that do the same at the same time."""
    processes = [
        subprocess.Popen(
            command(*arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"ready": True}
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * count
    return [[json.loads(line) for line in output.splitlines()] for output in outputs]


class Hanging:
    """A process that has taken something and does nothing with it."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            command(*arguments), stdout=subprocess.PIPE, text=True, env=environment()
        )
        assert self._process.stdout is not None
        self.said = json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Hanging:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


class TestProposals:
    def test_enqueued_points_come_first_and_once(self, storage, name):
        study = open_study(storage, name)
        study.enqueue([POINT, FIXED, POINT])
        study.enqueue([FIXED])
        first, second, third = study.ask(), study.ask(), study.ask()
        assert (first.choice, second.choice) == (POINT, FIXED)
        assert (first.baseline, first.boundaries) == (None, None)
        assert third.choice is not None
        study.tell_measured(first.number, 1.0, {})
        study.enqueue([POINT])
        assert study.ask().number == 3
        assert [trial.choice for trial in study.running()][:1] == [FIXED]

    def test_the_same_point_with_other_boundaries_is_another_one(self, storage, name):
        study = open_study(storage, name)
        solved: list[dict[str, Any]] = [{}, {"boundaries": [16, 32]}, {"boundaries": [8, 32]}]
        study.enqueue([POINT] * 3, solved)
        study.enqueue([POINT] * 3, solved)
        asked = [study.ask() for _ in range(3)]
        assert [proposal.boundaries for proposal in asked] == [None, (16, 32), (8, 32)]
        assert {proposal.choice for proposal in asked} == {POINT}
        assert study.ask().attributes == {}

    def test_each_baseline_comes_once_whoever_asks(self, storage, name):
        study, other = open_study(storage, name), open_study(storage, name)
        study.enqueue_baselines(BASELINES)
        other.enqueue_baselines(BASELINES)
        asked = [study.ask(), other.ask()]
        assert [proposal.baseline for proposal in asked] == BASELINES
        assert [proposal.choice for proposal in asked] == [None, None]
        assert other.ask().baseline is None
        study.tell_measured(asked[0].number, 5.0, {"a": 1})
        (told,) = other.told()
        assert (told.baseline, told.choice, told.outcome) == (BASELINES[0], None, {"a": 1})
        assert other.tried() == set()
        assert frozen(storage, name)[0].params == {}

    def test_a_point_that_two_have_enqueued_at_the_same_time_is_proposed_once(self, storage, name):
        study = open_study(storage, name)
        # As two processes do that have both looked before either wrote.
        params = to_params(POINT)
        for _ in range(2):
            raw_study(storage, name).enqueue_trial(params, user_attrs={"enqueued": params})
            raw_study(storage, name).enqueue_trial({}, user_attrs={"baseline": "packing"})
        asked = [study.ask() for _ in range(3)]
        assert asked[0].choice == POINT and asked[1].baseline == "packing"
        assert asked[2].baseline is None and asked[2].number == 4

    def test_op_groups_are_asked_about_only_where_they_matter(self, storage, name):
        study = open_study(storage, name)
        lower = [
            Choice(**{**vars(POINT), "compute_dtype": "fp16", "fp32_ops": ops})
            for ops in [(), ("norms",), ("softmax", "loss")]
        ]
        study.enqueue(lower)
        assert study.ask().choice == lower[0]
        study.set_sensitive({"fp16": ("softmax", "norms"), "bf16": ("rope",)})
        assert [study.ask().choice for _ in range(2)] == lower[1:]
        for _ in range(8):
            study.ask()
        for trial in frozen(storage, name)[1:]:
            groups = {key for key in trial.params if key.startswith("fp32_")}
            if trial.params["compute_dtype"] == "fp32":
                assert groups == set()
            else:
                assert groups >= {"fp32_softmax", "fp32_norms"}
                assert groups <= {"fp32_softmax", "fp32_norms", "fp32_loss"}

    def test_all_processes_together_make_the_wanted_number(self, storage, name):
        study, other = open_study(storage, name), open_study(storage, name)
        study.enqueue_baselines(BASELINES[:1])
        asked = [one.ask_within(3) for one in (study, other, study, other)]
        assert all(asked)
        assert study.ask_within(3) is None and other.ask_within(3) is None
        assert study.count_finished() == 2 and other.count_finished() == 1
        repeated = asked[3]
        assert repeated is not None and asked[1] is not None
        other.tell_measured(asked[1].number, 1.0, {})
        other.tell_repeat(repeated.number, asked[1].number)
        assert study.ask_within(3) is not None
        study.enqueue_baselines(BASELINES)
        late = other.ask_within(3)
        assert late is not None and late.baseline == BASELINES[1]


class TestTelling:
    def test_states_values_and_constraints_as_optuna_reads_them(self, storage, name):
        study = open_study(storage, name)
        numbers = [study.ask().number for _ in range(5)]
        study.report(numbers[0], 0, 3.0)
        study.report(numbers[2], 1, 2.5)
        assert study.tell_measured(numbers[0], 7.0, {"n": 0})
        assert study.tell_failed(numbers[1], {"n": 1})
        assert study.tell_pruned(numbers[2], {"n": 2})
        assert study.tell_measured(numbers[3], 9.0, {"n": 3}, violation=0.25)
        trials = frozen(storage, name)
        complete, pruned, running = TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING
        states = [complete, pruned, pruned, complete, running]
        assert [trial.state for trial in trials] == states
        assert [trial.value for trial in trials] == [7.0, None, 2.5, 9.0, None]
        assert trials[0].intermediate_values == {0: 3.0}
        worst = [max(trial.constraints.values()) for trial in trials[:4]]
        assert worst == [0.0, 1.0, 0.0, 0.25]
        told = open_study(storage, name).told()
        assert [item.outcome["n"] for item in told] == [0, 1, 2, 3]
        assert [item.pruned for item in told] == [False, False, True, False]
        assert [item.violation for item in told] == worst

    def test_a_value_that_is_no_number_is_our_error(self, storage, name):
        study = open_study(storage, name)
        number = study.ask().number
        with pytest.raises(ValueError, match="nan"):
            study.tell_measured(number, float("nan"), {})

    def test_repeats_have_the_value_of_the_first_and_no_outcome(self, storage, name):
        study = open_study(storage, name)
        first, slow, failed = (study.ask().number for _ in range(3))
        dropped = study.ask().number
        study.tell_repeat(dropped, first)
        study.tell_measured(first, 4.0, {}, violation=0.5)
        study.report(slow, 2, 1.5)
        study.tell_pruned(slow, {})
        study.tell_failed(failed, {})
        for of in (first, slow, failed):
            study.tell_repeat(study.ask().number, of)
        trials = frozen(storage, name)
        assert trials[dropped].state == TrialState.FAIL
        for repeat, of in zip(trials[4:], trials[:3], strict=True):
            assert (repeat.state, repeat.value) == (of.state, of.value)
            assert repeat.constraints == of.constraints
        assert len(study.told()) == 3 and study.count_finished() == 3

    @pytest.mark.parametrize("characters", [60_000, 200_000])
    def test_outcomes_and_notes_of_any_size(self, storage, name, characters):
        study = open_study(storage, name)
        large = {"text": '"ä' * (characters // 2), "number": 1.5, "list": [1, None, True]}
        study.tell_measured(study.ask().number, 1.0, large)
        study.set_note("findings", large)
        study.set_note("small", {"parts": 2})
        other = open_study(storage, name)
        assert other.told()[0].outcome == large
        assert other.note("findings") == large
        assert other.note("small") == {"parts": 2}
        assert other.note("nothing") is None
        attributes = frozen(storage, name)[0].user_attrs
        assert all(len(json.dumps(json.dumps(value))) < 65_535 for value in attributes.values())

    def test_what_was_read_is_not_read_again(self, storage, name):
        study = open_study(storage, name)
        study.tell_measured(study.ask().number, 1.0, {})
        (first,) = study.told()
        study.tell_measured(study.ask().number, 1.0, {})
        assert study.told()[0] is first

    def test_identity(self, storage, name):
        open_study(storage, name).check_identity({"data": "aa", "device": "CPU"})
        open_study(storage, name).check_identity({"data": "aa", "device": "CPU"})
        with pytest.raises(BadInputError, match=r"another data \(aa, now bb\)") as caught:
            open_study(storage, name).check_identity({"data": "bb", "device": "CPU"})
        assert caught.value.fix == "give --new-study to start over, or another --study/--out"


class TestTakingOver:
    def elsewhere(self, storage: str, name: str, beat_s: float) -> int:
        """A trial that a process of another machine runs."""
        study = raw_study(storage, name)
        trial = study.ask()
        owner = {**this_process(), "host": "elsewhere//", "since": beat_s}
        trial.set_user_attr("owner", owner)
        for key, value in to_params(POINT).items():
            options = [value] if key != "num_buckets" else None
            if options:
                trial.suggest_categorical(f"made_up_{key}", options)
        trial.set_user_attr("beat", beat_s)
        return trial.number

    def test_a_trial_of_another_machine_is_left_alone_while_it_beats(self, storage, name):
        study = open_study(storage, name)
        alive = self.elsewhere(storage, name, time.time() - GRACE_S / 2)
        dead = self.elsewhere(storage, name, time.time() - GRACE_S - 1)
        assert study.recover() == [dead]
        assert study.recover() == []
        assert [trial.number for trial in study.running()] == [alive]

    def test_a_trial_that_was_taken_over_cannot_be_told(self, storage, name):
        study = open_study(storage, name)
        number = study.ask().number
        assert study.beat(number)
        raw_study(storage, name).tell(number, state=TrialState.FAIL)
        assert not study.tell_measured(number, 1.0, {})
        assert study.told() == []

    def test_a_beat_tells_that_a_trial_was_taken_over(self, storage, name, monkeypatch):
        study = open_study(storage, name)
        number = study.ask().number
        raw_study(storage, name).tell(number, state=TrialState.FAIL)
        assert study.beat(number), "written a moment ago"
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + BEAT_INTERVAL_S)
        assert not study.beat(number)

    def test_a_trial_of_an_earlier_search_in_this_process_is_taken_over(self, storage, name):
        study = open_study(storage, name)
        study.enqueue([POINT], [{"boundaries": [16]}])
        number = study.ask().number
        assert study.recover() == []
        later = open_study(storage, name)
        assert later.recover() == [number]
        again = later.ask()
        assert (again.choice, again.boundaries) == (POINT, (16,))

    def test_a_trial_without_an_owner_or_a_point_is_closed(self, storage, name):
        study = open_study(storage, name)
        study.enqueue([POINT])
        for _ in range(2):
            raw_study(storage, name).ask()
        assert study.recover() == [0, 1]
        assert study.ask().choice == POINT
        assert study.ask().number == 3

    def test_of_a_killed_process_all_is_taken_over_and_of_a_live_one_nothing(self, storage, name):
        with Hanging("hang", storage, name) as process:
            study = open_study(storage, name)
            said = process.said
            assert (said["baseline"], said["shapes"]) == (BASELINES[0], SHAPES)
            assert study.recover() == []
            (running,) = study.running()
            assert (running.number, running.own) == (said["number"], False)
            assert running.baseline == BASELINES[0]
            assert list(study.claims()) == [said["number"]]
            mine = study.ask()
            assert study.claim_free(mine.number, [SHAPES[0], "1x1024"]) == ("1x1024",)
            process.kill()
            assert study.claim_free(mine.number, SHAPES) == tuple(SHAPES)
            assert study.recover() == [said["number"]]
            assert study.ask().baseline == BASELINES[0]


class TestTogether:
    MAX_TRIALS = 7

    def test_two_processes_make_one_study(self, storage, name):
        both = run_together(2, "work", storage, name, str(self.MAX_TRIALS))
        lines = list(itertools.chain(*both))
        assert all(line["kept"] for line in lines)
        numbers = [line["number"] for line in lines]
        assert len(numbers) == len(set(numbers)) == self.MAX_TRIALS + len(BASELINES)
        baselines = [line["baseline"] for line in lines if line["baseline"]]
        assert sorted(baselines) == sorted(BASELINES)
        told = open_study(storage, name).told()
        assert [item.number for item in told] == sorted(numbers)
        enqueued = [
            json.dumps(trial.user_attrs["enqueued"])
            for trial in frozen(storage, name)
            if "enqueued" in trial.user_attrs and trial.state != TrialState.FAIL
        ]
        assert len(enqueued) == len(set(enqueued)) == 3
        assert no_shape_was_measured_by_two_at_a_time(lines)

    def test_two_processes_confirm_once(self, storage, name):
        both = run_together(2, "confirm", storage, name)
        lines = sorted(itertools.chain(*both), key=lambda line: line["number"])
        assert all(line["kept"] for line in lines)
        runs = [(line["candidate"], line["round"]) for line in lines]
        assert len(runs) == len(set(runs)) == len(CANDIDATES) * ROUNDS
        board = ConfirmationBoard(storage, name)
        assert board.take(CANDIDATES, ROUNDS) is None and board.running() == []
        assert [(item.candidate, item.round) for item in board.results()] == runs


def no_shape_was_measured_by_two_at_a_time(lines: list[dict[str, Any]]) -> bool:
    for shape in SHAPES:
        spans = sorted((line["begin"], line["end"]) for line in lines if shape in line["shapes"])
        for (_, end), (begin, _) in itertools.pairwise(spans):
            if begin < end:
                return False
    return True


class TestConfirmation:
    def test_rounds_are_interleaved_and_begin_with_another_candidate(self, storage, name):
        board = ConfirmationBoard(storage, name)
        taken = []
        while (run := board.take(["a", "b", "c"], 2)) is not None:
            taken.append((run.candidate, run.round))
        assert taken == [("a", 1), ("b", 1), ("c", 1), ("b", 2), ("c", 2), ("a", 2)]
        assert board.take([], 2) is None
        more = board.take(["a", "b", "c"], 3)
        assert more is not None and (more.candidate, more.round) == ("c", 3)

    def test_the_runs_of_one_round_alone_can_be_taken(self, storage, name):
        board = ConfirmationBoard(storage, name)
        taken = []
        while (run := board.take(["a", "b", "c"], 3, only_round=2)) is not None:
            taken.append((run.candidate, run.round))
        assert taken == [("b", 2), ("c", 2), ("a", 2)]
        first = board.take(["a", "b", "c"], 3)
        assert first is not None and (first.candidate, first.round) == ("a", 1)

    def test_results_stay_and_failures_are_not_run_again(self, storage, name):
        board = ConfirmationBoard(storage, name)
        first, second = board.take(["a", "b"], 1), board.take(["a", "b"], 1)
        assert first is not None and second is not None
        assert [run.candidate for run in board.running()] == ["a", "b"]
        assert board.beat(first.number)
        assert board.put(first.number, 12.5, {"text": "x" * 100_000})
        assert board.put(second.number, None, {"reason": "oom"})
        later = ConfirmationBoard(storage, name)
        assert later.take(["a", "b"], 1) is None
        results = later.results()
        assert [item.real_tokens_per_s for item in results] == [12.5, None]
        assert results[0].result == {"text": "x" * 100_000}
        assert results[1].result == {"reason": "oom"}
        trials = frozen(storage, f"{name}-confirmation")
        assert trials[0].value == 12.5
        assert (trials[0].user_attrs["candidate"], trials[0].user_attrs["round"]) == ("a", 1)

    def test_the_run_of_a_killed_process_is_taken_again(self, storage, name):
        board = ConfirmationBoard(storage, name)
        with Hanging("hang-confirm", storage, name) as process:
            assert process.said["candidate"] == CANDIDATES[0]
            other = board.take(CANDIDATES, ROUNDS)
            assert other is not None and other.candidate == CANDIDATES[1]
            process.kill()
            again = board.take(CANDIDATES, ROUNDS)
            assert again is not None
            assert (again.candidate, again.round) == (CANDIDATES[0], 1)


class TestTheSampler:
    def proposals(self, storage: str, best: float | None) -> list[Choice | None]:
        """12 proposals after a first trial that is the best baseline, or none with a value."""
        study = open_study(storage, f"best {best}")
        study.enqueue_baselines(["packing"])
        first = study.ask()
        if best is None:
            raw_study(storage, f"best {best}").tell(first.number, state=TrialState.FAIL)
            assert not study.tell_measured(first.number, 1.0, {})
        else:
            study.tell_measured(first.number, best, {})
        found = []
        for _ in range(12):
            proposal = study.ask()
            found.append(proposal.choice)
            study.tell_measured(proposal.number, value_of(proposal.choice), {})
        return found

    def test_does_not_see_baselines(self, folder):
        storage = f"journal:{folder / 'study'}"
        assert self.proposals(storage, 1e6) == self.proposals(storage, None)

    def test_two_processes_with_one_seed_propose_different_points(self, folder):
        storage = f"journal:{folder / 'study'}"
        study, other = open_study(storage, "one"), open_study(storage, "one")
        pairs = [(study.ask().choice, other.ask().choice) for _ in range(4)]
        assert len(set(itertools.chain(*pairs))) >= 7

    def test_a_resumed_study_proposes_what_an_uninterrupted_one_would_have(self, folder):
        whole = self.asked(f"journal:{folder / 'whole'}", [10])
        assert self.asked(f"journal:{folder / 'parts'}", [4, 6]) == whole
        assert self.asked(f"journal:{folder / 'other'}", [10], seed=1) != whole

    def asked(self, storage: str, parts: list[int], seed: int = 0) -> list[Choice | None]:
        found = []
        for count in parts:
            study = open_study(storage, "one", seed)
            for _ in range(count):
                proposal = study.ask()
                found.append(proposal.choice)
                study.tell_measured(proposal.number, value_of(proposal.choice), {})
        return found


def some_precisions() -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "fp32", ()
    for count in range(len(OP_GROUPS) + 1):
        yield "fp16", OP_GROUPS[:count]
        yield "bf16", OP_GROUPS[count:]


class TestParameters:
    def test_every_point_comes_back(self):
        for choice in all_choices(SPACE):
            for dtype, groups in some_precisions():
                point = Choice(
                    **{**vars(choice), "compute_dtype": dtype, "fp32_ops": tuple(groups)}
                )
                params = to_params(point)
                assert to_choice(json.loads(json.dumps(params))) == point

    def test_a_study_of_an_earlier_version_is_fp32(self):
        params = to_params(POINT)
        del params["compute_dtype"]
        assert to_choice(params) == POINT


class TestLiveness:
    def test_this_process_is_alive(self):
        assert is_alive(this_process(), None)

    def test_another_process_of_the_same_id_is_not_the_owner(self):
        assert not is_alive({**this_process(), "start": "1"}, time.time())

    def test_a_killed_process_is_dead_even_before_its_parent_knows(self):
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            stat = Path(f"/proc/{child.pid}/stat").read_text(encoding="utf-8")
            owner = {**this_process(), "pid": child.pid, "start": stat.split()[21]}
            assert is_alive(owner, None)
            child.kill()
            deadline = time.monotonic() + 10
            while is_alive(owner, None) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not is_alive(owner, None)
        assert not is_alive(owner, None)

    def test_elsewhere_only_the_beat_counts(self):
        owner = {**this_process(), "host": "elsewhere//"}
        assert is_alive(owner, time.time() - GRACE_S / 2)
        assert not is_alive(owner, time.time() - GRACE_S - 1)
        assert is_alive(owner, None)

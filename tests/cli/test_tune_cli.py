"""A study of `varseq-tune` from its first trial to its winner: real processes, a tiny model."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tune_case import (
    BASELINES,
    LENGTHS,
    Tuner,
    begun,
    fill_work_folder,
    is_gone,
    read_trials,
    run,
    snapshot,
    standard,
    wait_for,
)

from tuner.batching.plan import plan_batches
from tuner.config.codec import load_config
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import open_mindrecord

OUTPUTS = ("best.yaml", "trials.csv", "summary.txt", "report.html", "cost_model.yaml", "study.db")
SIGNALS = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
CONFIRM = ("--confirm", 1, "--confirm-seconds", 0.1)
# One more than the study has.
GO_ON = ("--trials", 2)

Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a space; tests choose their own --out."""
    return fill_work_folder(tmp_path_factory.mktemp("with space ü"))


@pytest.fixture(scope="module")
def search(work: Path) -> Done:
    """A study of one trial that is not confirmed yet, in `searched`."""
    return run(*standard(work / "searched"), cwd=work)


@dataclass(frozen=True)
class Ended:
    """A study whose tuner was killed in its confirmation and started again."""

    broken_off: dict[str, bytes]
    """The files of the process that waited for its turn then."""
    best_when_killed: bytes
    done: Done


@pytest.fixture(scope="module")
def ended(work: Path, search: Done) -> Ended:
    """A study that came to its end, in `results`."""
    out = copy_of(work, search, "results")
    with begun(work, out, *CONFIRM) as tuner:
        waiting = tuner.worker("confirmation")
        worker = tuner.worker("confirmation", before=["0000"])
        kill(tuner, waiting, worker)
    return Ended(
        broken_off=snapshot(out / "confirmation" / "0000"),
        best_when_killed=(out / "best.yaml").read_bytes(),
        done=run(*standard(out, *CONFIRM), cwd=work),
    )


def copy_of(work: Path, search: Done, name: str) -> Path:
    """The searched study in another folder."""
    assert search.returncode == 0, search.stderr
    return Path(shutil.copytree(work / "searched", work / name))


def kill(tuner: Tuner, *workers: int) -> None:
    """As the system does it: nothing is cleared up."""
    tuner.process.kill()
    tuner.process.wait()
    # A worker that is still importing MindSpore looks for its tuner when that is done.
    wait_for(lambda: all(map(is_gone, workers)), seconds=20)


@pytest.mark.mindspore
class TestEndToEnd:
    def test_all_files_are_written(self, work, search, ended):
        assert search.returncode == 0, search.stderr
        assert ended.done.returncode == 0, ended.done.stderr
        for done, out in ((search, work / "searched"), (ended.done, work / "results")):
            assert all((out / name).stat().st_size for name in OUTPUTS)
            assert "Traceback" not in done.stderr
            assert done.stdout == (out / "summary.txt").read_text()

    def test_what_was_assumed_is_said(self, search):
        assert "no --config: trials use a small decoder" in search.stderr
        assert "trials run on CPU" in search.stderr

    def test_baselines_come_first_and_each_shape_is_measured_once(self, work, search):
        trials = read_trials(work / "searched")
        assert [trial["baseline"] for trial in trials] == [*BASELINES, ""]
        assert {trial["status"] for trial in trials} == {"ok"}
        # The quantile buckets collapse to the shape of padding to the longest; the last one adds
        # one for its short rows.
        assert [trial["num_new_measured_shapes"] for trial in trials] == ["1", "1", "0", "1", "1"]
        assert [trial["num_shapes"] for trial in trials] == ["1", "1", "1", "1", "2"]

    def test_the_figures_of_a_plan_are_exact(self, work, search):
        # Worked out by hand: the longest row takes 32 tokens, 4 of them fit the budget, 52 rows
        # are 13 batches. Aligned to 8: 40 rows in three batches of 14 (16 would fit) and 12 in
        # batches of 4. Aligned to 16: 48 rows in batches of 8 and 4 in one.
        padded = {"8": 3 * 14 * 8 + 3 * 4 * 32, "16": 6 * 8 * 16 + 4 * 32}
        *baselines, proposal = read_trials(work / "searched")
        assert {trial["align"] for trial in baselines} == {"32"}
        for trial in baselines[:3]:
            fraction = float(trial["effective_token_fraction"])
            assert fraction == pytest.approx(sum(LENGTHS) / (13 * 4 * 32), abs=1e-6)
        fraction = float(proposal["effective_token_fraction"])
        assert fraction == pytest.approx(sum(LENGTHS) / padded[proposal["align"]], abs=1e-6)

    def test_before_the_confirmation_the_best_is_the_fastest_of_the_table(self, work, search):
        speeds = {
            int(trial["trial"]): float(trial["estimated_real_tokens_per_s"])
            for trial in read_trials(work / "searched")
        }
        config = load_config(work / "searched" / "best.yaml")
        assert config.provenance is not None
        assert speeds[config.provenance.trial] == max(speeds.values())
        predicted = config.provenance.prediction.estimated_real_tokens_per_s
        assert predicted == pytest.approx(max(speeds.values()), rel=1e-6)
        assert "not confirmed yet" in (work / "searched" / "best.yaml").read_text()

    def test_the_best_config_is_the_confirmed_winner_with_its_provenance(self, work, ended):
        config = load_config(work / "results" / "best.yaml")
        dataset = open_mindrecord(work / "data.mindrecord")
        assert config.data.path == str(work / "data.mindrecord")
        assert config.model.width == 16 and config.model.vocab_size == 32
        found = config.provenance
        assert found is not None
        assert found.data_fingerprint == dataset.fingerprint
        assert found.num_samples == len(LENGTHS)
        assert found.device == "CPU"
        assert found.versions["mindspore"]
        assert set(found.shapes) == set(plan_batches(scan_lengths(dataset), config).shapes)
        text = (work / "results" / "best.yaml").read_text()
        assert f"Trial {found.trial}, the best of 5 trials of varseq-tune, confirmed" in text

    def test_every_candidate_was_confirmed_in_a_process_of_its_own(self, work, ended):
        for name in ["trial 4", *BASELINES]:
            lines = [
                line
                for line in ended.done.stderr.splitlines()
                if line.startswith("confirming (") and line.endswith(f" of 5): {name}, round 1")
            ]
            assert len(lines) == 1, ended.done.stderr
        # Two more than candidates: those that had begun when the round was broken off.
        assert len(list((work / "results" / "confirmation").glob("*"))) == 7
        assert len(list((work / "results" / "confirmation").glob("*/result.json"))) == 5

    @pytest.mark.slow
    def test_the_same_command_again_measures_nothing_and_says_so(self, work, ended):
        before = {name: snapshot(work / "results" / name) for name in ("trials", "confirmation")}
        best = (work / "results" / "best.yaml").read_bytes()
        again = run(*standard(work / "results", *CONFIRM), cwd=work)
        assert again.returncode == 0
        assert "5 trials are done already; going on from there" in again.stderr
        assert "confirming" not in again.stderr
        assert again.stdout == ended.done.stdout
        assert {name: snapshot(work / "results" / name) for name in before} == before
        assert (work / "results" / "best.yaml").read_bytes() == best


@pytest.mark.mindspore
class TestBrokenOff:
    def test_sigkill_in_the_confirmation_then_the_same_command_goes_on(self, work, ended):
        assert ended.done.returncode == 0, ended.done.stderr
        assert ended.best_when_killed
        # No trial is run again; what was broken off stays to be looked at.
        assert snapshot(work / "results" / "confirmation" / "0000") == ended.broken_off
        assert snapshot(work / "results" / "trials") == snapshot(work / "searched" / "trials")

    @pytest.mark.slow
    def test_sigkill_in_a_trial_then_the_same_command_goes_on(self, work, search):
        out = copy_of(work, search, "killed")
        before = snapshot(out / "trials")
        with begun(work, out, *GO_ON) as tuner:
            kill(tuner, tuner.worker("trials"))
        assert (out / "best.yaml").exists()

        done = run(*standard(out, *GO_ON), cwd=work)
        assert done.returncode == 0, done.stderr
        assert "5 trials are done already; going on from there" in done.stderr
        assert " was interrupted and is run again" in done.stderr
        assert snapshot(out / "trials").items() >= before.items()
        trials = read_trials(out)
        assert [trial["baseline"] for trial in trials] == [*BASELINES, "", ""]
        assert {trial["status"] for trial in trials[:-1]} == {"ok"}
        # It may turn out early that it is too slow.
        assert trials[-1]["status"] in ("ok", "pruned")
        assert {trial["align"] for trial in trials[4:]} == {"8", "16"}

    def stopped(self, tuner: Tuner, worker: int, number: int) -> tuple[int, str]:
        """Exit code and messages of a tuner that gets a signal; nothing of it is left."""
        children = psutil.Process(tuner.process.pid).children(recursive=True)
        before = (tuner.out / "best.yaml").read_bytes()
        tuner.process.send_signal(number)
        output, errors = tuner.process.communicate(timeout=20)
        assert output == ""
        assert "Traceback" not in errors
        assert worker in [child.pid for child in children]
        assert all(is_gone(child.pid) for child in children)
        assert (tuner.out / "best.yaml").read_bytes() == before
        return tuner.process.returncode, errors

    def refused_while_held(self, out: Path, work: Path) -> None:
        second = run(*standard(out), cwd=work)
        assert (second.returncode, second.stdout) == (2, "")
        assert second.stderr == (
            f"varseq-tune: error: another varseq-tune works in {out}; wait for it, or choose "
            "another --out\n"
        )

    @pytest.mark.parametrize(
        ("number", "code"),
        [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
        ids=["INT", "TERM"],
    )
    def test_a_signal_ends_the_tuner_and_its_trial(self, work, search, number, code):
        out = copy_of(work, search, number.name)
        with begun(work, out, *GO_ON) as tuner:
            worker = tuner.worker("trials")
            self.refused_while_held(out, work)
            exit_code, errors = self.stopped(tuner, worker, number)
        assert exit_code == code
        assert ("the same command goes on" in errors) is (number == signal.SIGINT)

    @pytest.mark.slow
    @SIGNALS
    def test_a_signal_ends_the_confirmation(self, work, search, number, code):
        out = copy_of(work, search, f"confirming {number.name}")
        with begun(work, out, *CONFIRM) as tuner:
            worker = tuner.worker("confirmation")
            exit_code, errors = self.stopped(tuner, worker, number)
        assert exit_code == code
        assert ("the same command goes on" in errors) is (number == signal.SIGINT)

    @SIGNALS
    def test_a_signal_while_mindspore_is_imported(self, work, number, code):
        with begun(work, work / f"early {number.name}") as tuner:
            process = psutil.Process(tuner.process.pid)
            wait_for(lambda: any("_c_expression" in file.path for file in process.memory_maps()))
            tuner.process.send_signal(number)
            _, errors = tuner.process.communicate(timeout=20)
        assert tuner.process.returncode == code
        assert "Traceback" not in errors and "Error" not in errors
        assert errors.endswith("varseq-tune: interrupted\n") is (number == signal.SIGINT)

    @pytest.mark.slow
    def test_a_time_limit_ends_with_what_is_there(self, work, search):
        out = copy_of(work, search, "late")
        before = snapshot(out / "trials")
        done = run(*standard(out, *GO_ON, *CONFIRM, "--timeout", 0.5), cwd=work)
        assert done.returncode == 0, done.stderr
        assert snapshot(out / "trials") == before
        assert not (out / "confirmation").exists()
        assert done.stdout == (out / "summary.txt").read_text()
        best = load_config(out / "best.yaml")
        assert best == load_config(work / "searched" / "best.yaml")
        assert "not confirmed yet" in (out / "best.yaml").read_text()


@pytest.mark.mindspore
class TestWithoutADevice:
    def test_a_dry_run_ranks_by_the_costs_of_a_study(self, work, search):
        assert search.returncode == 0
        out = work / "dry"
        out.mkdir()
        (out / "best.yaml").write_text("# mine\n")
        started = time.monotonic()
        costs = work / "searched" / "cost_model.yaml"
        done = run(*standard(out, "--dry-run", "--cost-model", costs), cwd=work)
        assert time.monotonic() - started < 30
        assert done.returncode == 0, done.stderr
        assert {file.name for file in out.iterdir()} == {"best.yaml", "dry_run.yaml", "lock"}
        assert (out / "best.yaml").read_text() == "# mine\n"
        assert "a dry run: no trial is run, costs are those of CPU" in done.stderr
        assert "nothing was measured here. Seconds are estimated" in done.stdout
        assert "bucketed 2, align 8, " in done.stdout and "bucketed 2, align 16, " in done.stdout
        assert f"varseq-train --config {out / 'dry_run.yaml'}" in done.stdout
        text = (out / "dry_run.yaml").read_text()
        assert "nothing was measured here. Seconds are estimated" in text
        config = load_config(out / "dry_run.yaml")
        assert config.batching.strategy == "bucketed" and len(config.batching.boundaries) == 2
        assert config.data.path == str(work / "data.mindrecord")

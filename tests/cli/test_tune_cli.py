"""`varseq-tune` as a user runs it: real processes, real trials of a tiny model."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from tuner.batching.plan import plan_batches
from tuner.config.codec import load_config
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import MindRecordWriter, open_mindrecord

REPOSITORY = Path(__file__).resolve().parents[2]
LENGTHS = [3] * 20 + [7] * 20 + [14] * 8 + [30] * 4
# Two points, three shapes: each costs seconds of compiling.
SPACE = {
    "strategy": ["fixed", "bucketed"],
    "num_buckets": {"low": 2, "high": 2},
    "align": [16],
    "longest_rows_per_batch": [4],
    "graph_mode": ["static"],
    "jit_level": ["O0"],
}
TINY_MODEL = (
    "--set", "model={vocab_size: 32, width: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, "
    "ffn_width: 16}",
)  # fmt: skip
OUTPUTS = ("best.yaml", "trials.csv", "summary.txt", "report.html", "cost_model.yaml", "study.db")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tuner.cli.tune", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1"}


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )


def write_data(path: Path, rows: Sequence[dict[str, Any]], **description: Any) -> Path:
    noted = {"length_of": "input_ids", "vocab_size": 32, "pad_id": 0, **description}
    with MindRecordWriter(path, description=noted) as writer:
        for row in rows:
            writer.write([row])
    return path


def row(ids: Sequence[int], num_labels: int | None = None) -> dict[str, Any]:
    labels = list(ids) if num_labels is None else [1] * num_labels
    return {
        "input_ids": np.array(ids, np.int32),
        "labels": np.array(labels, np.int32),
        "length": len(ids),
    }


def wait_for(happens: Callable[[], Any], seconds: float = 90.0) -> Any:
    """What `happens` returns once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := happens()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def read_trials(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "trials.csv").open(encoding="utf-8")))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a space; tests choose their own --out."""
    folder = tmp_path_factory.mktemp("with space ü")
    rng = np.random.default_rng(0)
    # MindRecord files refuse some characters, so only the folder is called oddly.
    write_data(
        folder / "data.mindrecord", [row(rng.integers(1, 32, length)) for length in LENGTHS]
    )
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE))
    one_shape_each = {**SPACE, "strategy": ["fixed"], "longest_rows_per_batch": [2, 4]}
    (folder / "quick.yaml").write_text(yaml.safe_dump(one_shape_each))
    return folder


class Tuner:
    """A running varseq-tune."""

    def __init__(self, process: subprocess.Popen[str], out: Path) -> None:
        self.process = process
        self.out = out

    def worker_of_trial(self, index: int) -> int:
        """The process of the n-th trial (their numbers may have gaps), once it has started."""

        def find() -> int | None:
            assert self.process.poll() is None, self.process.communicate()
            folders = sorted(map(str, (self.out / "trials").glob("*")))
            if len(folders) <= index:
                return None
            for child in psutil.Process(self.process.pid).children():
                try:
                    if child.cmdline()[-1:] == [folders[index]]:
                        return child.pid
                except psutil.Error:
                    continue
            return None

        found: int = wait_for(find)
        return found


@pytest.fixture
def start(work: Path) -> Iterator[Callable[..., Tuner]]:
    """Start varseq-tune in the background; what is left of it at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(out: Path, space: str = "space.yaml") -> Tuner:
        process = subprocess.Popen(
            command(*standard(out, space)),
            cwd=work,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return Tuner(process, out)

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def standard(out: Path, space: str = "space.yaml") -> tuple[object, ...]:
    return (
        "--data", "data.mindrecord", "--space", space, "--out", out, "--trials", "2",
        *TINY_MODEL,
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(work: Path) -> subprocess.CompletedProcess[str]:
    """A study that came to its end, in `results`."""
    return run(*standard(work / "results"), cwd=work)


@pytest.mark.mindspore
class TestEndToEnd:
    def test_all_files_are_written(self, work, done):
        assert done.returncode == 0, done.stderr
        assert all((work / "results" / name).stat().st_size for name in OUTPUTS)
        assert "Traceback" not in done.stderr
        assert done.stdout == (work / "results" / "summary.txt").read_text()

    def test_what_was_assumed_is_said(self, done):
        assert "no --config: trials use a small decoder" in done.stderr
        assert "trials run on CPU" in done.stderr

    def test_the_best_config_loads_with_its_provenance(self, work, done):
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

    def test_the_best_is_the_fastest_of_the_table(self, work, done):
        trials = read_trials(work / "results")
        assert [trial["status"] for trial in trials] == ["ok", "ok"]
        speeds = {
            int(trial["trial"]): float(trial["estimated_real_tokens_per_s"]) for trial in trials
        }
        config = load_config(work / "results" / "best.yaml")
        assert config.provenance is not None
        assert speeds[config.provenance.trial] == max(speeds.values())
        predicted = config.provenance.prediction.estimated_real_tokens_per_s
        assert predicted == pytest.approx(max(speeds.values()), rel=1e-6)

    def test_every_shape_of_the_plan_was_measured(self, work, done):
        # Worked out by hand: the longest row takes 32 tokens, 4 of them fit the budget: (4, 32).
        # Buckets of 16 and 32: 48 rows in batches of 8, and the 4 longest in one.
        assert {
            trial["strategy"]: (trial["num_shapes"], trial["num_measured_shapes"])
            for trial in read_trials(work / "results")
        } == {"fixed": ("1", "1"), "bucketed": ("2", "2")}
        fractions = {
            trial["strategy"]: float(trial["effective_token_fraction"])
            for trial in read_trials(work / "results")
        }
        assert fractions["fixed"] == pytest.approx(sum(LENGTHS) / (13 * 4 * 32), abs=1e-6)
        assert fractions["bucketed"] == pytest.approx(
            sum(LENGTHS) / (6 * 8 * 16 + 4 * 32), abs=1e-6
        )

    def test_the_same_command_again_measures_nothing_and_says_so(self, work, done):
        before = snapshot(work / "results" / "trials")
        best = (work / "results" / "best.yaml").read_bytes()
        again = run(*standard(work / "results"), cwd=work)
        assert again.returncode == 0
        assert "2 trials are done already; going on from there" in again.stderr
        assert again.stdout == done.stdout
        assert snapshot(work / "results" / "trials") == before
        assert (work / "results" / "best.yaml").read_bytes() == best


@pytest.mark.mindspore
class TestBrokenOff:
    def test_sigkill_in_a_trial_then_the_same_command_goes_on(self, work, start):
        out = work / "killed"
        tuner = start(out, space="quick.yaml")
        worker = tuner.worker_of_trial(1)
        finished = snapshot(out / "trials" / "0000")
        tuner.process.kill()
        tuner.process.wait()
        # The worker is still importing MindSpore: it looks for its tuner when that is done.
        wait_for(lambda: is_gone(worker), seconds=20)
        assert (out / "best.yaml").exists()

        done = run(*standard(out, space="quick.yaml"), cwd=work)
        assert done.returncode == 0, done.stderr
        assert "1 trial is done already; going on from there" in done.stderr
        assert " was interrupted and is run again" in done.stderr
        assert snapshot(out / "trials" / "0000") == finished
        trials = read_trials(out)
        assert [trial["status"] for trial in trials] == ["ok", "ok"]
        assert {trial["tokens_per_batch"] for trial in trials} == {"64", "128"}

    def refused_while_held(self, out: Path, work: Path) -> None:
        second = run(*standard(out), cwd=work)
        assert (second.returncode, second.stdout) == (2, "")
        assert second.stderr == (
            f"varseq-tune: error: another varseq-tune works in {out}; wait for it, or choose "
            "another --out\n"
        )

    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
    )
    def test_a_signal_ends_the_tuner_and_its_trial(self, work, start, number, code):
        tuner = start(work / number.name)
        worker = tuner.worker_of_trial(0)
        self.refused_while_held(tuner.out, work)
        tuner.process.send_signal(number)
        output, errors = tuner.process.communicate(timeout=20)
        assert tuner.process.returncode == code
        assert is_gone(worker)
        assert "Traceback" not in errors
        assert output == ""
        assert not (tuner.out / "best.yaml").exists()

    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
    )
    def test_a_signal_while_mindspore_is_imported(self, work, start, number, code):
        tuner = start(work / f"early {number.name}")
        process = psutil.Process(tuner.process.pid)
        wait_for(lambda: any("_c_expression" in file.path for file in process.memory_maps()))
        tuner.process.send_signal(number)
        _, errors = tuner.process.communicate(timeout=20)
        assert tuner.process.returncode == code
        assert "Traceback" not in errors and "Error" not in errors
        assert errors.endswith("varseq-tune: interrupted\n") is (number == signal.SIGINT)


@pytest.mark.mindspore
class TestAllFailing:
    @pytest.mark.parametrize(
        ("limit", "status", "reason"),
        [
            (("--memory-limit", "100MB"), "oom", "GB, over the limit of 0.10 GB"),
            (("--trial-timeout", "1"), "timeout", "over the time limit of 1 s"),
        ],
        ids=["memory", "time"],
    )
    def test_shows_why_and_leaves_an_older_best_config(self, work, limit, status, reason):
        out = work / status
        out.mkdir()
        (out / "best.yaml").write_bytes(b"# an older one\n\xff")
        done = run(*standard(out), *limit, cwd=work)
        assert done.returncode == 1
        assert (out / "best.yaml").read_bytes() == b"# an older one\n\xff"
        trials = read_trials(out)
        assert [trial["status"] for trial in trials] == [status, status]
        assert all(trial["reason"].endswith(reason) for trial in trials)
        for trial in trials:
            assert f"trial {trial['trial']}: {status}: {trial['reason']}\n" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("varseq-tune: no trial could be measured")
        assert "Traceback" not in done.stderr
        summary = (out / "summary.txt").read_text()
        assert "No trial of 2 could be measured." in summary
        assert "varseq-train" not in summary


class TestBadInput:
    """Each one is one clear line and exit code 2; nothing is written over."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write_data(tmp_path / "data.mindrecord", [row([1, 2, 3]), row([4, 5])])
        (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
        base = {"data": {"path": "data.mindrecord"}, "model": {"vocab_size": 32}}
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "best.yaml").write_text("# mine\n")
        return tmp_path

    def refusal(self, folder: Path, *arguments: object) -> str:
        """The one line, without the command's name; `results` is as it was."""
        before = snapshot(folder)
        done = run(*arguments, cwd=folder)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        # Without --config the assumed model is told first.
        *notices, line = done.stderr.splitlines()
        assert all(notice.startswith("no --config: ") for notice in notices), done.stderr
        assert line.startswith("varseq-tune: error: ")
        after = snapshot(folder)
        after.pop(str(folder / "results" / "lock"), None)
        assert after == before
        return line.removeprefix("varseq-tune: error: ")

    def test_no_data(self, folder):
        assert self.refusal(folder) == "--data is missing; give a MindRecord file"

    def test_a_missing_file(self, folder):
        line = self.refusal(folder, "--data", "nowhere.mindrecord")
        assert str(folder / "nowhere.mindrecord") in line

    def test_a_missing_index(self, folder):
        (folder / "data.mindrecord.db").unlink()
        assert "data.mindrecord.db" in self.refusal(folder, "--data", "data.mindrecord")

    def test_a_file_that_is_not_mindrecord(self, folder):
        (folder / "plain.mindrecord").write_bytes(b"plain text, quite long enough" * 99)
        (folder / "plain.mindrecord.db").write_bytes((folder / "data.mindrecord.db").read_bytes())
        line = self.refusal(folder, "--data", "plain.mindrecord")
        assert "plain.mindrecord" in line and "not a MindRecord" in line

    def test_a_column_that_is_not_there(self, folder):
        line = self.refusal(
            folder, "--data", "data.mindrecord", "--set", "data.input_column=input"
        )
        assert "'input'" in line or " input" in line
        assert "input_ids" in line

    def test_zero_rows(self, folder):
        from mindspore.mindrecord import FileWriter

        writer = FileWriter(str(folder / "empty.mindrecord"))
        writer.add_schema({"input_ids": {"type": "int32", "shape": [-1]}})
        writer.commit()
        assert "no rows" in self.refusal(folder, "--data", "empty.mindrecord")

    def test_only_empty_rows(self, folder):
        write_data(folder / "hollow.mindrecord", [row([]), row([])])
        line = self.refusal(folder, "--data", "hollow.mindrecord")
        assert "empty" in line or "no row" in line

    def test_a_token_id_outside_the_vocabulary_of_the_config(self, folder):
        write_data(folder / "wide.mindrecord", [row([1, 2]), row([3, 31, 32])])
        line = self.refusal(folder, "--data", "wide.mindrecord", "--config", "base.yaml")
        assert "row 1" in line and "below the vocabulary size 32 (got 32)" in line

    def test_labels_longer_than_ids(self, folder):
        write_data(folder / "long.mindrecord", [row([1, 2]), row([3, 4, 5], num_labels=4)])
        line = self.refusal(folder, "--data", "long.mindrecord")
        assert "row 1: labels is longer than input_ids (4 and 3 tokens)" in line

    def test_an_unknown_key_in_the_config(self, folder):
        (folder / "base.yaml").write_text(
            "data: {path: data.mindrecord}\nmodel: {vocab_size: 32}\nbatching: {alignn: 8}\n"
        )
        line = self.refusal(folder, "--config", "base.yaml")
        assert line.startswith("base.yaml: unknown key batching.alignn; did you mean align?")

    def test_an_unknown_key_in_set(self, folder):
        line = self.refusal(folder, "--data", "data.mindrecord", "--set", "train.epoch=2")
        assert line.startswith("--set: unknown key train.epoch; did you mean epochs")

    def test_set_without_a_value(self, folder):
        line = self.refusal(folder, "--data", "data.mindrecord", "--set", "train.epochs")
        assert line.startswith("--set needs name=value (got 'train.epochs')")

    def test_an_unknown_key_in_the_space(self, folder):
        (folder / "space.yaml").write_text(yaml.safe_dump({**SPACE, "num_bucket": 2}))
        line = self.refusal(folder, "--data", "data.mindrecord", "--space", "space.yaml")
        assert line.startswith("space.yaml: unknown key num_bucket; did you mean num_buckets?")

    def test_an_unknown_space(self, folder):
        line = self.refusal(folder, "--data", "data.mindrecord", "--space", "defualt")
        assert line == (
            "--space: no search space is called 'defualt'; give a file, or one of: default"
        )

    @pytest.mark.parametrize("out", ["base.yaml", "base.yaml/results"])
    def test_an_output_folder_that_cannot_be_made(self, folder, out):
        line = self.refusal(folder, "--data", "data.mindrecord", "--out", out)
        assert line.startswith(f"--out {out} cannot be written: ")

    @pytest.mark.parametrize("limit", ["lots", "0GB", "101%", "12", "-1GB", ""])
    def test_a_bad_memory_limit(self, folder, limit):
        line = self.refusal(folder, "--data", "data.mindrecord", f"--memory-limit={limit}")
        assert line.startswith("--memory-limit must be an amount such as 12GB")
        assert repr(limit) in line

    @pytest.mark.parametrize("trials", ["0", "-3", "many", "1e3"])
    def test_a_bad_number_of_trials(self, folder, trials):
        line = self.refusal(folder, "--data", "data.mindrecord", f"--trials={trials}")
        assert line == (
            f"argument --trials: must be a whole number, at least 1 (got {trials!r}); "
            "see varseq-tune --help"
        )

    @pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
    def test_a_bad_time_limit(self, folder, seconds):
        line = self.refusal(folder, "--data", "data.mindrecord", f"--trial-timeout={seconds}")
        assert line.startswith("argument --trial-timeout: must be a number above 0 ")

    def test_an_option_that_is_not_there(self, folder):
        line = self.refusal(folder, "--data", "data.mindrecord", "--trails", "3")
        assert line == "unrecognized arguments: --trails 3; see varseq-tune --help"

    def test_new_study_moves_nothing_away_before_the_input_is_right(self, folder):
        (folder / "results" / "study.db").write_bytes(b"an earlier study")
        self.refusal(folder, "--data", "nowhere.mindrecord", "--new-study")

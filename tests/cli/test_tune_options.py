"""What varseq-tune refuses, and what it does within limits and with other tuners: processes."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from cost_case import STATIC, measure, process_of
from tune_case import (
    BASELINES,
    SPACE,
    begun,
    fill_work_folder,
    make_row,
    read_trials,
    run,
    snapshot,
    standard,
    write_data,
)

from tuner.cli.tune import main
from tuner.config.codec import format_config, load_config
from tuner.simulate.cost_book import CostBook
from tuner.simulate.cost_file import cost_file
from tuner.study.fill import FILLED

NOTICES = (
    "no --config: ", "trials run on ", "a dry run: ", "jit_level O1 not tried", "bf16 not tried",
    "fp16 on CPU ",
)  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a space; tests choose their own --out."""
    return fill_work_folder(tmp_path_factory.mktemp("with space ü"))


@pytest.mark.mindspore
@pytest.mark.slow  # what they share is tested without processes in tests/study
class TestSeveralTuners:
    def test_they_share_trials_and_measurements_and_end_alike(self, work):
        shared = ("--storage", f"journal:{work / 'shared.journal'}", "--study", "both")
        outs = [work / "first", work / "second"]
        with begun(work, outs[0], *shared) as one, begun(work, outs[1], *shared) as other:
            for tuner in (one, other):
                _, errors = tuner.process.communicate(timeout=200)
                assert tuner.process.returncode == 0, errors
                assert "Traceback" not in errors
        tables = [read_trials(out) for out in outs]
        for trials in tables:
            assert sorted(trial["baseline"] for trial in trials) == sorted(["", *BASELINES])
            assert {trial["status"] for trial in trials} == {"ok"}
        assert tables[0] == tables[1]
        folders = [{folder.name for folder in (out / "trials").glob("*")} for out in outs]
        assert folders[0] and folders[1] and not folders[0] & folders[1]
        best = [load_config(out / "best.yaml").provenance for out in outs]
        assert best[0] is not None and best[1] is not None
        assert best[0].trial == best[1].trial
        assert best[0].study == "both"


@pytest.mark.mindspore
class TestAllFailing:
    def run_over(self, work: Path, out: Path, *limit: str) -> subprocess.CompletedProcess[str]:
        """A study of which nothing comes, over an older best.yaml, which it leaves."""
        out.mkdir()
        (out / "best.yaml").write_bytes(b"# an older one\n\xff")
        done = run(*standard(out, *limit), cwd=work)
        assert done.returncode == 1
        assert (out / "best.yaml").read_bytes() == b"# an older one\n\xff"
        for trial in read_trials(out):
            assert f"trial {trial['trial']}: {trial['status']}: {trial['reason']}\n" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("varseq-tune: no trial could be measured")
        assert "Traceback" not in done.stderr
        summary = (out / "summary.txt").read_text()
        assert f"none of {len(read_trials(out))} trials could be measured" in summary
        assert "varseq-train" not in summary
        return done

    @pytest.mark.slow
    def test_for_memory(self, work):
        self.run_over(work, work / "memory", "--memory-limit", "100MB")
        trials = {trial["baseline"]: trial for trial in read_trials(work / "memory")}
        assert set(trials) == {"", *BASELINES, FILLED}
        assert {trial["status"] for trial in trials.values()} == {"oom"}
        filled = trials.pop(FILLED)
        # Largest batches are looked for then, and there are none.
        assert filled["reason"] == (
            "not one row of 32 tokens fits in memory beside the other shapes"
        )
        for trial in trials.values():
            assert trial["reason"].endswith(" GB, over the limit of 0.10 GB")

    @pytest.mark.slow
    def test_for_time(self, work):
        self.run_over(work, work / "time", "--trial-timeout", "1")
        trials = read_trials(work / "time")
        assert [trial["baseline"] for trial in trials] == [*BASELINES, ""]
        assert {trial["status"] for trial in trials} == {"timeout"}
        assert {trial["reason"] for trial in trials} == {"over the time limit of 1 s"}


@pytest.mark.mindspore
class TestNewStudy:
    def test_it_renames_the_earlier_one_and_ends_in_time_with_nothing(self, work):
        out = work / "again"
        for name in ("trials/0000/result.json", "confirmation/0000/result.json", "study.db"):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(f"an earlier {name}")
        (out / "best.yaml").write_text("# an older one\n")
        (out / "study.1.db").write_text("one before that")
        # Time is up before MindSpore has started.
        done = run(*standard(out, "--new-study", "--timeout", "0.5"), cwd=work)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.splitlines()[-1] == (
            "varseq-tune: no trial was run within the time limit; best.yaml is not written. Give "
            "a longer --timeout, or none"
        )
        assert "" not in done.stderr.splitlines() and "Traceback" not in done.stderr
        for before, after in (
            ("trials/0000/result.json", "trials.2/0000/result.json"),
            ("confirmation/0000/result.json", "confirmation.2/0000/result.json"),
            ("study.db", "study.2.db"),
        ):
            assert (out / after).read_text() == f"an earlier {before}"
        assert (out / "study.1.db").read_text() == "one before that"
        assert (out / "study.db").read_bytes().startswith(b"SQLite")
        assert not (out / "trials").exists() and not (out / "confirmation").exists()
        assert (out / "best.yaml").read_text() == "# an older one\n"


class TestBadInput:
    """Each one is one clear line and exit code 2; nothing is written over."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write_data(tmp_path / "data.mindrecord", [make_row([1, 2, 3]), make_row([4, 5])])
        (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
        base = {"data": {"path": "data.mindrecord"}, "model": {"vocab_size": 32}}
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "best.yaml").write_text("# mine\n")
        return tmp_path

    @pytest.fixture
    def refusal(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> Iterator[Callable[..., str]]:
        """Run the command in this process, which saves an import of MindSpore each time.

        What it gives is the one line, without the command's name; `results` is as it was.
        """
        monkeypatch.chdir(folder)
        handler = signal.getsignal(signal.SIGTERM)

        def refuse(*arguments: object) -> str:
            before = snapshot(folder)
            try:
                code: object = main([str(argument) for argument in arguments])
            except SystemExit as error:
                code = error.code
            output, errors = capsys.readouterr()
            assert (code, output) == (2, "")
            # What was assumed is told first.
            *notices, line = errors.splitlines()
            assert all(notice.startswith(NOTICES) for notice in notices), errors
            assert line.startswith("varseq-tune: error: ")
            after = snapshot(folder)
            after.pop("results/lock", None)
            assert after == before
            return line.removeprefix("varseq-tune: error: ")

        yield refuse
        signal.signal(signal.SIGTERM, handler)

    def test_no_data_for_a_process(self, folder):
        done = run(cwd=folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "varseq-tune: error: --data is missing; give a MindRecord file\n"

    def test_a_missing_file(self, folder, refusal):
        line = refusal("--data", "nowhere.mindrecord")
        assert str(folder / "nowhere.mindrecord") in line

    def test_a_missing_index(self, folder, refusal):
        (folder / "data.mindrecord.db").unlink()
        assert "data.mindrecord.db" in refusal("--data", "data.mindrecord")

    def test_a_file_that_is_not_mindrecord(self, folder, refusal):
        (folder / "plain.mindrecord").write_bytes(b"plain text, quite long enough" * 99)
        (folder / "plain.mindrecord.db").write_bytes((folder / "data.mindrecord.db").read_bytes())
        line = refusal("--data", "plain.mindrecord")
        assert "plain.mindrecord" in line and "not a MindRecord" in line

    def test_a_column_that_is_not_there(self, folder, refusal):
        line = refusal("--data", "data.mindrecord", "--set", "data.input_column=input")
        assert "'input'" in line or " input" in line
        assert "input_ids" in line

    def test_zero_rows(self, folder, refusal):
        from mindspore.mindrecord import FileWriter

        writer = FileWriter(str(folder / "empty.mindrecord"))
        writer.add_schema({"input_ids": {"type": "int32", "shape": [-1]}})
        writer.commit()
        assert "no rows" in refusal("--data", "empty.mindrecord")

    def test_only_empty_rows(self, folder, refusal):
        write_data(folder / "hollow.mindrecord", [make_row([]), make_row([])])
        line = refusal("--data", "hollow.mindrecord")
        assert "empty" in line or "no row" in line

    def test_a_token_id_outside_the_vocabulary_of_the_config(self, folder, refusal):
        write_data(folder / "wide.mindrecord", [make_row([1, 2]), make_row([3, 31, 32])])
        line = refusal("--data", "wide.mindrecord", "--config", "base.yaml")
        assert "row 1" in line and "below the vocabulary size 32 (got 32)" in line

    def test_labels_longer_than_ids(self, folder, refusal):
        write_data(
            folder / "long.mindrecord", [make_row([1, 2]), make_row([3, 4, 5], num_labels=4)]
        )
        line = refusal("--data", "long.mindrecord")
        assert "row 1: labels is longer than input_ids (4 and 3 tokens)" in line

    def test_an_unknown_key_in_the_config(self, folder, refusal):
        (folder / "base.yaml").write_text(
            "data: {path: data.mindrecord}\nmodel: {vocab_size: 32}\nbatching: {alignn: 8}\n"
        )
        line = refusal("--config", "base.yaml")
        assert line.startswith("base.yaml: unknown key batching.alignn; did you mean align?")

    def test_an_unknown_key_in_set(self, folder, refusal):
        line = refusal("--data", "data.mindrecord", "--set", "train.epoch=2")
        assert line.startswith("--set: unknown key train.epoch; did you mean epochs")

    def test_set_without_a_value(self, folder, refusal):
        line = refusal("--data", "data.mindrecord", "--set", "train.epochs")
        assert line.startswith("--set needs name=value (got 'train.epochs')")

    def test_an_unknown_key_in_the_space(self, folder, refusal):
        (folder / "space.yaml").write_text(yaml.safe_dump({**SPACE, "num_bucket": 2}))
        line = refusal("--data", "data.mindrecord", "--space", "space.yaml")
        assert line.startswith("space.yaml: unknown key num_bucket; did you mean num_buckets?")

    def test_an_unknown_space(self, folder, refusal):
        line = refusal("--data", "data.mindrecord", "--space", "defualt")
        assert line == (
            "--space: no search space is called 'defualt'; give a file, or one of: ascend-910a, "
            "ascend-910b, cpu, default, long-context, packing, precision, short-sequences"
        )

    @pytest.mark.parametrize("out", ["base.yaml", "base.yaml/results"])
    def test_an_output_folder_that_cannot_be_made(self, folder, refusal, out):
        line = refusal("--data", "data.mindrecord", "--out", out)
        assert line.startswith(f"--out {out} cannot be written: ")

    @pytest.mark.parametrize("limit", ["lots", "0GB", "101%", "12", "-1GB", ""])
    def test_a_bad_memory_limit(self, folder, refusal, limit):
        line = refusal("--data", "data.mindrecord", f"--memory-limit={limit}")
        assert line.startswith("--memory-limit must be an amount such as 12GB")
        assert repr(limit) in line

    @pytest.mark.parametrize(
        ("option", "least", "number"),
        [
            *(("--trials", 1, number) for number in ("0", "-3", "many", "1e3")),
            ("--jobs", 1, "0"),
            *(("--confirm", 0, number) for number in ("-1", "1.5", "")),
        ],
    )
    def test_a_bad_number(self, folder, refusal, option, least, number):
        line = refusal("--data", "data.mindrecord", f"{option}={number}")
        assert line == (
            f"argument {option}: must be a whole number, at least {least} (got {number!r}); "
            "see varseq-tune --help"
        )

    @pytest.mark.parametrize("option", ["--trial-timeout", "--timeout", "--confirm-seconds"])
    @pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
    def test_a_bad_time_limit(self, folder, refusal, option, seconds):
        line = refusal("--data", "data.mindrecord", f"{option}={seconds}")
        assert line.startswith(f"argument {option}: must be a number above 0 ")

    def test_an_option_that_is_not_there(self, folder, refusal):
        line = refusal("--data", "data.mindrecord", "--trails", "3")
        assert line == "unrecognized arguments: --trails 3; see varseq-tune --help"

    def test_new_study_moves_nothing_away_before_the_input_is_right(self, folder, refusal):
        (folder / "results" / "study.db").write_bytes(b"an earlier study")
        refusal("--data", "nowhere.mindrecord", "--new-study")

    def test_new_study_is_not_for_a_storage_of_many(self, folder, refusal):
        line = refusal("--data", "data.mindrecord", "--new-study", "--storage", "journal:shared")
        assert line.startswith("--new-study starts over in the results folder, not in a shared ")
        assert line.endswith("; give another --study NAME")

    def test_an_unknown_kind_of_storage(self, folder, refusal):
        address = "redis://tuner:geheim@db/studies"
        line = refusal("--data", "data.mindrecord", "--storage", address)
        assert line.startswith("no storage is called redis:; give a file, ")
        assert "geheim" not in line

    def test_a_server_that_does_not_answer(self, folder, refusal):
        address = "postgresql://tuner:geheim@127.0.0.1:1/studies"
        line = refusal("--data", "data.mindrecord", "--storage", address)
        assert line.startswith("postgresql://tuner:***@127.0.0.1:1/studies cannot be opened")
        assert "check that the server runs" in line
        assert "geheim" not in line

    def test_costs_of_another_model(self, folder, refusal):
        costs = cost_file(CostBook([process_of(STATIC, [measure((4, 32), 0.1)])]), "f" * 16)
        (folder / "costs.yaml").write_text(format_config(costs))
        line = refusal("--data", "data.mindrecord", "--dry-run", "--cost-model", "costs.yaml")
        assert re.match(
            r"--cost-model costs\.yaml belongs to another model or optimizer "
            r"\(f{16}, now [0-9a-f]{16}\); ",
            line,
        )

    @pytest.mark.parametrize(
        "text",
        [None, "costs: [", "model: f\ncosts: 3\n", "plain text", "\0", ""],
        ids=["missing", "yaml", "costs", "text", "bytes", "empty"],
    )
    def test_a_missing_or_broken_cost_model(self, folder, refusal, text):
        if text is not None:
            (folder / "costs.yaml").write_text(text)
        line = refusal("--data", "data.mindrecord", "--dry-run", "--cost-model", "costs.yaml")
        assert "costs.yaml" in line

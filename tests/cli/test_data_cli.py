"""`varseq-data` as a user runs it: exit codes, one line per error, clean streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cost_case import STATIC, measure, process_of

from tuner.cli.data import main
from tuner.config.codec import format_config
from tuner.data.mindrecord import MindRecordWriter, open_mindrecord
from tuner.simulate.cost_book import CostBook
from tuner.simulate.cost_file import cost_file

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tuner.cli.data", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def rows_file(tmp_path):
    file = tmp_path / "rows with space ü.jsonl"
    rows = [{"text": "word " * n} for n in range(1, 41)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_lengths(path: Path, lengths: list[int]) -> Path:
    with MindRecordWriter(path, description={"length_of": "input_ids"}) as writer:
        for length in lengths:
            ids = np.ones(length, np.int32)
            writer.write([{"input_ids": ids, "labels": ids, "length": length}])
    return path


def test_help_is_fast_and_imports_nothing_heavy():
    code = (
        "import sys; from tuner.cli.data import main\n"
        "try: main(['prepare', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('mindspore', 'numpy', 'rich', 'tokenizers') if m in sys.modules])"
    )
    start = time.perf_counter()
    out = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True)
    seconds = time.perf_counter() - start
    assert out.stdout.decode().splitlines()[-1] == "[]"
    assert seconds < 2  # 0.1 s on a machine of its own


def test_prepare_then_inspect(tmp_path, rows_file):
    done = run(
        "prepare", rows_file.name, "--tokenizer", "bytes", "--out", "out/data.mindrecord",
        "--max-length", "100", "--shards", "2", cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "rows written" in done.stdout and "40 x text" in done.stdout
    seen = run("inspect", "out/data.mindrecord", "--json", "--batch-size", "4", cwd=tmp_path)
    assert (seen.returncode, seen.stderr) == (0, "")
    values = json.loads(seen.stdout)
    # 5 bytes a word and the end token: 6, 11, ... 96, then rows of 100 from the twentieth on.
    lengths = [min(5 * n + 1, 100) for n in range(1, 41)]
    assert values["num_samples"] == 40
    assert values["total_tokens"] == sum(lengths)
    assert values["num_distinct_lengths"] == 20
    fractions = values["effective_token_fraction"]
    assert fractions["pad_to_longest"] == pytest.approx(sum(lengths) / 4000)
    assert fractions["pad_to_longest"] < fractions["random_batches_padded_to_longest"] < 1
    assert values["verdict"]["decision"] == "depends"
    suggested = values["suggestion"]["suggested"]
    assert suggested["boundaries"][-1] == 104
    assert values["suggestion"]["tokens_per_batch"] == 8 * 104
    assert (tmp_path / "results" / "waste.png").read_bytes().startswith(b"\x89PNG")
    plain = run("inspect", "out", "--out", "figures", cwd=tmp_path)
    assert plain.returncode == 0
    assert (tmp_path / "figures" / "waste.png").exists()
    assert "figure: figures/waste.png" in plain.stdout
    assert "It depends" in plain.stdout and "bytes, 258 ids" in plain.stdout
    assert "█" in plain.stdout


def test_inspect_does_not_import_mindspore_for_our_own_files(tmp_path):
    write_lengths(tmp_path / "data.mindrecord", [3, 4])
    code = (
        "import sys; from tuner.cli.data import main; main(['inspect', 'data.mindrecord']);"
        "print('mindspore' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        check=True,
    )
    assert out.stdout.endswith(b"False\n")


INTERRUPTED_SCAN = """
import os, signal, sys, time
import tuner.data.lengths
from tuner.cli.data import main

def scan(*arguments, **options):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except BaseException as error:
        raise ImportError("what MindSpore makes of an exception in its import") from error

tuner.data.lengths.scan_lengths = scan
sys.exit(main(["inspect", "data.mindrecord"]))
"""


def test_ctrl_c_while_mindspore_is_at_work_ends_in_one_line(tmp_path):
    write_lengths(tmp_path / "data.mindrecord", [3, 4])
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_SCAN],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "varseq-data: interrupted\n"


def test_inspect_tells_what_slabs_cost(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lengths(tmp_path / "data.mindrecord", list(range(1, 101)))
    assert main(["inspect", "data.mindrecord", "--json", "--rows-per-slab", "40"]) == 0
    slabs = json.loads(capsys.readouterr().out)["suggestion"]["slabs"]
    assert slabs["num_slabs"] == 3 and slabs["extra_rows"] >= 0
    assert main(["inspect", "data.mindrecord", "--rows-per-slab", "40"]) == 0
    assert "planned in 3 slabs: " in capsys.readouterr().out
    assert main(["inspect", "data.mindrecord", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["suggestion"]["slabs"] is None


@pytest.mark.parametrize("lengths", [[5], [7] * 20, [1, 1000], [0, 3]])
def test_inspect_takes_odd_lengths(tmp_path, capsys, monkeypatch, lengths):
    monkeypatch.chdir(tmp_path)
    write_lengths(tmp_path / "data.mindrecord", lengths)
    assert main(["inspect", "data.mindrecord"]) == 0
    assert capsys.readouterr().err == ""


def inspect_values(capsys, *arguments):
    assert main(["inspect", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspecting_a_sample_states_its_error_and_keeps_the_longest_row(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    lengths = np.random.default_rng(0).integers(10, 200, 600)
    lengths[17] = 900
    write_lengths(tmp_path / "data.mindrecord", lengths.tolist())
    whole = inspect_values(capsys, "data.mindrecord")
    sample = inspect_values(capsys, "data.mindrecord", "--sample", "200")
    assert "sampling" not in whole
    assert sample["sampled_rows"] == 200
    assert sample["longest"] == whole["longest"] == 900
    error = sample["sampling"]["pad_to_longest"]
    exact = 1 - whole["effective_token_fraction"]["pad_to_longest"]
    assert 0 < error["half_width_95"] < 0.02
    assert abs(error["padding_fraction"] - exact) < 2 * error["half_width_95"]
    assert main(["inspect", "data.mindrecord", "--sample", "200"]) == 0
    assert "Estimated from a sample of 200 of 600 rows" in capsys.readouterr().out
    assert inspect_values(capsys, "data.mindrecord", "--sample", "600") == whole


def test_epochs_and_budget_of_the_planned_run_are_taken(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lengths = np.random.default_rng(0).integers(10, 500, 400)
    write_lengths(tmp_path / "data.mindrecord", lengths.tolist())
    short = inspect_values(capsys, "data.mindrecord", "--epochs", "1")["suggestion"]
    long = inspect_values(
        capsys, "data.mindrecord", "--epochs", "90", "--tokens-per-batch", "1024"
    )["suggestion"]
    assert (short["epochs"], long["epochs"], long["tokens_per_batch"]) == (1, 90, 1024)
    assert long["suggested"]["num_buckets"] > short["suggested"]["num_buckets"]
    assert long["estimated_gain_over_fixed"] > short["estimated_gain_over_fixed"]


def test_costs_of_an_earlier_study_are_taken(tmp_path, capsys, monkeypatch):
    """Where a compile takes an hour, one bucket is best; where it takes nothing, several are."""
    monkeypatch.chdir(tmp_path)
    lengths = np.random.default_rng(0).integers(10, 500, 400)
    write_lengths(tmp_path / "data.mindrecord", lengths.tolist())
    num_buckets = []
    for name, compile_s in (("quick", 0.0), ("slow", 3600.0)):
        step_s = {(8, 64): 0.6, (4, 256): 1.1, (2, 512): 1.2}
        shapes = [measure(shape, seconds, compile_s) for shape, seconds in step_s.items()]
        book = CostBook([process_of(STATIC, shapes)])
        (tmp_path / name).mkdir()
        text = format_config(cost_file(book, "any"))
        (tmp_path / name / "cost_model.yaml").write_text(text)
        found = inspect_values(capsys, "data.mindrecord", "--study", name)["suggestion"]
        assert f"measured at 3 shapes in {name}/cost_model.yaml" in json.dumps(found)
        num_buckets.append(found["suggested"]["num_buckets"])
    assert num_buckets[0] > num_buckets[1] == 1


BAD = [
    (["inspect", "nothing.mindrecord"], "no such MindRecord file: nothing.mindrecord"),
    (["inspect", "rows.jsonl"], "rows.jsonl is not a MindRecord file"),
    (["inspect", "."], "data.mindrecord.db is missing"),
    (["inspect", "good.mindrecord", "--column", "ids"], "no column 'ids'; its columns are: "),
    (["inspect", "good.mindrecord", "--batch-size", "0"], "--batch-size must be at least 1"),
    (["inspect", "good.mindrecord", "--epochs", "0"], "--epochs must be at least 1"),
    (["inspect", "good.mindrecord", "--sample", "1"], "--sample must be at least 2 (got 1)"),
    (
        ["inspect", "good.mindrecord", "--tokens-per-batch", "7"],
        "--tokens-per-batch must be at least the longest padded row (got 7, the longest is 8",
    ),
    (
        ["inspect", "good.mindrecord", "--study", "ok.txt"],
        "cannot read ok.txt/cost_model.yaml: ",
    ),
    (["inspect", "zeros.mindrecord"], "has no tokens in input_ids"),
    (["prepare", "no.jsonl", "--tokenizer", "bytes", "--out", "x"], "no such file: no.jsonl"),
    (["prepare", "rows.jsonl", "--tokenizer", "bytes", "--out", "x"], "rows.jsonl, line 2 is not"),
    (["prepare", "rows.jsonl", "--tokenizer", "rows.jsonl", "--out", "x"], "not a tokenizer.json"),
    (["prepare", "a.csv", "--tokenizer", "bytes", "--out", "x"], "a.csv is of an unknown kind"),
    (
        ["prepare", "ok.txt", "--tokenizer", "bytes", "--out", "ok.txt/data"],
        "cannot write to the folder ok.txt",
    ),
    (["prepare", "ok.txt", "--tokenizer", "bytes", "--out", "."], "cannot be called"),
    (
        ["prepare", "ok.txt", "--tokenizer", "bytes", "--out", "good.mindrecord"],
        "good.mindrecord exists already",
    ),
    (["demo", "--out", "ok.txt"], "ok.txt is not a folder"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "a"}\n{"text"')
    Path("a.csv").write_text("")
    Path("ok.txt").write_text("fine\n")
    write_lengths(Path("good.mindrecord"), [2])
    write_lengths(Path("zeros.mindrecord"), [0])
    if arguments == ["inspect", "."]:
        Path("data.mindrecord").write_bytes(Path("good.mindrecord").read_bytes())
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("varseq-data: error: ")
    assert streams.err.count("\n") == 1
    assert says in streams.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("signal_number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_stopped_prepare_leaves_nothing_behind(tmp_path, signal_number, exit_code):
    big = tmp_path / "big.txt"
    big.write_text("a line of some words that is read again and again\n" * 3_000_000)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    child = subprocess.Popen(
        [sys.executable, "-m", "tuner.cli.data", "prepare", str(big), "--tokenizer", "bytes",
         "--out", str(tmp_path / "out" / "data.mindrecord")],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "out").exists():
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)
    child.send_signal(signal_number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == exit_code
    assert out == "" and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_sigkill_never_leaves_the_final_name(tmp_path, rows_file):
    big = tmp_path / "big.txt"
    big.write_text("a line of some words that is read again and again\n" * 1_000_000)
    out = tmp_path / "out" / "data.mindrecord"
    child = subprocess.Popen(
        [sys.executable, "-m", "tuner.cli.data", "prepare", str(big), "--tokenizer", "bytes",
         "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    while not out.parent.exists():
        time.sleep(0.05)
    child.kill()
    child.wait()
    assert not out.exists()
    done = run("prepare", rows_file, "--tokenizer", "bytes", "--out", out, cwd=tmp_path)
    assert done.returncode == 0
    assert sorted(path.name for path in out.parent.iterdir()) == [out.name, out.name + ".db"]
    assert open_mindrecord(out).num_samples == 40

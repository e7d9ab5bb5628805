from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from tuner.cli.doctor_view import format_end, format_section, to_json_text
from tuner.data.mindrecord import MindRecordWriter, RowSchema
from tuner.diagnose.finding import Finding

CELLS = Path(__file__).resolve().parents[1] / "diagnose"
WELL = Finding(name="python", severity="ok", what="Python 3.11.7")
WARNED = Finding(
    name="vmm-off", severity="warning", what="vmm is off", why="it fragments", fix="x"
)


def run(*arguments, environment=None, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "tuner.cli.doctor", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, cwd=cwd,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip


def test_a_section_says_why_and_what_to_do_only_where_something_is_wrong():
    assert format_section("versions", [WELL, WARNED]).splitlines() == [
        "versions",
        "  ok    Python 3.11.7",
        "  WARN  vmm is off",
        "        why: it fragments",
        "        do:  x",
    ]


def test_long_findings_are_wrapped_and_lose_no_word():
    words = [f"word{number}" for number in range(60)]
    text = format_section("x", [Finding(name="x", severity="note", what=" ".join(words))])
    assert max(map(len, text.splitlines())) <= 100
    assert [word for word in text.split() if word.startswith("word")] == words


def test_the_end_counts_by_severity():
    assert format_end([WELL]) == "all is well"
    assert format_end([WELL, WARNED, WARNED]) == "2 warnings"


def test_json_has_every_field():
    plain = json.loads(to_json_text({"versions": [WELL, WARNED]}))
    assert plain["worst"] == "warning"
    assert plain["sections"]["versions"][1] == {
        "name": "vmm-off", "severity": "warning", "what": "vmm is off", "why": "it fragments",
        "fix": "x",
    }  # fmt: skip


def test_planted_variables_are_found_and_decide_the_exit_code(tmp_path):
    done = run("--no-steps", "--json", "--out", tmp_path, environment={"MS_SIMULATION_LEVEL": "0"})
    assert done.returncode == 4, done.stderr
    names = {
        item["name"]: item["severity"]
        for section in json.loads(done.stdout)["sections"].values()
        for item in section
    }
    assert names["simulation-level"] == "error" and names["mindspore"] == "ok"


def test_without_mindspore_it_says_so_and_does_not_crash(tmp_path):
    """A folder before all others on the path, whose mindspore is none, and records without it."""
    code = (
        "import sys\n"
        "from importlib import metadata\n"
        "import tuner.diagnose.versions as versions\n"
        "def version(name):\n"
        "    if name.startswith('mindspore'): raise metadata.PackageNotFoundError(name)\n"
        "    return metadata.version(name)\n"
        "class Records:\n"
        "    PackageNotFoundError = metadata.PackageNotFoundError\n"
        "    version = staticmethod(version)\n"
        "versions.metadata = Records\n"
        "sys.modules['mindspore'] = None\n"
        "from tuner.cli.doctor import main\n"
        f"sys.exit(main(['--json', '--out', {str(tmp_path)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4, done.stderr
    assert "mindspore-missing" in done.stdout and "Traceback" not in done.stderr


def test_a_wrong_config_is_one_line_and_exit_code_2(tmp_path):
    done = run("--config", tmp_path / "none.yaml")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert run("--set", "a=b").returncode == 2


@pytest.mark.mindspore
@pytest.mark.slow
def test_the_whole_of_it_ends_in_time(tmp_path):
    started = time.monotonic()
    done = run("--out", tmp_path)
    assert time.monotonic() - started < 90
    assert done.returncode == 0, done.stdout + done.stderr
    assert "static graph, O0, fp32: works" in done.stdout


def test_a_profile_is_read_alone_and_decides_the_exit_code(tmp_path):
    tables = tmp_path / "ASCEND_PROFILER_OUTPUT"
    tables.mkdir()
    # Synthetic, from the documented columns: Pad takes 200 of 1,000 microseconds on AI_CPU.
    (tables / "kernel_details.csv").write_text(
        "Step ID,Name,Type,Accelerator Core,Start Time(us),Duration(us),Input Shapes\n"
        '1,Default/MatMul-op1,MatMul,AI_CORE,0,800,"8,512;512,512"\n'
        '1,Default/Pad-op1,PadV3,AI_CPU,800,200,"8,511"\n'
    )
    done = run("--profile", tmp_path)
    assert done.returncode == 3, done.stderr
    assert "PadV3" in done.stdout and "20" in done.stdout
    plain = json.loads(run("--profile", tmp_path, "--json").stdout)
    assert plain["total_s"] == pytest.approx(1e-3)
    assert [op["op_type"] for op in plain["ops"]] == ["MatMul", "PadV3"]
    assert run("--profile", tmp_path / "none").returncode == 4
    assert run("--profile", tmp_path, "--config", "x.yaml").returncode == 2


def write_rows_with_masks(path):
    """Twelve rows, of which the mask of the sixth is one short."""
    names = ("input_ids", "labels", "attention_mask")
    schema = RowSchema(columns={name: {"type": "int32", "shape": [-1]} for name in names})
    rows = [{name: np.ones(5 + row, np.int32) for name in names} for row in range(12)]
    rows[5]["attention_mask"] = np.ones(9, np.int32)
    with MindRecordWriter(path, description={}, schema=schema) as writer:
        writer.write(rows)
    return str(path)


@pytest.mark.mindspore
def test_a_stored_mask_one_short_and_a_float_mask_for_flash_attention_are_named(tmp_path):
    config = {
        "data": {"path": write_rows_with_masks(tmp_path / "rows.mindrecord")},
        "model": {"vocab_size": 23, "factory": "broken_cells:float_mask"},
        "batching": {"num_buckets": 2, "tokens_per_batch": 64},
        "train": {"out": str(tmp_path / "run")},
        "device": "cpu",
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    done = run(
        "--config", tmp_path / "config.yaml", "--no-steps", "--trace-shapes", "--json",
        "--out", tmp_path,
        environment={"PYTHONPATH": f"{CELLS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert done.returncode == 4, done.stdout + done.stderr
    sections = json.loads(done.stdout)["sections"]
    [mask] = [item for item in sections["config"] if item["name"] == "column-length"]
    assert mask["what"] == (
        "row 5: attention_mask has 9 values, input_ids has 10 (1 of 12 rows looked at)"
    )
    [flash] = sections["shapes"]
    assert (flash["name"], flash["severity"]) == ("flash-arguments", "error")
    assert "layers.1.attention (FloatMask)" in flash["what"] and "a float mask" in flash["what"]

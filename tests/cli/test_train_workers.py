"""Options of several ranks: what does not go together is refused before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))

from run_case import small_run, write_counting_rows
from strategies import make_config

from tuner.cli.train import main
from tuner.cli.train_ranks import time_limits, without_worker_options
from tuner.config.schema import PredictionRecord, ProvenanceConfig


def refusal(capsys, *options):
    with pytest.raises(SystemExit) as exit_:
        main(["--config", "best.yaml", *options])
    assert exit_.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workers", "0"], "--workers and --nodes must be at least 1"),
        (["--nodes", "2", "--node-rank", "2", "--master", "m"], "--node-rank must be in 0..1"),
        (["--workers", "2", "--nodes", "2"], "--nodes needs --master"),
        (["--nodes", "2", "--master", "host:port"], "--master must be ADDR or ADDR:PORT"),
        (["--nodes", "2", "--master", "host:80"], "--master must be ADDR or ADDR:PORT"),
        (["--workers", "2", "--export", "out"], "it does not go with --workers"),
    ],
)
def test_options_that_make_no_sense(capsys, options, words):
    assert words in refusal(capsys, *options)


def test_a_config_that_cannot_be_read_starts_nothing(capsys, tmp_path):
    out = tmp_path / "run"
    assert main(["--config", str(tmp_path / "none.yaml"), "--workers", "2"]) == 2
    config = tmp_path / "bad.yaml"
    config.write_text(yaml.safe_dump({"train": {"out": str(out), "epochs": -1}}))
    assert main(["--config", str(config), "--workers", "2"]) == 2
    assert "epochs" in capsys.readouterr().err
    assert not out.exists()


def test_half_a_launcher_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"data": {"path": "d"}, "model": {"vocab_size": 9}}))
    assert main(["--config", str(config)]) == 2
    assert "the launcher did not set RANK_ID" in capsys.readouterr().err


def tuned(compile_s):
    prediction = PredictionRecord(
        estimated_run_s=10.0, estimated_real_tokens_per_s=100.0,
        estimated_steady_real_tokens_per_s=120.0, estimated_compile_s=compile_s,
        effective_token_fraction=0.9, peak_bytes=10**9,
    )  # fmt: skip
    record = ProvenanceConfig(
        data_fingerprint="f", num_samples=10, device="CPU", versions={}, study="s", trial=0,
        shapes=((2, 32),), prediction=prediction,
    )  # fmt: skip
    return make_config().model_copy(update={"provenance": record})


@pytest.mark.parametrize(
    ("config", "connect", "execute"),
    [
        (make_config(), "600", "1836"),
        # Three times 1,000 s; 45 * 68 s is the next that HCCL counts in.
        (tuned(1000.0), "3000", "3060"),
    ],
)
def test_time_limits_of_hccl_follow_the_warm_up(config, connect, execute):
    assert time_limits(config) == {
        "HCCL_CONNECT_TIMEOUT": connect,
        "HCCL_EXEC_TIMEOUT": execute,
    }


@pytest.mark.mindspore
def test_mpirun_brings_ranks_together_on_ascend_only(tmp_path):
    write_counting_rows(tmp_path / "data.mindrecord", 24, (3, 17))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(small_run(tmp_path, "out", 4)))
    world = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0"}
    environment = {f"OMPI_COMM_WORLD_{name}": value for name, value in world.items()}
    done = subprocess.run(
        [sys.executable, "-m", "tuner.cli.train", "--config", str(config), "--workers", "2"],
        capture_output=True, text=True, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "mpirun and rank tables bring ranks together on Ascend only" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["--config", "a.yaml"], ["--config", "a.yaml"]),
        (["--workers", "2", "--config", "a.yaml", "--resume"], ["--config", "a.yaml", "--resume"]),
        (
            ["--nodes=2", "--config=a.yaml", "--node-rank", "1", "--master", "10.0.0.1:8118",
             "--set", "train.out=b", "--work=4"],
            ["--config=a.yaml", "--set", "train.out=b"],
        ),
    ],
)  # fmt: skip
def test_ranks_are_not_given_what_msrun_would_take_for_its_own(given, left):
    assert without_worker_options(given) == left

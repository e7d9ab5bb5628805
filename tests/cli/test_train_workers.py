"""Options of several ranks: what does not go together is refused before anything starts."""

from __future__ import annotations

import pytest
import yaml

from tuner.cli.train import main


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

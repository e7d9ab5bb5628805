"""varseq-tune --emit: best.yaml in, a file beside it, no trial and no data."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from result_case import measured_result, result_setup

from tuner.cli.tune import OTHER_STACKS, main
from tuner.config.codec import format_config, load_config, write_text
from tuner.config.override import override_config
from tuner.report.gather import best_config
from tuner.report.handover import STACKS


@pytest.fixture(scope="module")
def best_yaml(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As a study writes it."""
    setup = result_setup(tmp_path_factory.mktemp("study"))
    config = best_config(measured_result(setup), setup)
    assert config is not None
    return format_config(config, header="best")


@pytest.fixture
def folder(tmp_path: Path, best_yaml: str) -> Path:
    """A results folder that holds a best.yaml and nothing else."""
    write_text(tmp_path / "results ü" / "best.yaml", best_yaml)
    return tmp_path / "results ü"


@pytest.mark.parametrize("stack", OTHER_STACKS)
def test_the_file_is_beside_best_yaml_and_its_path_is_printed(folder, stack, capsys):
    before = (folder / "best.yaml").read_bytes()
    assert main(["--emit", stack, "--out", str(folder)]) == 0
    path = folder / STACKS[stack].file_name
    assert capsys.readouterr().out == f"{path}\n"
    assert path.stat().st_size > 500
    assert sorted(file.name for file in folder.iterdir()) == sorted(["best.yaml", path.name])
    assert (folder / "best.yaml").read_bytes() == before


def test_the_command_line_knows_every_stack():
    assert set(OTHER_STACKS) == set(STACKS)


def test_the_rate_is_the_one_that_is_trained_with(folder):
    config = load_config(folder / "best.yaml")
    changes = {
        "optimizer.learning_rate": 0.004, "optimizer.rate_scaling": "sqrt",
        "optimizer.reference_tokens_per_update": 4 * 2048, "train.tokens_per_update": 2048,
    }  # fmt: skip
    write_text(folder / "best.yaml", format_config(override_config(config, changes)))
    assert main(["--emit", "mindformers", "--out", str(folder)]) == 0
    content = yaml.safe_load((folder / "mindformers.yaml").read_text())
    assert content["lr_schedule"]["learning_rate"] == pytest.approx(0.002)  # a quarter, its root


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    return error


def test_no_best_yaml_is_one_line_and_makes_no_folder(tmp_path, capsys):
    out = tmp_path / "none"
    error = refusal(capsys, "--emit", "mindspeed", "--out", str(out))
    assert error.startswith("varseq-tune: error: --emit needs a finished study: there is no ")
    assert not out.exists()


@pytest.mark.parametrize(
    "more",
    [("--data", "x"), ("--trials", "30"), ("--trials=3",), ("--dry-run",), ("--new-study",),
     ("--set", "train.epochs=2"), ("--config", "a.yaml"), ("--jobs", "2", "--confirm=0")],
)  # fmt: skip
def test_options_that_start_trials_are_refused(folder, capsys, more):
    error = refusal(capsys, "--emit", "minddata", "--out", str(folder), *more)
    assert "runs no trial" in error and more[0].partition("=")[0] in error
    assert [file.name for file in folder.iterdir()] == ["best.yaml"]


def test_a_file_that_cannot_be_read_is_one_line(folder, capsys):
    (folder / "best.yaml").write_text("data: [")
    assert "is not YAML" in refusal(capsys, "--emit", "minddata", f"--out={folder}")

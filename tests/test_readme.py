"""What the README says is there: links, options, make targets, the config by hand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.config.codec import parse_model, parse_yaml
from tuner.config.schema import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = {
    "varseq-data": ("tuner.cli.data", ("prepare", "demo", "inspect")),
    "varseq-tune": ("tuner.cli.tune", ()),
    "varseq-train": ("tuner.cli.train", ()),
    "varseq-doctor": ("tuner.cli.doctor", ()),
}


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("*/README.md")))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def help_of(module, *subcommand):
    done = subprocess.run(
        [sys.executable, "-m", module, *subcommand, "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    return done.stdout


def test_every_option_exists():
    helps = "".join(
        help_of(module) + "".join(help_of(module, name) for name in subcommands)
        for module, subcommands in COMMANDS.values()
    )
    known = set(re.findall(r"--[a-z][a-z-]+", helps))
    assert len(known) > 15
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) <= known


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_config_by_hand_is_whole():
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    config = parse_model(TrainConfig, parse_yaml(text), source="README")
    assert config.train.tokens_per_update == 32768

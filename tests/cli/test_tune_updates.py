"""How varseq-tune holds the size of an optimizer update, and what it says of it."""

from __future__ import annotations

import pytest
import yaml
from tune_case import fill_work_folder

from tuner.cli.tune import parse_options
from tuner.cli.tune_setup import set_up_study
from tuner.config.codec import format_config
from tuner.config.schema import TrainConfig
from tuner.trial.fake import FakeRunner, HiddenCost
from tuner.trial.folder import StudyFolder

# 20 rows of 3 tokens, 20 of 7, 8 of 14 and 4 of 30: 432 tokens.
NUM_ROWS, NUM_TOKENS, LONGEST = 52, 432, 30


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = fill_work_folder(tmp_path_factory.mktemp("updates"))
    space = yaml.safe_load((folder / "space.yaml").read_text())
    wide = {**space, "longest_rows_per_batch": [2, 4, 8]}
    (folder / "wide.yaml").write_text(yaml.safe_dump(wide))
    return folder


def set_up(work, out, train):
    """The study of a config that trains batches of four rows, and what was said."""
    config = {
        "data": {"path": str(work / "data.mindrecord")},
        "model": {"vocab_size": 32, "width": 16, "num_layers": 1, "num_heads": 2,
                  "num_kv_heads": 1, "ffn_width": 16},
        "batching": {"strategy": "fixed", "samples_per_batch": 4, "tokens_per_batch": None},
        "train": train,
    }  # fmt: skip
    file = work / f"{out}.yaml"
    file.write_text(format_config(TrainConfig.model_validate(config)))
    options = parse_options(
        ["--config", str(file), "--space", str(work / "wide.yaml"), "--out", str(work / out)]
    )
    notices: list[str] = []
    folder = StudyFolder(work / out)
    folder.path.mkdir()
    setup = set_up_study(options, folder, FakeRunner(HiddenCost()), notices.append)
    return setup, [notice for notice in notices if "update" in notice]


def test_an_update_that_the_config_leaves_open_is_told(work):
    """13 batches of the config hold 432 tokens: 33 each."""
    setup, (notice,) = set_up(work, "open", {})
    assert setup.space.longest_rows_per_batch == (2, 4, 8)
    assert notice == (
        f"train.tokens_per_update is not set: an update of the config holds 33 real tokens on "
        f"average, of every candidate {8 * LONGEST}, what the largest batch of the space holds; "
        "--set train.tokens_per_update=33 asks for updates as they are"
    )
    assert round(NUM_TOKENS / (NUM_ROWS / 4)) == 33


def test_batches_larger_than_the_update_of_the_config_are_not_tried(work):
    setup, (notice,) = set_up(work, "given", {"tokens_per_update": 130})
    assert setup.space.longest_rows_per_batch == (2, 4)
    assert notice.startswith("longest_rows_per_batch 8 not tried: batches of that many rows of 30")


def test_an_update_of_several_steps_is_held_in_tokens(work):
    """4 windows of 13 steps, the last of one: 432 / 4 tokens, less than 4 rows of 30."""
    setup, (converted, left_out) = set_up(work, "steps", {"steps_per_update": 4})
    assert setup.base.train.tokens_per_update == 108
    assert "is 108 real tokens an update on its own batches" in converted
    assert setup.space.longest_rows_per_batch == (2,)
    assert left_out.startswith("longest_rows_per_batch 4, 8 not tried")

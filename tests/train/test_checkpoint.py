"""Checkpoints are whole or not there; a damaged one is passed over with a notice."""

from __future__ import annotations

import os
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from tuner.errors import BadInputError
from tuner.train.checkpoint import CheckpointFolder, TrainState


def parameters(value):
    return [
        Parameter(Tensor(np.full((3, 2), value), ms.float32), name="a.weight"),
        Parameter(Tensor(np.full(5, -value), ms.float32), name="adam_m.a.weight"),
    ]


def state(steps):
    return TrainState(epoch=1, steps=steps, updates=steps // 2, shapes=((2, 8), (4, 4)))


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep_last=2)


def test_what_was_saved_is_loaded(folder):
    folder.save(state(7), parameters(0.1))
    target = parameters(0.0)
    assert folder.load_newest(target, pytest.fail) == state(7)
    for loaded, saved in zip(target, parameters(0.1), strict=True):
        assert np.array_equal(loaded.asnumpy(), saved.asnumpy())


def test_the_last_ones_are_kept(folder, tmp_path):
    for steps in (5, 10, 15):
        folder.save(state(steps), parameters(float(steps)))
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert names == ["step_00000010", "step_00000015"]
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step_00000015"
    newest = folder.newest_state()
    assert newest is not None
    assert newest.steps == 15


def damage_by_flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    rewrite(path, bytes(content))


def damage_by_cut(path):
    rewrite(path, path.read_bytes()[:-10])


def damage_by_removal(path):
    path.unlink()


def rewrite(path, content):
    os.chmod(path, 0o600)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [damage_by_flip, damage_by_cut, damage_by_removal])
@pytest.mark.parametrize("name", ["parameters.ckpt", "state.json"])
def test_a_damaged_checkpoint_is_passed_over(folder, tmp_path, damage, name):
    folder.save(state(5), parameters(5.0))
    folder.save(state(10), parameters(10.0))
    damage(tmp_path / "checkpoints" / "step_00000010" / name)
    notices = []
    target = parameters(0.0)
    assert folder.load_newest(target, notices.append).steps == 5
    assert target[0].asnumpy()[0, 0] == 5.0
    assert len(notices) == 1
    assert "step_00000010" in notices[0]


def test_parameters_of_another_model_are_not_taken(folder):
    folder.save(state(5), parameters(5.0))
    other = [Parameter(Tensor(np.zeros((4, 4)), ms.float32), name="a.weight"), parameters(0.0)[1]]
    with pytest.raises(BadInputError, match="no checkpoint to resume from"):
        folder.load_newest(other, lambda line: None)
    assert not other[0].asnumpy().any()


def test_no_checkpoint_at_all(folder):
    assert folder.newest_state() is None
    with pytest.raises(BadInputError, match="without --resume"):
        folder.load_newest(parameters(0.0), pytest.fail)


FULL_DISK = """
import resource, signal, sys
sys.path[:0] = {path!r}
import numpy as np, mindspore as ms
from pathlib import Path
from mindspore import Parameter, Tensor
from tuner.errors import BadInputError
from tuner.train.checkpoint import CheckpointFolder, TrainState
folder = CheckpointFolder(Path({folder!r}), keep_last=1)
large = [Parameter(Tensor(np.ones(300_000), ms.float32), name="w")]
folder.save(TrainState(steps=1), large)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    folder.save(TrainState(steps=2), large)
except BadInputError as error:
    print("ERROR", error)
"""


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path):
    """The limit on the size of a file stands in for the disk: writes fail in the same place."""
    script = FULL_DISK.format(path=sys.path, folder=str(tmp_path / "checkpoints"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "ERROR cannot save a checkpoint" in done.stdout, done.stderr[-2000:]
    folder = CheckpointFolder(tmp_path / "checkpoints", keep_last=1)
    target = [Parameter(Tensor(np.zeros(300_000), ms.float32), name="w")]
    assert folder.load_newest(target, pytest.fail).steps == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == [
        "step_00000001"
    ]


def test_a_kill_while_saving_leaves_the_last_checkpoint(tmp_path):
    """The unfinished folder of a killed save is not taken for a checkpoint."""
    folder = CheckpointFolder(tmp_path / "checkpoints", keep_last=2)
    folder.save(state(5), parameters(5.0))
    unfinished = tmp_path / "checkpoints" / ".unfinished_step_00000010"
    unfinished.mkdir()
    (unfinished / "parameters.ckpt").write_bytes(b"half")
    assert folder.load_newest(parameters(0.0), pytest.fail).steps == 5
    folder.save(state(10), parameters(10.0))
    assert not unfinished.exists()

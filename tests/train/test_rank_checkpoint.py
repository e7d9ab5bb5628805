"""Half a window differs between ranks: each gets its own back from the one checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.train.rank_names import is_of_other_rank, name_of_rank
from tuner.train.state import TrainState

pytestmark = pytest.mark.mindspore

NAMES = ("layers.0.w", "gradient.layers.0.w")


def parameters(*values):
    from mindspore import Parameter, Tensor

    return [
        Parameter(Tensor(np.full((2, 3), value, np.float32)), name=name)
        for name, value in zip(NAMES, values, strict=True)
    ]


def loaded(folder, rank):
    found = parameters(0.0, 0.0)
    state = folder.load_newest(found, pytest.fail, rank)
    return state, [float(parameter.asnumpy()[0, 0]) for parameter in found]


@pytest.mark.parametrize("in_background", [False, True])
def test_every_rank_gets_its_own_buffers(tmp_path, in_background):
    from tuner.train.checkpoint import CheckpointFolder
    from tuner.train.checkpoint_writer import CheckpointWriter

    folder = CheckpointFolder(tmp_path, keep_last=1)
    others = {
        name_of_rank(NAMES[1], rank): np.full((2, 3), 10.0 * rank, np.float32) for rank in (1, 2)
    }
    state = TrainState(steps=3, world_size=3, window_label_tokens=9)
    with CheckpointWriter(folder, in_background=in_background) as writer:
        writer.save(state, parameters(7.0, 5.0), others=others)
    assert loaded(folder, 0) == (state, [7.0, 5.0])
    assert loaded(folder, 1) == (state, [7.0, 10.0])
    assert loaded(folder, 2) == (state, [7.0, 20.0])


def test_between_windows_all_have_what_the_first_has(tmp_path):
    from tuner.train.checkpoint import CheckpointFolder

    folder = CheckpointFolder(tmp_path, keep_last=1)
    folder.save(TrainState(steps=4, world_size=2), parameters(7.0, 0.0))
    assert loaded(folder, 1)[1] == [7.0, 0.0]


def test_names_tell_whose_they_are():
    assert is_of_other_rank(name_of_rank("gradient.w", 12))
    assert not is_of_other_rank("gradient.layers.0.w")

"""Half a window differs between ranks: each gets its own back from the one checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.train.rank_names import is_of_other_rank, name_of_rank, take_own
from tuner.train.state import TrainState
from tuner.train.world import ALONE, World

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
    state = folder.load_newest(found, pytest.fail, World(rank=rank, size=3), [NAMES[1]])
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


def stored(*buffers):
    """A weight, and one number as the buffer of each rank that saved."""
    own = {name_of_rank("gradient.w", rank): value for rank, value in enumerate(buffers) if rank}
    arrays = {"w": 7.0, "gradient.w": buffers[0], **own}
    return {name: np.full((2,), value, np.float32) for name, value in arrays.items()}


@pytest.mark.parametrize(
    ("buffers", "of_ranks"),
    [
        ((1.0, 2.0, 4.0, 8.0), (15.0,)),
        ((1.0, 2.0, 4.0, 8.0), (5.0, 10.0)),
        ((1.0, 2.0, 4.0), (5.0, 2.0)),
        ((1.0, 2.0), (1.0, 2.0)),
        ((1.0, 2.0), (1.0, 2.0, 0.0, 0.0)),
        ((3.0,), (3.0, 0.0)),
    ],
)
def test_of_other_numbers_of_ranks_nothing_is_lost_or_counted_twice(buffers, of_ranks):
    for rank, value in enumerate(of_ranks):
        world = World(rank=rank, size=len(of_ranks))
        found = take_own(stored(*buffers), world, {"gradient.w"})
        assert {name: array.tolist() for name, array in found.items()} == {
            "w": [7.0, 7.0],
            "gradient.w": [value, value],
        }


def test_what_ranks_have_not_of_their_own_is_left_as_it_is():
    found = take_own(stored(1.0, 2.0), ALONE, ())
    assert found["gradient.w"].tolist() == [1.0, 1.0]


def test_names_tell_whose_they_are():
    assert is_of_other_rank(name_of_rank("gradient.w", 12))
    assert not is_of_other_rank("gradient.layers.0.w")

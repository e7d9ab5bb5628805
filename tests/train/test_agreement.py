"""Ranks that are about to train something else are named, with both values."""

from __future__ import annotations

import copy

import pytest
from ranks_case import KnownRanks

from tuner.errors import BadInputError
from tuner.train.agreement import check_agreement, check_files
from tuner.train.rank_files import RankFolder

pytestmark = pytest.mark.mindspore

VALUES = {
    "data": "d" * 64,
    "config": {"optimizer.learning_rate": 0.001, "train.clip_norm": 1.0},
    "plan": "a" * 64,
    "shapes": [[4, 8]],
    "versions": {"mindspore": "2.10.0", "numpy": "1.26.4"},
}


def changed(*path, value):
    values = copy.deepcopy(VALUES)
    part = values
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return values


class Writing(KnownRanks):
    """Ranks whose second one has given values; a gathering hashes them as the product does."""

    def __init__(self, theirs):
        super().__init__([])
        self.theirs = theirs

    def gather(self, values):
        if self.theirs is None:
            return super().gather(values)
        theirs, self.theirs = self.theirs, None
        caught = Catching()
        with pytest.raises(StopIteration):
            check_agreement(caught, theirs, None)
        self.others = [[caught.values]]
        return super().gather(values)


class Catching:
    def gather(self, values):
        self.values = values
        raise StopIteration


@pytest.fixture
def folder(tmp_path):
    return RankFolder(tmp_path)


def test_equal_ranks_agree(folder):
    for rank in (0, 1):
        folder.write_values(rank, VALUES)
    check_files(folder, 2)
    check_agreement(Writing(copy.deepcopy(VALUES)), VALUES, folder)


@pytest.mark.parametrize(
    ("theirs", "phrase"),
    [
        (
            changed("data", value="e" * 64),
            "rank 1 differs from rank 0 in data: eeeeeeeeeeee there, dddddddddddd on rank 0",
        ),
        (
            changed("config", "optimizer.learning_rate", value=0.1),
            "in config.optimizer.learning_rate: 0.1 there, 0.001 on rank 0",
        ),
        (
            changed("versions", "numpy", value="1.25.0"),
            'in versions.numpy: "1.25.0" there, "1.26.4" on rank 0',
        ),
        (changed("shapes", value=[[4, 16]]), "in shapes: [[4, 16]] there, [[4, 8]] on rank 0"),
        (changed("config", "new", value=1), "in config.new: 1 there, not set on rank 0"),
    ],
)
def test_a_difference_is_named_by_files_and_by_hashes(folder, theirs, phrase):
    folder.write_values(0, VALUES)
    folder.write_values(1, theirs)
    with pytest.raises(BadInputError) as by_files:
        check_files(folder, 2)
    with pytest.raises(BadInputError) as by_hashes:
        check_agreement(Writing(theirs), VALUES, folder)
    assert phrase in str(by_files.value)
    assert str(by_files.value) == str(by_hashes.value)


def test_without_files_the_hashes_still_tell_the_rank(folder):
    check_files(folder, 2)
    with pytest.raises(BadInputError, match="rank 1 is about to train something else"):
        check_agreement(Writing(changed("plan", value="b" * 64)), VALUES, folder)

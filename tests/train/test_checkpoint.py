"""Checkpoints are whole or not there; a damaged one is passed over with a notice."""

from __future__ import annotations

import os
import resource
import threading
from contextlib import contextmanager

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Parameter, Tensor

from tuner.errors import BadInputError
from tuner.train.checkpoint import CheckpointFolder, take_snapshot
from tuner.train.checkpoint_writer import CheckpointWriter
from tuner.train.scaling import LossScale
from tuner.train.state import BestEvaluation, SavedState, TrainState, format_saved, parse_saved


def parameters(value):
    return [
        Parameter(Tensor(np.full((3, 2), value), ms.float32), name="a.weight"),
        Parameter(Tensor(np.full(5, -value), ms.float32), name="adam_m.a.weight"),
    ]


def state(steps):
    return TrainState(epoch=1, steps=steps, updates=steps // 2, shapes=((2, 8), (4, 4)))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def folder(path):
    return CheckpointFolder(path, keep_last=2)


def names_in(path):
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def pointer(path):
    return (path / "latest").read_text().strip()


def test_what_was_saved_is_loaded(folder):
    folder.save(state(7), parameters(0.1))
    target = parameters(0.0)
    assert folder.load_newest(target, pytest.fail) == state(7)
    assert folder.newest_state(pytest.fail) == state(7)
    for loaded, saved in zip(target, parameters(0.1), strict=True):
        assert np.array_equal(loaded.asnumpy(), saved.asnumpy())


def test_mindspore_reads_the_parameters_too(folder, path):
    folder.save(state(7), parameters(0.1))
    file = path / "step_00000007" / "parameters.safetensors"
    loaded = ms.load_checkpoint(str(file), format="safetensors")
    for saved in parameters(0.1):
        assert loaded[saved.name].asnumpy().tobytes() == saved.asnumpy().tobytes()


FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@given(norms=st.lists(FLOATS, max_size=30), loss=FLOATS, scale=FLOATS)
def test_every_number_of_a_state_comes_back_to_the_bit(norms, loss, scale):
    saved = SavedState(
        state=TrainState(
            steps=3,
            norms=tuple(norms),
            loss_scale=LossScale(scale=scale, good_updates=2),
            best=BestEvaluation(loss=loss, steps=1),
            config={"optimizer": {"learning_rate": loss, "no_decay": ["norms"]}, "data": {}},
            shapes=((2, 8), (4, 4)),
        ),
        parameters_sha256="ab",
        evaluation_loss=loss,
    )
    parsed = parse_saved(format_saved(saved))
    assert parsed == saved
    assert repr(parsed.state.norms) == repr(tuple(norms))  # -0.0 equals 0.0


def test_the_last_ones_are_kept(folder, path):
    for steps in (5, 10, 15):
        folder.save(state(steps), parameters(float(steps)))
    assert names_in(path) == ["step_00000010", "step_00000015"]
    assert pointer(path) == "step_00000015"
    newest = folder.newest_state(pytest.fail)
    assert newest is not None
    assert newest.steps == 15


class TestBest:
    LOSSES = ((5, 3.0), (10, 1.0), (15, 2.0), (20, None), (25, 2.5), (30, None), (35, 4.0))

    def test_the_lowest_losses_are_kept_besides_and_the_lowest_is_loaded(self, path):
        folder = CheckpointFolder(path, keep_last=2, keep_best=2)
        kept = []
        for steps, loss in self.LOSSES:
            folder.save(state(steps), parameters(float(steps)), loss)
            kept.append([int(name[5:]) for name in names_in(path)])
        assert kept == [
            [5], [5, 10], [10, 15], [10, 15, 20], [10, 15, 20, 25], [10, 15, 25, 30],
            [10, 15, 30, 35],
        ]  # fmt: skip
        target = parameters(0.0)
        assert folder.load_best(target, pytest.fail).steps == 10
        assert target[0].asnumpy()[0, 0] == 10.0
        assert folder.load_newest(target, pytest.fail).steps == 35

    def test_of_equal_losses_the_first_and_of_damaged_ones_the_next(self, path):
        folder = CheckpointFolder(path, keep_last=9, keep_best=1)
        for steps, loss in ((1, 2.0), (2, 1.0), (3, 1.0)):
            folder.save(state(steps), parameters(float(steps)), loss)
        assert folder.load_best(parameters(0.0), pytest.fail).steps == 2
        damage_by_cut(path / "step_00000002" / "parameters.safetensors")
        notices = []
        assert folder.load_best(parameters(0.0), notices.append).steps == 3
        assert "step_00000002" in notices[0]

    def test_what_would_be_kept_is_known_before_it_is_saved(self, path):
        folder = CheckpointFolder(path, keep_last=1, keep_best=2)
        assert folder.is_among_best(9.0, 1)
        for steps, loss in ((1, 2.0), (2, 3.0)):
            folder.save(state(steps), parameters(0.0), loss)
        assert folder.is_among_best(2.5, 3)
        assert not folder.is_among_best(3.0, 3)
        assert not folder.is_among_best(float("nan"), 3)
        # Nothing later than the first step counts: it will be evaluated again.
        assert folder.is_among_best(9.0, 2)
        assert not CheckpointFolder(path, keep_last=1).is_among_best(0.0, 3)

    def test_a_loss_that_is_no_number_is_no_evaluation(self, path):
        folder = CheckpointFolder(path, keep_last=1, keep_best=1)
        folder.save(state(1), parameters(0.0), float("nan"))
        folder.save(state(2), parameters(0.0))
        assert names_in(path) == ["step_00000002"]
        with pytest.raises(BadInputError, match="no checkpoint"):
            folder.load_best(parameters(0.0), pytest.fail)


def damage_by_flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damage_by_cut(file):
    file.write_bytes(file.read_bytes()[:-10])


def damage_by_removal(file):
    file.unlink()


def damage_by_emptying(file):
    file.write_bytes(b"")


DAMAGES = [damage_by_flip, damage_by_cut, damage_by_removal, damage_by_emptying]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["parameters.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_passed_over(folder, path, damage, name):
    folder.save(state(5), parameters(5.0))
    folder.save(state(10), parameters(10.0))
    damage(path / "step_00000010" / name)
    notices = []
    target = parameters(0.0)
    assert folder.load_newest(target, notices.append).steps == 5
    assert target[0].asnumpy()[0, 0] == 5.0
    assert len(notices) == 1
    assert "step_00000010" in notices[0]
    again = []
    found = folder.newest_state(again.append)
    assert found is not None
    assert (found.steps, again) == (5, notices)


@pytest.mark.parametrize("place", range(0, 100, 7))
def test_a_flipped_bit_anywhere_is_noticed(folder, path, place):
    folder.save(state(5), parameters(5.0))
    for name in ("parameters.safetensors", "state.json"):
        file = path / "step_00000005" / name
        content = bytearray(file.read_bytes())
        content[place * len(content) // 100] ^= 1 << place % 8
        whole = file.read_bytes()
        file.write_bytes(content)
        assert folder.newest_state(lambda line: None) is None, name
        file.write_bytes(whole)
    assert folder.newest_state(pytest.fail) == state(5)


@pytest.mark.parametrize("damage", DAMAGES)
def test_with_a_damaged_pointer_the_newest_whole_one_is_taken(folder, path, damage):
    for steps in (5, 10):
        folder.save(state(steps), parameters(float(steps)))
    damage(path / "latest")
    notices = []
    assert folder.load_newest(parameters(0.0), notices.append).steps == 10
    assert len(notices) == 1
    assert "latest" in notices[0]
    folder.save(state(15), parameters(15.0))
    assert folder.load_newest(parameters(0.0), pytest.fail).steps == 15


def test_the_pointer_decides_and_the_next_save_clears_what_was_left(folder, path):
    """A kill between the renaming and the swap, or a user who goes back."""
    for steps in (5, 10):
        folder.save(state(steps), parameters(float(steps)))
    (path / "latest").write_text("step_00000005\n")
    assert folder.load_newest(parameters(0.0), pytest.fail).steps == 5
    folder.save(state(8), parameters(8.0))
    assert names_in(path) == ["step_00000005", "step_00000008"]
    folder.save(state(10), parameters(-10.0))
    target = parameters(0.0)
    assert folder.load_newest(target, pytest.fail).steps == 10
    assert target[0].asnumpy()[0, 0] == -10.0


def test_parameters_of_another_model_are_not_taken(folder):
    folder.save(state(5), parameters(5.0))
    other = [Parameter(Tensor(np.zeros((4, 4)), ms.float32), name="a.weight"), parameters(0.0)[1]]
    with pytest.raises(BadInputError, match="no checkpoint to resume from"):
        folder.load_newest(other, lambda line: None)
    assert not other[0].asnumpy().any()


def test_no_checkpoint_at_all(folder):
    assert folder.newest_state(pytest.fail) is None
    with pytest.raises(BadInputError, match="without --resume"):
        folder.load_newest(parameters(0.0), pytest.fail)


@contextmanager
def largest_file(num_bytes):
    """A limit on the size of files stands in for a full disk: writes fail in the same place."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [100, 1000, 200_000])
def test_a_full_disk_leaves_the_last_checkpoint_whole(path, room):
    folder = CheckpointFolder(path, keep_last=1)
    large = [Parameter(Tensor(np.ones(300_000), ms.float32), name="w")]
    folder.save(TrainState(steps=1), large)
    with (
        largest_file(room),
        pytest.raises(
            BadInputError, match=r"cannot save a checkpoint .*: File too large"
        ) as error,
    ):
        folder.save(TrainState(steps=2), large)
    assert "--resume" in str(error.value)
    assert folder.load_newest(large, pytest.fail).steps == 1
    assert names_in(path) == ["step_00000001"]


def test_a_kill_while_saving_leaves_the_last_checkpoint(folder, path):
    """The unfinished folder of a killed save is not taken for a checkpoint."""
    folder.save(state(5), parameters(5.0))
    unfinished = path / ".unfinished_step_00000010"
    unfinished.mkdir()
    (unfinished / "parameters.safetensors").write_bytes(b"half")
    assert folder.load_newest(parameters(0.0), pytest.fail).steps == 5
    folder.save(state(12), parameters(12.0))
    assert not unfinished.exists()


class SlowFolder(CheckpointFolder):
    """Writes when it is let, or fails."""

    def __init__(self, path):
        super().__init__(path, keep_last=9)
        self.is_open = threading.Event()
        self.entered = threading.Event()
        self.fails = False

    def write(self, state, snapshot, evaluation_loss=None):
        self.entered.set()
        assert self.is_open.wait(60)
        if self.fails:
            raise BadInputError("cannot save a checkpoint: no room", fix="make room")
        return super().write(state, snapshot, evaluation_loss)


@pytest.fixture
def slow(path):
    return SlowFolder(path)


class TestInBackground:
    def test_the_state_is_that_of_the_moment_however_late_it_is_written(self, slow, path):
        weights = parameters(5.0)
        with CheckpointWriter(slow, in_background=True) as writer:
            writer.save(state(5), weights)
            assert slow.entered.wait(60)
            # Steps go on in the meantime.
            for weight in weights:
                weight.set_data(Tensor(np.full(weight.shape, 6.0), ms.float32))
            assert not path.exists()
            slow.is_open.set()
        target = parameters(0.0)
        assert slow.load_newest(target, pytest.fail) == state(5)
        assert target[0].asnumpy()[0, 0] == 5.0

    def test_a_snapshot_shares_no_memory_with_the_parameters(self):
        weights = parameters(5.0)
        snapshot = take_snapshot(weights)
        for weight in weights:
            assert not np.shares_memory(snapshot[weight.name], weight.asnumpy())
            weight.asnumpy()[...] = 6.0
        assert snapshot["a.weight"][0, 0] == 5.0

    def test_one_is_in_flight_and_the_next_waits_for_it(self, slow, path):
        with CheckpointWriter(slow, in_background=True) as writer:
            writer.save(state(5), parameters(5.0))
            assert slow.entered.wait(60)
            timer = threading.Timer(0.1, slow.is_open.set)
            timer.start()
            writer.save(state(10), parameters(10.0))
            assert slow.is_open.is_set()
            assert "step_00000005" in names_in(path)
            assert writer.last_saved_steps() == 10
        assert pointer(path) == "step_00000010"

    def test_a_failure_is_raised_once_and_the_last_whole_one_stays(self, slow, path):
        slow.is_open.set()
        writer = CheckpointWriter(slow, in_background=True, saved_steps=2)
        writer.save(state(5), parameters(5.0))
        writer.last_saved_steps()
        slow.fails = True
        writer.save(state(10), parameters(10.0))
        assert writer.last_saved_steps() == 5
        with pytest.raises(BadInputError, match="no room"):
            writer.raise_failure()
        writer.raise_failure()
        assert names_in(path) == ["step_00000005"]
        assert pointer(path) == "step_00000005"

    def test_a_failure_is_raised_by_the_next_save_and_at_the_end(self, slow):
        slow.is_open.set()
        slow.fails = True
        with (
            pytest.raises(BadInputError, match="no room"),
            CheckpointWriter(slow, in_background=True) as writer,
        ):
            writer.save(state(5), parameters(5.0))
        writer = CheckpointWriter(slow, in_background=True)
        writer.save(state(5), parameters(5.0))
        with pytest.raises(BadInputError, match="no room"):
            writer.save(state(10), parameters(10.0))

    def test_what_ends_a_run_is_not_hidden_by_a_failure_after_it(self, slow):
        slow.fails = True
        slow.is_open.set()
        with (
            pytest.raises(KeyError, match="the first"),
            CheckpointWriter(slow, in_background=True) as writer,
        ):
            writer.save(state(5), parameters(5.0))
            raise KeyError("the first")

    def test_leaving_waits_for_the_write(self, slow, path):
        threading.Timer(0.1, slow.is_open.set).start()
        with CheckpointWriter(slow, in_background=True) as writer:
            writer.save(state(5), parameters(5.0))
        assert pointer(path) == "step_00000005"


def test_in_the_foreground_it_is_written_when_save_returns(folder, path):
    with CheckpointWriter(folder, in_background=False) as writer:
        writer.save(state(5), parameters(5.0))
        assert pointer(path) == "step_00000005"
        assert writer.last_saved_steps() == 5


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    folder = CheckpointFolder(tmp_path / "file" / "checkpoints", keep_last=1)
    with pytest.raises(BadInputError, match=r"cannot save a checkpoint.*--resume"):
        folder.save(state(1), parameters(1.0))


def test_a_pointer_that_cannot_be_swapped(folder, path):
    folder.save(state(5), parameters(5.0))
    os.remove(path / "latest")
    (path / "latest").mkdir()
    with pytest.raises(BadInputError, match="cannot save a checkpoint"):
        folder.save(state(10), parameters(10.0))
    assert "step_00000005" in names_in(path)

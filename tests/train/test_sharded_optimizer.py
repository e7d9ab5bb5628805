"""Two ranks that share out the moments, as two engines: together they are one that does not."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import make_config
from tiny_model import TINY_MODEL

from tuner.config.override import override_config
from tuner.train.world import World

pytestmark = pytest.mark.mindspore

RANKS = 2


@pytest.fixture(scope="module")
def engines(device):
    """The whole one, and those of the ranks, after three updates by known gradients."""
    from tuner.train.engine import Engine

    config = override_config(make_config(TINY_MODEL), {"optimizer.sharded": True}, source="test")
    whole, *ranks = engines = [Engine(config, device, 8) for _ in range(1 + RANKS)]
    whole.share_out(World())
    for rank, engine in enumerate(ranks):
        engine.share_out(World(rank=rank, size=RANKS))
    for update in (1, 2, 3):
        norms = []
        for engine in engines:
            give_gradients(engine, seed=update)
            norms.append(engine.run_update(0.01, update, label_tokens=7, clip_norm=0.5))
            assert all(not buffer.any() for buffer in engine.read_gradients())
        assert norms[0] == pytest.approx(norm_by_hand(whole, update), rel=1e-5)
        assert norms == [norms[0]] * len(norms)
        share_weights(ranks)
    return whole, ranks


def gradients_of(engine, seed):
    random = np.random.default_rng(seed)
    return [random.normal(size=weight.shape).astype(np.float32) for weight in engine.weights]


def give_gradients(engine, seed):
    from mindspore import Tensor

    for buffer, value in zip(engine.gradients, gradients_of(engine, seed), strict=True):
        buffer.set_data(Tensor(value))


def norm_by_hand(engine, seed):
    return (
        float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients_of(engine, seed))))
        / 7
    )


def share_weights(ranks):
    """What the sum over ranks does, by hand."""
    from mindspore import Tensor

    for place, owner in enumerate(ranks[0].owners):
        updated = ranks[owner].weights[place].asnumpy()
        for engine in ranks:
            engine.weights[place].set_data(Tensor(updated))


def bits(parameters):
    return {one.name: one.asnumpy().tobytes() for one in parameters}


def test_weights_and_moments_are_those_of_one_rank_that_keeps_all(engines):
    whole, ranks = engines
    assert whole.owners is None
    assert whole.moments_elsewhere == {}
    for engine in ranks:
        assert bits(engine.weights) == bits(whole.weights)
    kept = [bits(engine.moments.values()) for engine in ranks]
    assert all(kept)
    assert not kept[0].keys() & kept[1].keys()
    assert kept[0] | kept[1] == bits(whole.moments.values())
    for one, other in (ranks, reversed(ranks)):
        shapes = {name: tuple(moment.shape) for name, moment in other.moments.items()}
        assert one.moments_elsewhere == shapes


def test_each_rank_keeps_about_half(engines):
    whole, ranks = engines
    sizes = [sum(moment.size for moment in engine.moments.values()) for engine in (whole, *ranks)]
    assert sum(sizes[1:]) == sizes[0]
    largest = 2 * max(weight.size for weight in whole.weights)
    assert max(sizes[1:]) <= max(largest, 2 / 3 * sizes[0])


def test_one_checkpoint_serves_all_and_one(engines, device, tmp_path):
    """Written by the first rank with the moments of the other; loaded by each, and by one."""
    from tuner.train.checkpoint import CheckpointFolder
    from tuner.train.checkpoint_writer import CheckpointWriter
    from tuner.train.engine import Engine
    from tuner.train.state import TrainState

    whole, ranks = engines
    folder = CheckpointFolder(tmp_path, keep_last=1)
    others = {name: moment.asnumpy() for name, moment in ranks[1].moments.items()}
    with CheckpointWriter(folder, in_background=False) as writer:
        writer.save(TrainState(steps=3, world_size=RANKS), ranks[0].parameters, others=others)
    config = override_config(make_config(TINY_MODEL), {"optimizer.sharded": True}, source="test")
    for world, like in (
        (World(), whole),
        *((World(rank=r, size=RANKS), ranks[r]) for r in (0, 1)),
    ):
        fresh = Engine(config, device, 8)
        fresh.share_out(world)
        own = [gradient.name for gradient in fresh.gradients]
        folder.load_newest(fresh.parameters, pytest.fail, world, own, fresh.moments_elsewhere)
        assert bits(fresh.parameters) == bits(like.parameters)

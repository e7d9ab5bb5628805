"""Which weights weight decay leaves out, in the built-in decoder and in anyone's Cell."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from strategies import make_config
from tiny_model import TINY_MODEL

from tuner.train.model import Decoder
from tuner.train.weight_groups import are_decayed, weight_groups

pytestmark = pytest.mark.mindspore


def groups_of(cell):
    """Group -> names, sorted."""
    found = {}
    for name, group in weight_groups(cell).items():
        found.setdefault(group, []).append(name)
    return {group: sorted(names) for group, names in found.items()}


def test_the_built_in_decoder():
    config = make_config({**TINY_MODEL, "model.num_layers": 1})
    decoder = Decoder(config.model, max_length=8, seed=0)
    found = groups_of(decoder)
    assert found.keys() == {None, "norms", "embeddings"}
    assert len(found["embeddings"]) == 1
    shapes = {weight.name: weight.shape for weight in decoder.trainable_params()}
    assert shapes[found["embeddings"][0]] == (23, 16)
    assert len(found["norms"]) == 3
    assert all(shapes[name] == (16,) for name in found["norms"])
    assert len(found[None]) == 7
    assert all(name.endswith("_proj.weight") for name in found[None])


class Foreign(nn.Cell):
    """A Cell as users write them."""

    def __init__(self, *, is_tied):
        super().__init__()
        self.tokens = nn.Embedding(11, 4)
        self.places = nn.Embedding(9, 4)
        self.norm = nn.LayerNorm((4,))
        self.dense = nn.Dense(4, 6)
        self.scale = Parameter(Tensor(1.0, ms.float32), name="scale")
        self.lm_head = nn.Dense(4, 11, has_bias=False)
        if is_tied:
            self.lm_head.weight = self.tokens.embedding_table


def test_another_cell():
    found = groups_of(Foreign(is_tied=False))
    assert found["embeddings"] == ["places.embedding_table", "tokens.embedding_table"]
    assert found["biases"] == ["dense.bias", "norm.beta"]
    assert found["norms"] == ["norm.gamma", "scale"]
    assert found[None] == ["dense.weight", "lm_head.weight"]


def test_a_tied_head_is_the_embedding():
    found = groups_of(Foreign(is_tied=True))
    assert found["embeddings"] == ["places.embedding_table", "tokens.embedding_table"]
    assert found[None] == ["dense.weight"]


class Adapted(nn.Cell):
    """A frozen projection with a low-rank pair beside it."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((6, 4)), ms.float32), requires_grad=False)
        self.lora_a = Parameter(Tensor(np.zeros((2, 4)), ms.float32), name="lora_a")
        self.lora_b = Parameter(Tensor(np.zeros((6, 2)), ms.float32), name="lora_b")


def test_pairs_of_lora_are_decayed():
    cell = Adapted()
    weights = cell.trainable_params()
    assert [weight.name for weight in weights] == ["lora_a", "lora_b"]
    assert are_decayed(cell, weights, ("norms", "biases", "embeddings")) == (True, True)


@pytest.mark.parametrize(
    ("no_decay", "kept"),
    [
        ((), {"tokens", "places", "norm", "dense.weight", "dense.bias", "scale", "lm_head"}),
        (("norms",), {"tokens", "places", "norm.beta", "dense.weight", "dense.bias", "lm_head"}),
        (("norms", "biases"), {"tokens", "places", "dense.weight", "lm_head"}),
        (("norms", "biases", "embeddings"), {"dense.weight", "lm_head"}),
    ],
)
def test_only_the_groups_that_are_named_are_left_out(no_decay, kept):
    cell = Foreign(is_tied=False)
    weights = cell.trainable_params()
    decayed = are_decayed(cell, weights, no_decay)
    found = {weight.name for weight, is_it in zip(weights, decayed, strict=True) if is_it}
    assert found == {
        weight.name for weight in weights if any(weight.name.startswith(name) for name in kept)
    }

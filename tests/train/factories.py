"""Cells of a user, for `model.factory`."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

WIDTH = 16


class OneLayer(nn.Cell):
    """Attention by the book, masked by segments; random numbers are MindSpore's own."""

    def __init__(self, vocab_size: int, max_length: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, WIDTH)
        self.places = nn.Embedding(max_length, WIDTH)
        self.qkv = nn.Dense(WIDTH, 3 * WIDTH)
        self.out = nn.Dense(WIDTH, vocab_size)
        self.frozen = Parameter(Tensor(np.ones(WIDTH), ms.float32), requires_grad=False)

    def construct(self, input_ids_BT, segment_ids_BT, position_ids_BT):
        B, T = input_ids_BT.shape
        x = self.table(input_ids_BT) + self.places(position_ids_BT)
        qkv = self.qkv(x * self.frozen)
        q, k, v = qkv[..., :WIDTH], qkv[..., WIDTH : 2 * WIDTH], qkv[..., 2 * WIDTH :]
        scores = ops.bmm(q, k.transpose(0, 2, 1)) * WIDTH**-0.5
        order = ops.arange(T)
        is_seen = ops.logical_and(
            segment_ids_BT.reshape(B, T, 1) == segment_ids_BT.reshape(B, 1, T),
            order.reshape(T, 1) >= order.reshape(1, T),
        )
        scores = scores + (1.0 - is_seen.astype(ms.float32)) * -1e9
        return self.out(x + ops.bmm(ops.softmax(scores, -1), v))


def one_layer(config, max_length):
    return OneLayer(config.model.vocab_size, max_length)


def too_narrow(config, max_length):
    return OneLayer(config.model.vocab_size - 1, max_length)


def no_cell(config, max_length):
    return [config, max_length]


def frozen(config, max_length):
    model = one_layer(config, max_length)
    for parameter in model.get_parameters():
        parameter.requires_grad = False
    return model


def failing(config, max_length):
    raise KeyError("width")


class TwoInputs(OneLayer):
    def construct(self, input_ids_BT, segment_ids_BT):
        return super().construct(input_ids_BT, segment_ids_BT, input_ids_BT)


def two_inputs(config, max_length):
    return TwoInputs(config.model.vocab_size, max_length)


class Whole(OneLayer):
    def construct(self, input_ids_BT, segment_ids_BT, position_ids_BT):
        return input_ids_BT


def whole_numbers(config, max_length):
    return Whole(config.model.vocab_size, max_length)


not_a_function = 3

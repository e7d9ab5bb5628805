"""Cells for `model.factory` with faults in them, each of one kind."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import flash_attention_score

WIDTH = 16


class Scale(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(WIDTH, np.float32)), name="weight")

    def construct(self, x, mask):
        return x * self.weight


class Attention(nn.Cell):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Dense(WIDTH, 3 * WIDTH)

    def construct(self, x, mask):
        qkv = self.qkv(x)
        q, k, v = qkv[..., :WIDTH], qkv[..., WIDTH : 2 * WIDTH], qkv[..., 2 * WIDTH :]
        scores = ops.bmm(q, k.transpose(0, 2, 1)) * WIDTH**-0.5
        scores = scores + mask
        return ops.bmm(ops.softmax(scores, -1), v)


class FixedReshape(Attention):
    """Of B=3 L=12 its reshape makes [2, 8, 108], and breaks only where the mask is added."""

    def construct(self, x, mask):
        qkv = self.qkv(x).reshape(2, 8, -1)
        return super().construct(qkv[..., :WIDTH], mask)


class FixedSizes(Attention):
    def construct(self, x, mask):
        x = x.reshape(2, 8, WIDTH)
        return super().construct(x, mask)


class Flash(Attention):
    """By flash attention, one head, with the mask as the op wants it."""

    def construct(self, x, mask):
        parts = [one.astype(ms.float16).expand_dims(1) for one in ops.split(self.qkv(x), WIDTH, 2)]
        mixed = self.attend(*parts, self.hidden(mask.expand_dims(1)))
        return mixed.astype(ms.float32).squeeze(1)

    def hidden(self, mask):
        return mask < 0

    def attend(self, q, k, v, mask):
        return ops.flash_attention_score(
            q, k, v, 1, attn_mask=mask, scalar_value=WIDTH**-0.5, input_layout="BNSD"
        )


class FloatMask(Flash):
    """Hands over what is added to scores, which the op takes for true and false."""

    def hidden(self, mask):
        return mask


class FloatMaskByName(FloatMask):
    def attend(self, q, k, v, mask):
        return flash_attention_score(
            q, k, v, 1, attn_mask=mask, scalar_value=WIDTH**-0.5, input_layout="BNSD"
        )


class FloatMaskKept(FloatMask):
    def __init__(self):
        super().__init__()
        self.op = flash_attention_score

    def attend(self, q, k, v, mask):
        return self.op(q, k, v, 1, None, None, None, mask, input_layout="BNSD")


@ms.jit
def attend_in_a_graph(q, k, v, mask):
    return ops.flash_attention_score(q, k, v, 1, attn_mask=mask, input_layout="BNSD")


class FloatMaskInJit(FloatMask):
    def attend(self, q, k, v, mask):
        return attend_in_a_graph(q, k, v, mask)


class FlashThenBroken(FloatMask):
    def construct(self, x, mask):
        return super().construct(x, mask).reshape(2, 8, WIDTH)


class Block(nn.Cell):
    def __init__(self, attention, width_of_second=2 * WIDTH):
        super().__init__()
        self.attention = attention
        self.first = nn.Dense(WIDTH, 2 * WIDTH)
        self.second = nn.Dense(width_of_second, WIDTH)

    def construct(self, x, mask):
        x = x + self.attention(x, mask)
        return x + self.second(self.first(x))


class Model(nn.Cell):
    def __init__(self, vocab_size, max_length, block=None):
        super().__init__()
        self.table = nn.Embedding(vocab_size, WIDTH)
        self.places = nn.Embedding(max_length, WIDTH)
        self.layers = nn.CellList([Scale(), block or Block(Attention())])
        self.out = nn.Dense(WIDTH, vocab_size)

    def construct(self, input_ids_BT, segment_ids_BT, position_ids_BT):
        T = input_ids_BT.shape[1]
        x = self.table(input_ids_BT) + self.places(position_ids_BT)
        order = ops.arange(T)
        is_later = order.reshape(1, T) > order.reshape(T, 1)
        mask = is_later.astype(ms.float32).reshape(1, T, T) * -1e9
        mask = mask + self.padding(segment_ids_BT)
        for layer in self.layers:
            x = layer(x, mask)
        return self.out(x)

    def padding(self, segment_ids_BT):
        """What hides padding, [B, 1, T]."""
        B = segment_ids_BT.shape[0]
        return (segment_ids_BT == 0).astype(ms.float32).reshape(B, 1, -1) * -1e9


class ShortMask(Model):
    """Its mask is that of the targets, one token shorter than the ids."""

    def padding(self, segment_ids_BT):
        return super().padding(segment_ids_BT[:, :-1])


class Windows(nn.Cell):
    """Cuts all rows into windows of 8 tokens and leaves them so."""

    def construct(self, x):
        return x.reshape(-1, 8, WIDTH)


class LeftInWindows(Model):
    def __init__(self, vocab_size, max_length):
        super().__init__(vocab_size, max_length)
        self.out = nn.SequentialCell(Windows(), self.out)


class WrongDtype(Model):
    """MindSpore has no bfloat16 softmax for CPU."""

    def padding(self, segment_ids_BT):
        hidden = super().padding(segment_ids_BT)
        return ops.softmax(hidden.astype(ms.bfloat16)).astype(ms.float32)


def sound(config, max_length):
    return Model(config.model.vocab_size, max_length)


def fixed_reshape(config, max_length):
    return Model(config.model.vocab_size, max_length, Block(FixedReshape()))


def fixed_sizes(config, max_length):
    return Model(config.model.vocab_size, max_length, Block(FixedSizes()))


def wrong_width(config, max_length):
    block = Block(Attention(), width_of_second=2 * WIDTH + 8)
    return Model(config.model.vocab_size, max_length, block)


def few_places(config, max_length):
    return Model(config.model.vocab_size, 8)


def short_mask(config, max_length):
    return ShortMask(config.model.vocab_size, max_length)


def left_in_windows(config, max_length):
    return LeftInWindows(config.model.vocab_size, max_length)


def wrong_dtype(config, max_length):
    return WrongDtype(config.model.vocab_size, max_length)


def with_attention(attention):
    return lambda config, max_length: Model(
        config.model.vocab_size, max_length, Block(attention())
    )


flash = with_attention(Flash)
float_mask = with_attention(FloatMask)
float_mask_by_name = with_attention(FloatMaskByName)
float_mask_kept = with_attention(FloatMaskKept)
float_mask_in_jit = with_attention(FloatMaskInJit)
flash_then_broken = with_attention(FlashThenBroken)

"""Both forms of every op give the same values and gradients, and those of NumPy."""

from __future__ import annotations

import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from strategies import make_config
from tiny_model import TINY_MODEL

from tuner.train import device_ops, full_size_ops, plain_ops
from tuner.train.device_ops import FromHeads, Spread, ToHeads
from tuner.train.model import Decoder

pytestmark = [pytest.mark.mindspore, pytest.mark.usefixtures("device")]

EPS = 1e-6


class Weighted(nn.Cell):
    """The sum of a Cell's output times what comes first."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell

    def construct(self, weights, *inputs):
        return ops.reduce_sum(self.cell(*inputs) * weights)


class WithGradients(nn.Cell):
    """Output of a Cell, and the gradients of that sum."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell
        self.gradients_of = ops.GradOperation(get_all=True)(Weighted(cell))

    def construct(self, weights, *inputs):
        return self.cell(*inputs), self.gradients_of(weights, *inputs)


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(cell, weights, *inputs, is_dynamic=False):
    """Output and gradients as arrays, of one graph for every size or for these."""
    graph = WithGradients(cell)
    tensors = [Tensor(array) for array in (weights, *inputs)]
    if is_dynamic:
        graph.set_inputs(*[open_first_axes(tensor) for tensor in tensors])
    output, gradients = graph(*tensors)
    return output.asnumpy(), [gradient.asnumpy() for gradient in gradients[1:]]


def open_first_axes(tensor):
    """As a batch comes: every axis but the last unknown; a weight stays as it is."""
    if tensor.ndim == 1:
        return tensor
    return Tensor(shape=[None] * (tensor.ndim - 1) + [tensor.shape[-1]], dtype=tensor.dtype)


def assert_equal(got, wanted, tolerance=2e-5):
    output, gradients = got
    wanted_output, wanted_gradients = wanted
    np.testing.assert_allclose(output, wanted_output, rtol=tolerance, atol=tolerance)
    assert len(gradients) == len(wanted_gradients)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(gradient, wanted_gradient, rtol=tolerance, atol=tolerance)


CASES = {
    "softmax": (
        full_size_ops.FullSizeSoftmax, plain_ops.MaskedSoftmax,
        [(2, 3, 5), (2, 3, 5)],
    ),
    "log-softmax": (full_size_ops.FullSizeLogSoftmax, plain_ops.LogSoftmax, [(4, 7)]),
    "rotation": (
        full_size_ops.FullSizeRotation, plain_ops.Rotation,
        [(2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)],
    ),
    "gate": (full_size_ops.FullSizeGate, plain_ops.Gate, [(6, 4), (6, 4)]),
    "sum": (full_size_ops.FullSizeSum, plain_ops.Sum, [(6, 4), (6, 4)]),
    "norm": (
        functools.partial(full_size_ops.FullSizeNorm, EPS), functools.partial(plain_ops.Norm, EPS),
        [(9, 8), (8,)],
    ),
}  # fmt: skip
# Masks and angles are constants: whoever gives one learns nothing of its gradient.
LEARNED = {"softmax": 1, "rotation": 1}


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_backward_written_out_is_the_one_that_mindspore_derives(name, is_dynamic):
    full_size, plain, shapes = CASES[name]
    inputs = [3 * drawn(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    weights = drawn(*shapes[0], seed=9)
    output, gradients = run(full_size(), weights, *inputs, is_dynamic=is_dynamic)
    wanted_output, wanted_gradients = run(plain(), weights, *inputs)
    learned = LEARNED.get(name, len(inputs))
    assert_equal((output, gradients[:learned]), (wanted_output, wanted_gradients[:learned]))
    assert all(not gradient.any() for gradient in gradients[learned:])


def test_softmax_is_that_of_numpy():
    scores, weights = drawn(4, 6), drawn(4, 6, seed=1)
    mask = np.where(drawn(4, 6, seed=2) > 0.5, -1e9, 0.0).astype(np.float32)
    exponentials = np.exp(scores + mask - (scores + mask).max(-1, keepdims=True))
    shares = exponentials / exponentials.sum(-1, keepdims=True)
    gradient = shares * (weights - (weights * shares).sum(-1, keepdims=True))
    output, gradients = run(full_size_ops.FullSizeSoftmax(), weights, scores, mask)
    assert_equal((output, gradients[:1]), (shares, [gradient]))


def test_norm_is_that_of_numpy():
    x, weight, outer = drawn(9, 8), drawn(8), drawn(9, 8, seed=1)
    root = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPS)
    normed = x / root
    scaled = outer * weight
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdims=True)) / root
    wanted = (normed * weight, [dx, (outer * normed).sum(0)])
    for norm in (full_size_ops.FullSizeNorm(EPS), plain_ops.Norm(EPS)):
        assert_equal(run(norm, outer, x, weight), wanted)


def test_rotation_turns_pairs_as_complex_numbers():
    x, outer = drawn(1, 1, 4, 6), drawn(1, 1, 4, 6, seed=1)
    angles = drawn(1, 1, 4, 3, seed=2)
    cos, sin = (np.concatenate([part(angles)] * 2, -1) for part in (np.cos, np.sin))
    turned = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angles)
    back = (outer[..., :3] + 1j * outer[..., 3:]) * np.exp(-1j * angles)
    output, gradients = run(full_size_ops.FullSizeRotation(), outer, x, cos, sin)
    wanted = [np.concatenate([part.real, part.imag], -1) for part in (turned, back)]
    assert_equal((output, gradients[:1]), (wanted[0], wanted[1:]))


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("slices", [False, True])
def test_heads_are_moved_and_moved_back(slices, is_dynamic):
    to_heads, from_heads = ToHeads(3, 4), FromHeads()
    to_heads.slices = from_heads.slices = slices
    x, weights = drawn(2, 5, 12), drawn(2, 3, 5, 4)
    moved = x.reshape(2, 5, 3, 4).transpose(0, 2, 1, 3)
    moved_weights = weights.transpose(0, 2, 1, 3).reshape(2, 5, 12)
    assert_equal(run(to_heads, weights, x, is_dynamic=is_dynamic), (moved, [moved_weights]))
    if slices and is_dynamic:
        return  # a graph that knows no number of heads cannot slice by it
    assert_equal(run(from_heads, moved_weights, moved), (x, [weights]))


@pytest.mark.parametrize("copies", [False, True])
def test_spread_copies_only_where_the_device_wants_it(copies):
    spread = Spread()
    spread.copies = copies
    x = drawn(1, 3, 1)
    expected = np.tile(x, (4, 1, 2)) if copies else x
    np.testing.assert_array_equal(spread(Tensor(x), (4, 1, 2)).asnumpy(), expected)


def test_the_device_decides(monkeypatch):
    chosen = {}
    for name in ("CPU", "Ascend"):
        monkeypatch.setattr(ms, "get_context", lambda _, name=name: name)
        cells = (
            device_ops.norm_of_device(EPS),
            device_ops.softmax_of_device(),
            device_ops.log_softmax_of_device(),
            device_ops.rotation_of_device(),
            device_ops.gate_of_device(),
            device_ops.sum_of_device(),
        )
        moves = (Spread().copies, ToHeads(1, 1).slices, FromHeads().slices)
        chosen[name] = (moves, {type(cell).__module__ for cell in cells})
    assert chosen == {
        "CPU": ((True,) * 3, {full_size_ops.__name__}),
        "Ascend": ((False,) * 3, {plain_ops.__name__}),
    }


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_both_forms_of_the_decoder_give_the_same_logits(positions, monkeypatch):
    changes = {
        "model.positions": positions,
        "model.max_positions": 8 if positions == "learned" else None,
        "model.qk_norm": True, "model.attention_bias": "qkvo",
    }  # fmt: skip
    model = make_config({**TINY_MODEL, **changes}).model
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (3, 7)).astype(np.int32)
    logits = {}
    for is_full_size in (True, False):
        monkeypatch.setattr(device_ops, "needs_full_sizes", lambda answer=is_full_size: answer)
        decoder = Decoder(model, 8, seed=0)
        for number, parameter in enumerate(decoder.get_parameters()):
            parameter.set_data(Tensor(0.3 * drawn(*parameter.shape, seed=number)))
        logits[is_full_size] = decoder(Tensor(ids)).asnumpy()
    np.testing.assert_allclose(logits[True], logits[False], rtol=1e-4, atol=1e-4)

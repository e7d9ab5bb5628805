"""Both forms of every op give the same values and gradients, and those of NumPy."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from tuner.train import device_ops
from tuner.train.device_ops import (
    FromHeads,
    FullSizeLogSoftmax,
    FullSizeNorm,
    FullSizeSoftmax,
    PlainNorm,
    Spread,
    ToHeads,
)

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


def drawn(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


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


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize(
    ("full_size", "plain"),
    [(FullSizeSoftmax, nn.Softmax), (FullSizeLogSoftmax, nn.LogSoftmax)],
)
def test_softmax_and_log_softmax_are_those_of_mindspore(full_size, plain, is_dynamic):
    x, weights = drawn(3, 5, 7) * 4, drawn(3, 5, 7)[::-1].copy()
    assert_equal(run(full_size(), weights, x, is_dynamic=is_dynamic), run(plain(-1), weights, x))


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_softmax_is_that_of_numpy(is_dynamic):
    x, weights = drawn(4, 6), drawn(6, 4).T.copy()
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    shares = exponentials / exponentials.sum(-1, keepdims=True)
    gradient = shares * (weights - (weights * shares).sum(-1, keepdims=True))
    assert_equal(run(FullSizeSoftmax(), weights, x, is_dynamic=is_dynamic), (shares, [gradient]))


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_norms_are_one_norm_and_that_of_numpy(is_dynamic):
    x, weight, outer = drawn(9, 8), drawn(8), drawn(8, 9).T.copy()
    root = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPS)
    normed = x / root
    scaled = outer * weight
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdims=True)) / root
    wanted = (normed * weight, [dx, (outer * normed).sum(0)])
    assert_equal(run(FullSizeNorm(EPS), outer, x, weight, is_dynamic=is_dynamic), wanted)
    assert_equal(run(PlainNorm(EPS), outer, x, weight), wanted)


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
        chosen[name] = (
            Spread().copies,
            ToHeads(1, 1).slices,
            FromHeads().slices,
            type(device_ops.norm_of_device(EPS)),
            type(device_ops.softmax_of_device()),
            type(device_ops.log_softmax_of_device()),
        )
    assert chosen == {
        "CPU": (True, True, True, FullSizeNorm, FullSizeSoftmax, FullSizeLogSoftmax),
        "Ascend": (False, False, False, PlainNorm, nn.Softmax, nn.LogSoftmax),
    }

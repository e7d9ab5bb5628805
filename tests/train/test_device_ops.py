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
from tuner.train.precision import FP32

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


class MixOfGroups(nn.Cell):
    """The full-size mix, with the mask that the plain one takes."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = full_size_ops.FullSizeMix(ms.float32)

    def construct(self, q_BKSH, k_BKTH, v_BKTH, mask_BKGTT):
        B, K, S, _ = q_BKSH.shape
        return self.mix(q_BKSH, k_BKTH, v_BKTH, mask_BKGTT.reshape(B, K, S, k_BKTH.shape[2]))


CASES = {
    "mix": (
        MixOfGroups,
        functools.partial(plain_ops.Mix, ms.float32),
        # Two query heads to a key head: S = 2 T.
        [(2, 3, 10, 4), (2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 2, 5, 5)],
    ),
    # Of rows of heads, as the full-size form gives them back.
    "rotation": (
        functools.partial(full_size_ops.FullSizeRotation, 8), plain_ops.Rotation,
        [(30, 8), (30, 8), (30, 8)],
    ),
    "gate": (full_size_ops.FullSizeGate, plain_ops.Gate, [(6, 4), (6, 4)]),
    "sum": (full_size_ops.FullSizeSum, plain_ops.Sum, [(6, 4), (6, 4)]),
    "norm": (
        functools.partial(full_size_ops.FullSizeNorm, EPS, 8),
        functools.partial(plain_ops.Norm, EPS),
        [(9, 8), (8,)],
    ),
}  # fmt: skip
# Masks and angles are constants: whoever gives one learns nothing of its gradient.
LEARNED = {"mix": 3, "rotation": 1}


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


def test_the_mix_is_that_of_numpy():
    q, k, v, outer = drawn(2, 3, 4), drawn(2, 3, 4, seed=1), drawn(2, 3, 4, seed=2), drawn(2, 3, 4)
    hidden = np.triu(np.full((3, 3), -1e9, np.float32), 1)
    exponentials = np.exp(q @ k.transpose(0, 2, 1) + hidden)
    shares = exponentials / exponentials.sum(-1, keepdims=True)
    dshares = outer @ v.transpose(0, 2, 1)
    dscores = shares * (dshares - (dshares * shares).sum(-1, keepdims=True))
    wanted = [dscores @ k, dscores.transpose(0, 2, 1) @ q, shares.transpose(0, 2, 1) @ outer]
    mask = np.tile(hidden, (1, 2, 1, 1, 1))
    inputs = [array[None] for array in (q, k, v)]
    for mix in (MixOfGroups(), plain_ops.Mix(ms.float32)):
        output, gradients = run(mix, outer[None], *inputs, mask)
        got = (output[0], [gradient[0] for gradient in gradients[:3]])
        assert_equal(got, (shares @ v, wanted))


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_the_head_is_that_of_numpy(is_dynamic):
    x, weight, outer = drawn(6, 4), drawn(9, 4, seed=1), drawn(6, 1, seed=2)
    labels = np.array([[0], [8], [3], [3], [0], [5]], np.int32)
    outer[1] = 0  # a label that does not count
    logits = x @ weight.T
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    dlogits = outer * (np.eye(9)[labels[:, 0]] - np.exp(log_probs))
    wanted = (np.take_along_axis(log_probs, labels, 1), [dlogits @ weight, dlogits.T @ x])
    for head in (full_size_ops.FullSizeHead(), plain_ops.Head(ms.float32)):
        graph = WithGradients(head)
        tensors = [Tensor(array) for array in (outer, x, weight, labels)]
        if is_dynamic:
            rows = [Tensor(shape=[None, width], dtype=ms.float32) for width in (1, 4)]
            graph.set_inputs(*rows, tensors[2], Tensor(shape=[None, 1], dtype=ms.int32))
        output, gradients = graph(*tensors)
        got = (output.asnumpy(), [gradient.asnumpy() for gradient in gradients[1:3]])
        assert_equal(got, wanted)


def test_norm_is_that_of_numpy():
    x, weight, outer = drawn(9, 8), drawn(8), drawn(9, 8, seed=1)
    root = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPS)
    normed = x / root
    scaled = outer * weight
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdims=True)) / root
    wanted = (normed * weight, [dx, (outer * normed).sum(0)])
    for norm in (full_size_ops.FullSizeNorm(EPS, 8), plain_ops.Norm(EPS)):
        assert_equal(run(norm, outer, x, weight), wanted)


def test_rotation_turns_pairs_as_complex_numbers():
    x, outer = drawn(4, 6), drawn(4, 6, seed=1)
    angles = drawn(4, 3, seed=2)
    cos, sin = (np.concatenate([part(angles)] * 2, -1) for part in (np.cos, np.sin))
    turned = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angles)
    back = (outer[..., :3] + 1j * outer[..., 3:]) * np.exp(-1j * angles)
    output, gradients = run(full_size_ops.FullSizeRotation(6), outer, x, cos, sin)
    wanted = [np.concatenate([part.real, part.imag], -1) for part in (turned, back)]
    assert_equal((output, gradients[:1]), (wanted[0], wanted[1:]))


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("slices", [False, True])
def test_heads_are_moved_and_moved_back(slices, is_dynamic):
    to_heads, from_heads = ToHeads(3, 4), FromHeads(3)
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
            device_ops.norm_of_device(EPS, 8, ms.float32),
            device_ops.mix_of_device(ms.float32),
            device_ops.head_of_device(FP32),
            device_ops.rotation_of_device(8),
            device_ops.gate_of_device(),
            device_ops.sum_of_device(),
        )
        moves = (Spread().copies, ToHeads(1, 1).slices, FromHeads(1).slices)
        chosen[name] = (moves, {type(cell).__module__ for cell in cells})
    assert chosen == {
        "CPU": ((True,) * 3, {full_size_ops.__name__}),
        "Ascend": ((False,) * 3, {plain_ops.__name__}),
    }


def test_no_part_inherits_its_other_form():
    """A backward comes with the class, and would be that of other inputs."""

    def cells_of(module):
        found = [one for one in vars(module).values() if isinstance(one, type)]
        return [one for one in found if one.__module__ == module.__name__]

    for cell in (*cells_of(full_size_ops), *cells_of(plain_ops)):
        assert cell.__bases__ == (nn.Cell,)
    mix, head = full_size_ops.FullSizeMix(ms.float32), full_size_ops.FullSizeHead()
    assert [len(list(cell.cells_and_names())) for cell in (mix, head)] == [2, 2]


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

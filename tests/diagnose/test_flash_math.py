"""Attention by NumPy against a model of the documentation that is written in loops."""

from __future__ import annotations

import dataclasses
import os

os.environ.setdefault("GLOG_v", "4")

import flash_reference
import mindspore as ms
import numpy as np
import pytest
from flash_case import as_arrays, drawn
from mindspore import Tensor
from strategies import make_config

from tuner.diagnose.flash_math import attend_in_numpy
from tuner.train.flash_arguments import (
    FlashCall,
    check_flash_arguments,
    compressed_causal_mask,
)

pytestmark = pytest.mark.mindspore


@pytest.fixture(scope="module", autouse=True)
def device():
    from tuner.train.device import open_device

    return open_device(make_config({"device": "cpu"}))


B, S1, S2, N1, N2, D = 2, 5, 7, 4, 2, 16
SHAPES = {
    "BNSD": ((B, N1, S1, D), (B, N2, S2, D)),
    "BSND": ((B, S1, N1, D), (B, S2, N2, D)),
    "BSH": ((B, S1, N1 * D), (B, S2, N2 * D)),
    "SBH": ((S1, B, N1 * D), (S2, B, N2 * D)),
    "TND": ((S1, N1, D), (S2, N2, D)),
}
RNG = np.random.default_rng(3)
ANY_MASK = RNG.random((B, N1, S1, S2)) < 0.4
ANY_MASK[..., 0] = False
OF_ALL_HEADS = ANY_MASK[:, :1]
OF_ALL_ROWS = ANY_MASK[0, 0].astype(np.uint8)


def call_of(layout="BNSD", **options):
    of_query, of_key = SHAPES[layout]
    call = FlashCall(
        query=Tensor(drawn(*of_query, seed=1)),
        key=Tensor(drawn(*of_key, seed=2)),
        value=Tensor(drawn(*of_key, seed=3)),
        head_num=N1,
        scalar_value=D**-0.5,
        input_layout=layout,
    )
    given = {
        name: Tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    return dataclasses.replace(call, **given)


def assert_as_documented(call):
    check_flash_arguments(call)
    found = attend_in_numpy(call)
    wanted = flash_reference.flash_attention_score(**as_arrays(call))
    assert found.shape == call.query.shape
    # The reference ends in float16, with 11 bits.
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)


COMPRESSED = compressed_causal_mask()
MODES = {
    "nothing hidden": {},
    "a mask of every head": {"attn_mask": ANY_MASK},
    "a mask of all heads": {"attn_mask": OF_ALL_HEADS, "sparse_mode": 1},
    "a mask of all rows": {"attn_mask": OF_ALL_ROWS},
    "a mask within a band": {"attn_mask": OF_ALL_ROWS, "pre_tokens": 4, "next_tokens": 2},
    "a mask whose band counts for nothing": {
        "attn_mask": OF_ALL_ROWS, "sparse_mode": 1, "pre_tokens": 1, "next_tokens": 0,
    },
    "causal from the upper left": {"attn_mask": COMPRESSED, "sparse_mode": 2},
    "causal from the lower right": {"attn_mask": COMPRESSED, "sparse_mode": 3},
    "a band from the lower right": {
        "attn_mask": COMPRESSED, "sparse_mode": 4, "pre_tokens": 2, "next_tokens": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_every_sparse_mode_is_as_documented(name):
    assert_as_documented(call_of(**MODES[name]))


@pytest.mark.parametrize("layout", sorted(set(SHAPES) - {"TND"}))
def test_every_layout_is_as_documented(layout):
    assert_as_documented(call_of(layout, attn_mask=ANY_MASK))


@pytest.mark.parametrize("mode", [2, 3])
@pytest.mark.parametrize("as_given", [Tensor, tuple, list])
def test_sequences_one_behind_the_other_are_as_documented(mode, as_given):
    ends = [np.array(one, np.int64) for one in ((2, S1), (3, S2))]
    query, keys = (as_given(one) if as_given is Tensor else as_given(one.tolist()) for one in ends)
    lengths = {"actual_seq_qlen": query, "actual_seq_kvlen": keys}
    options = {"attn_mask": COMPRESSED, "sparse_mode": mode, "next_tokens": 0}
    assert_as_documented(call_of("TND", **options, **lengths))


def test_bfloat16_is_taken_which_numpy_does_not_have():
    exact = call_of(attn_mask=ANY_MASK)
    rounded = dataclasses.replace(
        exact,
        **{name: getattr(exact, name).astype(ms.bfloat16) for name in ("query", "key", "value")},
    )
    check_flash_arguments(rounded)
    np.testing.assert_allclose(attend_in_numpy(rounded), attend_in_numpy(exact), atol=0.03)

"""fp16 with a loss scale: an overflow changes nothing but the scale, and resuming keeps it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoint_case import parameter_bytes
from strategies import make_config
from tiny_model import TINY_MODEL, random_batch

from tuner.cli.train import main
from tuner.data.mindrecord import MindRecordWriter
from tuner.train.engine import Engine
from tuner.train.scaling import LARGEST_SCALE, LossScale

SHAPE = (2, 12)
FP16 = {
    "precision.compute_dtype": "fp16",
    "precision.fp32_ops": ["norms", "loss"],
    "precision.loss_scale": 1024.0,
    "precision.loss_scale_window": 3,
}


class TestScale:
    def test_it_doubles_after_a_window_without_an_overflow_and_halves_at_one(self):
        finite = [True, True, True, True, False, True, False, True, True, True]
        scale, scales = LossScale(scale=8.0), []
        for is_finite in finite:
            scale = scale.after_update(is_finite=is_finite, window=3)
            scales.append(scale.scale)
        assert scales == [8, 8, 16, 16, 8, 8, 4, 4, 4, 8]

    def test_it_does_not_grow_for_ever_nor_shrink_a_larger_one_of_the_users(self):
        for largest in (LARGEST_SCALE, LARGEST_SCALE * 2):
            scale = LossScale(scale=largest).after_update(is_finite=True, window=1)
            assert scale == LossScale(scale=largest)

    @pytest.mark.parametrize(
        ("label_tokens", "divisor"), [(0, 1), (1, 1), (2, 2), (3, 4), (1000, 1024), (4096, 4096)]
    )
    def test_a_batch_is_scaled_by_its_labels_rounded_up_to_a_power_of_two(
        self, label_tokens, divisor
    ):
        assert LossScale(scale=65536.0).factor(label_tokens) == 65536.0 / divisor


@pytest.fixture(scope="module")
def engine(device):
    return Engine(make_config({**TINY_MODEL, "model.num_layers": 1, **FP16}), device, SHAPE[1])


def state_of(engine):
    """Weights, buffers and moments, as bytes."""
    return [parameter.asnumpy().tobytes() for parameter in engine.parameters]


@pytest.mark.mindspore
class TestEngine:
    def test_an_overflow_clears_the_buffers_halves_the_scale_and_changes_nothing_else(
        self, engine
    ):
        batch = random_batch(SHAPE, (12, 9))
        for update in (1, 2):
            engine.run_step(batch)
            assert 0 < engine.run_update(0.01, update, batch.label_tokens) < np.inf
        assert engine.loss_scale == LossScale(scale=1024.0, good_updates=2)
        before = state_of(engine)
        graphs = engine.num_graphs()
        # So large a scale that fp16 overflows on the way back; the loss itself is not scaled.
        engine.loss_scale = LossScale(scale=2.0**40, good_updates=2)
        loss = engine.run_step(batch)
        assert not all(np.isfinite(part).all() for part in engine.read_gradients())
        assert not np.isfinite(engine.run_update(0.01, 3, batch.label_tokens))
        assert state_of(engine) == before
        assert engine.loss_scale == LossScale(scale=2.0**39)
        engine.loss_scale = LossScale(scale=256.0, good_updates=2)
        assert engine.run_step(batch) == loss
        assert np.isfinite(engine.run_update(0.01, 3, batch.label_tokens))
        assert state_of(engine) != before
        assert engine.loss_scale == LossScale(scale=512.0)
        assert engine.num_graphs() == graphs == 3

    def test_gradients_do_not_depend_on_the_scale_and_warming_up_does_not_move_it(self, engine):
        batch = random_batch(SHAPE, (12, 9))
        found = []
        for scale in (256.0, 2048.0):
            engine.loss_scale = LossScale(scale=scale)
            engine.clear_gradients()
            engine.run_step(batch)
            found.append(np.concatenate([part.ravel() for part in engine.read_gradients()]))
        # What fp16 cannot tell from 0 at the smaller scale differs, and nothing else.
        np.testing.assert_allclose(found[0], found[1], atol=1e-4 * np.abs(found[1]).max())
        assert np.mean(found[0] == found[1]) > 0.5
        engine.clear_gradients()
        before = engine.loss_scale
        engine.run_empty_step(SHAPE)
        engine.run_empty_update()
        assert engine.loss_scale == before


def train(folder, out, steps, *more):
    settings = [
        f"train.out={folder / out}",
        f"train.max_steps={steps}",
        # A rate that does not depend on the steps of the whole run, so that it can be extended.
        "schedule.warmup_fraction=0.0",
        "schedule.min_learning_rate_fraction=1.0",
        "precision.compute_dtype=fp16",
        "precision.fp32_ops=[norms]",
        "precision.loss_scale=16777216.0",
        "precision.loss_scale_window=4",
    ]
    sets = [word for setting in settings for word in ("--set", setting)]
    assert main(["--config", str(folder / "config.yaml"), *sets, *more]) == 0
    lines = (folder / out / "metrics.jsonl").read_text().splitlines()
    weights = parameter_bytes(folder / out, steps)
    keys = ("step", "loss", "updates", "skipped_updates", "grad_norm", "loss_scale")
    return [tuple(json.loads(line)[key] for key in keys) for line in lines], weights


@pytest.mark.slow
@pytest.mark.mindspore
@pytest.mark.slow
def test_a_run_finds_its_scale_and_resumes_it_to_the_same_bits(tmp_path, capsys):
    rng = np.random.default_rng(0)
    with MindRecordWriter(
        tmp_path / "data.mindrecord", description={"length_of": "input_ids"}
    ) as writer:
        for length in rng.integers(3, 13, 60):
            ids = ((rng.integers(20) + np.arange(length)) % 20).astype(np.int32)
            writer.write([{"input_ids": ids, "labels": ids, "length": len(ids)}])
    (tmp_path / "config.yaml").write_text(
        json.dumps(
            {
                "data": {"path": str(tmp_path / "data.mindrecord")},
                "batching": {"strategy": "fixed", "tokens_per_batch": 64},
                "model": {
                    "vocab_size": 20,
                    "width": 16,
                    "num_layers": 1,
                    "num_heads": 2,
                    "num_kv_heads": 1,
                    "ffn_width": 16,
                },
                "train": {"epochs": 3},
            }
        )
    )
    whole, weights = train(tmp_path, "whole", 30)
    scales = [record[-1] for record in whole]
    skipped = [record[3] for record in whole]
    assert scales[0] == 2.0**23
    assert skipped[0] == 1
    first_good = skipped.index(max(skipped[:10])) + 1
    assert max(scales[first_good:]) > scales[first_good]
    assert all(updates + skips == step for step, _, updates, skips, _, _ in whole)
    assert all((norm is None) == (skips > before) for (*_, skips, norm, _), before in
               zip(whole, [0, *skipped], strict=False))  # fmt: skip
    assert "update skipped, loss scale now 8.38861e+06" in capsys.readouterr().err
    cut = first_good + 2
    train(tmp_path, "parts", cut)
    assert train(tmp_path, "parts", 30, "--resume") == (whole, weights)

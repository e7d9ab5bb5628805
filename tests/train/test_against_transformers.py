"""Logits, training and exported folders against transformers and torch; skipped without them."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from strategies import make_config
from tiny_model import random_batch

from tuner.train.build import build_model
from tuner.train.checkpoint import CheckpointFolder
from tuner.train.engine import Engine
from tuner.train.export import ExportOptions, export_run
from tuner.train.graph import op_by_op
from tuner.train.provenance import deciding_fields
from tuner.train.state import TrainState

try:
    import torch
    import transformers
except ImportError as error:
    pytest.skip(f"{error}", allow_module_level=True)

pytestmark = pytest.mark.mindspore

VOCAB = 61
STEPS = 20
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    # Large enough that logits differ visibly between tokens.
    "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500.0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 700.0}
MODELS = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama_bias": ("Llama", {"attention_bias": True, "head_dim": 12, "rms_norm_eps": 1e-3}),
    "qwen2": ("Qwen2", {"rope_parameters": LINEAR}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}


def new_model(name):
    """Random, with biases and norms that are not what they are initialised to."""
    family, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def torch_logits(model, ids):
    with torch.no_grad():
        return model(torch.from_numpy(ids).long()).logits.float().numpy()


def our_logits(folder, ids):
    model = build_model(make_config({"model": {"source": str(folder)}}), 64)
    with op_by_op():
        return model(ms.Tensor(ids)).asnumpy()


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, VOCAB, (2, 48), dtype=np.int32)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_size", ["5GB", "12KB"])
def test_logits_of_a_saved_model_are_equal(tmp_path, device, ids, name, shard_size):
    model = new_model(name)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    is_sharded = (tmp_path / "model.safetensors.index.json").exists()
    assert is_sharded == (shard_size != "5GB")
    expected = torch_logits(model, ids)
    assert expected.std() > 0.1
    np.testing.assert_allclose(our_logits(tmp_path, ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_a_half_precision_file_are_those_of_its_rounded_weights(
    tmp_path, device, ids, dtype
):
    new_model("qwen2").to(dtype).save_pretrained(tmp_path)
    # Read again: in the rounded model its rotary frequencies are rounded too.
    rounded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = torch_logits(rounded.eval(), ids)
    np.testing.assert_allclose(our_logits(tmp_path, ids), expected, rtol=1e-4, atol=1e-4)


def batches():
    lengths = ((24, 9), (17, 24), (24, 24))
    three = [random_batch((2, 24), lengths[i], seed=i, vocab_size=VOCAB) for i in range(3)]
    # Again and again, so that there is something to learn.
    return [three[step % 3] for step in range(STEPS)]


def train_torch(model):
    """Plain torch: mean over labels, clipped at 1, AdamW that decays matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0},
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for batch in batches():
        logits = model(torch.from_numpy(batch.input_ids_BT).long()).logits
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, VOCAB), torch.from_numpy(batch.targets_BT).long().reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_ours(engine):
    losses = []
    for update, batch in enumerate(batches(), start=1):
        losses.append(engine.run_step(batch) / batch.label_tokens)
        engine.run_update(3e-3, update, batch.label_tokens, clip_norm=1.0)
    return losses


def export(config, engine, tmp_path):
    train = config.train.model_copy(update={"out": str(tmp_path / "run")})
    config = config.model_copy(update={"train": train})
    state = TrainState(steps=STEPS, shapes=((2, 24),), config=deciding_fields(config))
    CheckpointFolder(tmp_path / "run" / "checkpoints", 1).save(state, engine.parameters)
    export_run(config, tmp_path / "out", ExportOptions(), print)
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_bias"])
def test_twenty_steps_of_training_have_the_losses_of_torch(tmp_path, device, ids, name):
    model = new_model(name)
    model.save_pretrained(tmp_path / "source")
    config = make_config({"model": {"source": str(tmp_path / "source")}})
    engine = Engine(config, device, 64)
    losses, expected = train_ours(engine), train_torch(model)
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert expected[-1] < expected[0] - 0.2
    loaded = export(config, engine, tmp_path)
    assert type(loaded) is type(model)
    with op_by_op():
        logits = engine.model(ms.Tensor(ids)).asnumpy()
    np.testing.assert_allclose(torch_logits(loaded, ids), logits, rtol=1e-4, atol=1e-4)
    # And near what torch trained.
    np.testing.assert_allclose(logits, torch_logits(model, ids), rtol=5e-2, atol=5e-2)


def test_merged_adapters_load_with_equal_logits(tmp_path, device, ids):
    new_model("qwen3").save_pretrained(tmp_path / "source")
    lora = {"rank": 4, "alpha": 8.0, "projections": ["q_proj", "k_proj", "o_proj", "gate_proj"]}
    config = make_config({"model": {"source": str(tmp_path / "source"), "lora": lora}})
    engine = Engine(config, device, 64)
    before = our_logits(tmp_path / "source", ids)
    losses = train_ours(engine)
    assert losses[-1] < losses[0]
    loaded = export(config, engine, tmp_path)
    with op_by_op():
        logits = engine.model(ms.Tensor(ids)).asnumpy()
    assert np.abs(logits - before).max() > 0.1
    np.testing.assert_allclose(torch_logits(loaded, ids), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.attention_bias": "qkvo", "model.tie_embedding": False, "model.head_size": 6},
        {"model.attention_bias": "qkv", "model.head_size": 6},
        {"model.qk_norm": True, "model.rope_scaling": {"kind": "linear", "factor": 4.0}},
        {"model.qk_norm": True, "model.head_size": 10, "model.attention_bias": "qkvo"},
    ],
)
def test_a_model_of_our_own_loads_with_equal_logits(tmp_path, device, ids, changes):
    sizes = {"model.vocab_size": VOCAB, "model.width": 32, "model.init_std": 0.2}
    config = make_config({**sizes, **changes})
    engine = Engine(config, device, 64)
    rng = np.random.default_rng(1)
    for parameter in engine.model.get_parameters():
        if parameter.ndim < 2:
            moved = parameter.asnumpy() + 0.2 * rng.standard_normal(parameter.shape)
            parameter.set_data(ms.Tensor(moved, ms.float32))
    loaded = export(config, engine, tmp_path)
    with op_by_op():
        logits = engine.model(ms.Tensor(ids)).asnumpy()
    np.testing.assert_allclose(torch_logits(loaded, ids), logits, rtol=1e-4, atol=1e-4)

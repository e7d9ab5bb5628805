"""Initial weights from a checkpoint, and checkpoints that are not whole."""

from __future__ import annotations

import json

import mindspore as ms
import numpy as np
import pytest
from hf_case import FAMILIES, hf_config, random_weights, write_checkpoint, write_family
from numpy_decoder import decoder_logits
from safetensors.numpy import save_file
from strategies import make_config

from tuner.errors import BadInputError
from tuner.train.build import build_model
from tuner.train.graph import op_by_op
from tuner.train.hf_tensors import write_stored
from tuner.train.source import source_fingerprint

pytestmark = pytest.mark.mindspore

OUR_NAMES = {
    "model.embed_tokens.weight": "embedding",
    "lm_head.weight": "logits_weight",
    "model.norm.weight": "final_norm.weight",
    "model.layers.1.input_layernorm.weight": "layers.1.input_norm.weight",
    "model.layers.0.post_attention_layernorm.weight": "layers.0.mlp_norm.weight",
    "model.layers.1.self_attn.k_proj.bias": "layers.1.attention.k_proj.bias",
    "model.layers.0.self_attn.q_norm.weight": "layers.0.attention.q_norm.weight",
    "model.layers.1.mlp.down_proj.weight": "layers.1.mlp.down_proj.weight",
}


def model_of(folder, **changes):
    return build_model(make_config({"model": {"source": str(folder), **changes}}), 32)


def refusal(folder):
    with pytest.raises(BadInputError) as raised:
        model_of(folder)
    return str(raised.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_weights_and_sizes_come_from_the_folder(tmp_path, device, family, num_shards):
    weights = random_weights(hf_config(family))
    model = model_of(write_family(tmp_path / "c", family, num_shards=num_shards))
    found = {name: parameter.asnumpy() for name, parameter in model.parameters_and_names()}
    assert len(found) == len(weights)
    known = {theirs: ours for theirs, ours in OUR_NAMES.items() if theirs in weights}
    assert len(known) >= 5
    for theirs, ours in known.items():
        assert found[ours].tobytes() == weights[theirs].tobytes(), theirs
    ids = np.arange(14, dtype=np.int32)[None] % 23
    with op_by_op():
        logits = model(ms.Tensor(ids)).asnumpy()
    config = make_config({"model": {"source": str(tmp_path / "c")}})
    twin = {name: value.astype(np.float64) for name, value in found.items()}
    np.testing.assert_allclose(
        logits, decoder_logits(ids, twin, config.model), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_files_become_float32_weights(tmp_path, device, dtype):
    folder = write_family(tmp_path / "c", "llama")
    values = {
        name: np.round(values * 64) / 64
        for name, values in random_weights(hf_config("llama")).items()
    }
    write_stored(folder / "model.safetensors", values, dtype)
    embedding = model_of(folder).embedding
    assert embedding.dtype == ms.float32
    # A few bits each: both dtypes hold them exactly.
    expected = values["model.embed_tokens.weight"]
    exact = np.abs(expected) < 2
    assert exact.sum() > 300
    assert np.array_equal(embedding.asnumpy()[exact], expected[exact])


def test_known_extras_are_no_fault(tmp_path, device):
    weights = random_weights(hf_config("llama"))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 0
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    model = model_of(write_checkpoint(tmp_path / "c", hf_config("llama"), weights))
    expected = weights["model.embed_tokens.weight"]
    assert np.array_equal(model.embedding.asnumpy(), expected)


def test_names_and_shapes_that_do_not_fit_are_named(tmp_path, device):
    config = hf_config("qwen2")
    weights = random_weights(config)

    def refused(changed, **config_changes):
        return refusal(write_checkpoint(tmp_path / "c", {**config, **config_changes}, changed))

    less = {n: v for n, v in weights.items() if n != "model.layers.1.self_attn.k_proj.bias"}
    assert "lacks model.layers.1.self_attn.k_proj.bias" in refused(less)
    more = {**weights, "model.layers.0.self_attn.q_norm.weight": np.ones(4, np.float32)}
    assert "holds model.layers.0.self_attn.q_norm.weight" in refused(more)
    # Untied in the file, and with no place for it in a tied model: no extra that is known.
    assert "lacks lm_head.weight" in refused(
        {n: v for n, v in weights.items() if n != "lm_head.weight"}
    )
    other = {**weights, "model.norm.weight": np.ones(17, np.float32)}
    message = refused(other)
    assert "model.norm.weight has shape [17], the model needs [16]" in message
    assert "embed_tokens.weight has shape [23, 16], the model needs [24, 16]" in refused(
        weights, vocab_size=24
    )
    assert "lacks" in refused(weights, num_hidden_layers=3)


def test_missing_and_damaged_files_are_named(tmp_path, device):
    folder = write_family(tmp_path / "shards", "llama", num_shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    second = folder / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()

    second.unlink()
    assert f"no such file: {second}" in refusal(folder)
    second.write_bytes(whole[:-7])
    assert f"{second} is damaged" in refusal(folder)
    second.write_bytes(whole)
    model_of(folder)

    names = {**content["weight_map"], "model.norm.weight": "model-00001-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": {**names, "none": second.name}}))
    assert "but it is not there" in refusal(folder)
    for text in ("{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../x"}}', "{}"):
        index.write_text(text)
        assert f"{index} is damaged" in refusal(folder)
    index.unlink()
    assert "holds neither model.safetensors nor" in refusal(folder)


def test_a_model_section_that_contradicts_the_folder_is_refused_when_it_is_built(tmp_path, device):
    folder = write_family(tmp_path / "c", "llama")
    config = make_config({"model": {"source": str(folder)}})
    changed = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(BadInputError, match=r"model.norm_eps is 1e-05, but .* says 1e-06"):
        build_model(config, 32)
    # Where a checkpoint gives the weights, the folder is not looked at.
    (folder / "config.json").unlink()
    zeros = build_model(config, 32, reads_source=False)
    assert not zeros.embedding.asnumpy().any()


def test_another_payload_has_another_fingerprint(tmp_path):
    folder = write_family(tmp_path / "a", "llama", num_shards=2)
    first = source_fingerprint(folder)
    assert source_fingerprint(write_family(tmp_path / "b", "llama", num_shards=2)) == first
    other = write_family(tmp_path / "c", "llama", num_shards=2, seed=1)
    assert source_fingerprint(other) != first
    file = folder / "model-00002-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(bytes(content))
    assert source_fingerprint(folder) != first


def test_a_large_file_is_sampled_over_all_of_its_payload(tmp_path, monkeypatch):
    monkeypatch.setattr("tuner.train.source.WHOLE_HASH_BYTES", 1000)
    monkeypatch.setattr("tuner.train.source.BLOCK_BYTES", 16)
    values = np.zeros(64 * 1024, np.float32)
    save_file({"x": values}, tmp_path / "model.safetensors")
    first = source_fingerprint(tmp_path)
    for place in (0, 32 * 1024):
        changed = values.copy()
        # Every block starts at a multiple of payload / 256, here 1024 bytes.
        changed[place] = 1.0
        save_file({"x": changed}, tmp_path / "model.safetensors")
        assert source_fingerprint(tmp_path) != first

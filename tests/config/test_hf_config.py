"""config.json of known checkpoints -> the model section, and what is refused by its name."""

from __future__ import annotations

import json

import pytest
from strategies import make_config

from tuner.config.codec import load_config
from tuner.config.hf_config import check_against_source, parse_hf_config, read_hf_config
from tuner.config.hf_export import family_of, to_hf_config
from tuner.config.override import override_config
from tuner.config.schema import ModelConfig
from tuner.errors import BadInputError

# The files of Llama-3.2-1B, Qwen2.5-0.5B and Qwen3-0.6B, less what says nothing here.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "initializer_range": 0.02,
    "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1,
    "tie_word_embeddings": True, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936,
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_act": "silu",
    "max_position_embeddings": 32768, "max_window_layers": 24, "rms_norm_eps": 1e-06,
    "initializer_range": 0.02, "attention_dropout": 0.0, "tie_word_embeddings": True,
    "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "max_window_layers": 28, "rms_norm_eps": 1e-06,
    "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0,
    "tie_word_embeddings": True, "rope_theta": 1000000, "rope_scaling": None,
    "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def parse(content):
    return parse_hf_config(content, source="config.json")


def with_changes(content, **changes):
    return {**content, **changes}


def without(content, *names):
    return {name: value for name, value in content.items() if name not in names}


def refusal(content):
    with pytest.raises(BadInputError) as raised:
        parse(content)
    return str(raised.value)


def folder_with(tmp_path, content, name="checkpoint"):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_llama_3_2():
    assert parse(LLAMA) == {
        "vocab_size": 128256, "width": 2048, "num_layers": 16, "num_heads": 32,
        "num_kv_heads": 8, "head_size": None, "ffn_width": 8192, "positions": "rotary",
        "max_positions": 131072, "rope_theta": 500000.0,
        "rope_scaling": {
            "kind": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_positions": 8192,
        },
        "norm_eps": 1e-5, "qk_norm": False, "attention_bias": "none", "tie_embedding": True,
        "init_std": 0.02,
    }  # fmt: skip


def test_qwen_2_5_has_a_bias_that_its_file_does_not_name():
    fields = parse(QWEN2)
    assert fields["attention_bias"] == "qkv"
    assert (fields["qk_norm"], fields["head_size"]) == (False, None)
    assert (fields["width"], fields["num_heads"], fields["num_kv_heads"]) == (896, 14, 2)
    assert (fields["rope_theta"], fields["rope_scaling"]) == (1e6, None)
    assert (fields["max_positions"], fields["tie_embedding"]) == (32768, True)


def test_qwen_3_has_norms_of_queries_and_keys_and_wide_heads():
    fields = parse(QWEN3)
    assert fields["qk_norm"] is True
    # 16 heads of 128 are twice as wide as the model.
    assert fields["head_size"] == 128
    assert fields["attention_bias"] == "none"
    assert parse(with_changes(QWEN3, attention_bias=True))["attention_bias"] == "qkvo"


def test_llamas_bias_is_on_all_four_projections():
    assert parse(with_changes(LLAMA, attention_bias=True))["attention_bias"] == "qkvo"


def test_both_spellings_of_rotary_fields_say_the_same():
    newer = without(LLAMA, "rope_theta", "rope_scaling")
    newer["rope_parameters"] = {"rope_theta": 500000.0, **LLAMA["rope_scaling"]}
    assert parse(newer) == parse(LLAMA)
    plain = with_changes(newer, rope_parameters={"rope_theta": 7e4, "rope_type": "default"})
    assert (parse(plain)["rope_theta"], parse(plain)["rope_scaling"]) == (7e4, None)
    linear = with_changes(LLAMA, rope_scaling={"type": "linear", "factor": 2})
    assert parse(linear)["rope_scaling"] == {"kind": "linear", "factor": 2.0}
    assert parse(linear)["rope_theta"] == 500000.0


def test_pre_trained_context_of_llama3_scaling_is_the_whole_one_if_not_said():
    scaling = without(LLAMA["rope_scaling"], "original_max_position_embeddings")
    fields = parse(with_changes(LLAMA, rope_scaling=scaling))
    assert fields["rope_scaling"]["original_max_positions"] == 131072


@pytest.mark.parametrize(
    ("family", "num_heads", "expected"),
    [
        ("llama", 16, {"num_kv_heads": 16, "head_size": None, "max_positions": 2048}),
        ("qwen2", 32, {"num_kv_heads": 32, "head_size": None, "max_positions": 32768}),
        ("qwen3", 32, {"num_kv_heads": 32, "head_size": 128, "max_positions": 32768}),
    ],
)
def test_what_is_absent_has_the_default_of_its_family(family, num_heads, expected):
    content = {
        "model_type": family, "vocab_size": 100, "hidden_size": 1024, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": num_heads,
    }  # fmt: skip
    shared = {"tie_embedding": False, "norm_eps": 1e-6, "rope_theta": 1e4, "init_std": 0.02}
    found = parse(content)
    assert {name: found[name] for name in {**expected, **shared}} == {**expected, **shared}


def test_null_key_heads_are_the_query_heads_in_every_family():
    for content in (LLAMA, QWEN2, QWEN3):
        fields = parse(with_changes(content, num_key_value_heads=None))
        assert fields["num_kv_heads"] == content["num_attention_heads"]


REFUSED = [
    (LLAMA, {"model_type": "mistral"}, "model_type"),
    (LLAMA, {"model_type": None}, "model_type"),
    (QWEN3, {"model_type": "qwen3_moe", "num_experts": 128}, "qwen3_moe"),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act must be silu (got 'gelu')"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias must be false (got True)"),
    (LLAMA, {"attention_dropout": 0.1}, "attention_dropout"),
    (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
    (QWEN2, {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
    (QWEN2, {"use_sliding_window": True, "max_window_layers": 12}, "use_sliding_window"),
    (QWEN2, {"use_sliding_window": True, "max_window_layers": 0}, "use_sliding_window"),
    (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 (got 0.5)"),
    (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling: rope_type"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling: type"),
    (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "got 'longrope'"),
    (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    (LLAMA, {"rope_scaling": None, "rope_parameters": {"full_attention": {}}}, "one set"),
    (LLAMA, {"rope_scaling": [1, 2]}, "rope_scaling"),
    (LLAMA, {"hidden_size": "2048"}, "hidden_size must be a whole number >= 1 (got '2048')"),
    (LLAMA, {"vocab_size": 0}, "vocab_size"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "changes", "words"), REFUSED)
def test_what_is_not_computed_here_is_refused_by_its_name(content, changes, words):
    message = refusal(with_changes(content, **changes))
    assert message.startswith("config.json")
    assert words in message


def test_windows_that_no_layer_uses_are_none():
    unused = [
        {"use_sliding_window": True, "max_window_layers": 24},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"layer_types": ["full_attention"] * 24},
    ]
    for changes in unused:
        assert parse(with_changes(QWEN2, **changes)) == parse(QWEN2)


@pytest.mark.parametrize("name", [*SIZES, "vocab_size"])
def test_a_size_that_is_missing_is_named(name):
    assert f"{name} is missing" in refusal(without(LLAMA, name))


def test_a_source_alone_gives_all_sizes_when_the_yaml_is_read(tmp_path):
    folder = folder_with(tmp_path, QWEN3)
    path = tmp_path / "config.yaml"
    path.write_text(f"data: {{path: d}}\nmodel: {{source: {folder}, lora: {{rank: 4}}}}\n")
    model = load_config(path).model
    assert (model.width, model.num_layers, model.size_of_head) == (1024, 28, 128)
    assert (model.qk_norm, model.tie_embedding, model.max_positions) == (True, True, 40960)
    assert model.source == str(folder)
    assert model.lora is not None
    assert model.lora.rank == 4


def test_a_written_config_is_not_read_again_from_its_source(tmp_path):
    folder = folder_with(tmp_path, QWEN3)
    config = make_config({"model": {"source": str(folder)}})
    (folder / "config.json").unlink()
    again = override_config(config, {"train.epochs": 2})
    assert again.model == config.model


def test_scaling_comes_along_and_what_stands_in_the_yaml_wins(tmp_path):
    folder = folder_with(tmp_path, LLAMA)
    model = make_config({"model": {"source": str(folder), "max_positions": 4096}}).model
    assert model.rope_scaling is not None
    assert (model.rope_scaling.kind, model.rope_scaling.factor) == ("llama3", 32.0)
    assert model.max_positions == 4096


def test_a_folder_without_a_readable_config_is_refused(tmp_path):
    def message(folder):
        with pytest.raises(BadInputError) as raised:
            make_config({"model": {"source": str(folder)}})
        return str(raised.value)

    assert "holds no config.json" in message(tmp_path / "none")
    folder = folder_with(tmp_path, LLAMA)
    for text, words in (("{", "cannot read"), ("[1]", "not a JSON object"), ("\xff", "cannot")):
        (folder / "config.json").write_bytes(text.encode("latin-1"))
        assert words in message(folder)
    (folder / "config.json").write_text(json.dumps(with_changes(LLAMA, hidden_act="relu")))
    assert "hidden_act" in message(folder)


def test_a_contradiction_to_the_source_is_refused_by_its_field(tmp_path):
    folder = folder_with(tmp_path, LLAMA)
    model = make_config({"model": {"source": str(folder)}}).model
    check_against_source(model)
    check_against_source(model.model_copy(update={"max_positions": 512, "init_std": 0.5}))
    changes = {
        "width": 1024, "num_layers": 15, "ffn_width": 8191, "norm_eps": 1e-6, "head_size": 32,
        "rope_theta": 1e4, "rope_scaling": None, "tie_embedding": False, "vocab_size": 128,
        "attention_bias": "qkv", "qk_norm": True, "num_kv_heads": 4, "max_positions": 131073,
    }  # fmt: skip
    for name, value in changes.items():
        with pytest.raises(BadInputError) as raised:
            check_against_source(model.model_copy(update={name: value}))
        assert f"model.{name} is {value}" in str(raised.value)


@pytest.mark.parametrize("content", [LLAMA, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_what_is_written_reads_as_the_same_model(tmp_path, content):
    model = make_config({"model": {"source": str(folder_with(tmp_path, content))}}).model
    written = to_hf_config(model, max_positions=7)
    assert family_of(model) == content["model_type"]
    assert written["model_type"] == content["model_type"]
    assert parse(json.loads(json.dumps(written))) == parse(content)
    # What the original file says besides is kept.
    kept = to_hf_config(model, max_positions=7, like=content)
    assert kept == content


def test_the_family_is_the_one_that_computes_the_model():
    def written(**changes):
        return to_hf_config(ModelConfig(vocab_size=50, **changes), max_positions=96)

    assert written()["model_type"] == "llama"
    assert written()["max_position_embeddings"] == 96
    assert written()["bos_token_id"] is None
    assert written(attention_bias="qkvo")["attention_bias"] is True
    assert written(attention_bias="qkv")["architectures"] == ["Qwen2ForCausalLM"]
    assert written(qk_norm=True, attention_bias="qkvo")["model_type"] == "qwen3"
    assert (
        written(width=100, num_heads=3, num_kv_heads=3, head_size=8, qk_norm=True)["head_dim"] == 8
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": "learned", "max_positions": 8}, "model.positions learned"),
        ({"factory": "package.module:function"}, "model.factory"),
        ({"qk_norm": True, "attention_bias": "qkv"}, "model.attention_bias qkv"),
        ({"width": 100, "num_heads": 3, "num_kv_heads": 3, "head_size": 8}, "model.width 100"),
    ],
)
def test_a_model_of_no_family_is_refused(changes, words):
    with pytest.raises(BadInputError, match=words):
        family_of(ModelConfig(vocab_size=50, **changes))


def test_the_file_is_read_as_it_is(tmp_path):
    assert read_hf_config(folder_with(tmp_path, QWEN2)) == QWEN2

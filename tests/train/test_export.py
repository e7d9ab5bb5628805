"""A run from a checkpoint and back into one, as a user does it; nothing half written."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
import yaml
from hf_case import FAMILIES, hf_config, random_weights, write_checkpoint, write_family
from run_case import write_counting_rows
from safetensors.numpy import load_file
from strategies import make_config

from tuner.cli.train import main
from tuner.config.codec import load_config
from tuner.errors import BadInputError
from tuner.train.checkpoint import CheckpointFolder
from tuner.train.engine import Engine
from tuner.train.export import ExportOptions, export_run, write_weights
from tuner.train.hf_tensors import read_header
from tuner.train.provenance import deciding_fields
from tuner.train.state import TrainState

pytestmark = pytest.mark.mindspore

VOCAB = 23


def load_sharded(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weights = {}
    for file in sorted(set(index["weight_map"].values())):
        shard = load_file(folder / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == set(shard)
        weights |= shard
    return weights


def saved_run(tmp_path, config, device):
    """A run folder whose checkpoint holds the engine's first weights."""
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"out": str(tmp_path / "run")})}
    )
    engine = Engine(config, device, 32)
    state = TrainState(steps=7, shapes=((2, 32), (4, 16)), config=deciding_fields(config))
    CheckpointFolder(tmp_path / "run" / "checkpoints", 2).save(state, engine.parameters)
    return config, engine


def exported(config, target, **options):
    return export_run(config, target, ExportOptions(**options), print)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untrained_checkpoint_comes_back_to_the_bit(tmp_path, device, family):
    source = write_family(tmp_path / "source", family, num_shards=2)
    (source / "tokenizer.json").write_text('{"model": 1}')
    (source / "README.md").write_text("not copied")
    config, _ = saved_run(tmp_path, make_config({"model": {"source": str(source)}}), device)
    report = exported(config, tmp_path / "out")
    assert (report.family, report.steps) == (family, 7)
    weights = random_weights(hf_config(family))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(found[name].tobytes() == weights[name].tobytes() for name in weights)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content == {**hf_config(family), "torch_dtype": "float32"}
    assert report.num_weights == sum(values.size for values in weights.values())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip


def test_a_model_of_our_own_is_written_in_shards_with_its_longest_row(tmp_path, device):
    sizes = {"model.vocab_size": VOCAB, "model.width": 16, "model.ffn_width": 24}
    config, engine = saved_run(tmp_path, make_config(sizes), device)
    exported(config, tmp_path / "out", dtype="bf16", shard_bytes=2000)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["model_type"] == "llama"
    assert content["max_position_embeddings"] == 32
    assert (content["torch_dtype"], content["eos_token_id"]) == ("bfloat16", None)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    stored = {}
    for file in files:
        assert (tmp_path / "out" / file).stat().st_size < 2000 + 1500
        stored |= read_header(tmp_path / "out" / file)
    assert stored.keys() == index["weight_map"].keys()
    embedding = stored["model.embed_tokens.weight"].read()
    # bfloat16 keeps 8 bits of the mantissa.
    np.testing.assert_allclose(embedding, engine.model.embedding.asnumpy(), rtol=2**-8)
    numbers = sum(int(np.prod(tensor.shape)) for tensor in stored.values())
    assert index["metadata"]["total_size"] == 2 * numbers


def test_the_folder_may_be_there_only_if_it_is_empty(tmp_path, device):
    config, _ = saved_run(tmp_path, make_config({"model.vocab_size": VOCAB}), device)
    target = tmp_path / "out"
    target.mkdir()
    exported(config, target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    for taken in (target, target / "config.json"):
        with pytest.raises(BadInputError, match="is there already"):
            exported(config, taken)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path, device):
    config, engine = saved_run(tmp_path, make_config({"model.vocab_size": VOCAB}), device)
    before = sorted(tmp_path.rglob("*"))
    other = config.model_copy(update={"model": config.model.model_copy(update={"norm_eps": 1e-3})})
    with pytest.raises(BadInputError, match="another model section"):
        exported(other, tmp_path / "out")
    huge = engine.model.embedding.asnumpy().copy()
    huge[0, 0] = 1e6
    engine.model.embedding.set_data(ms.Tensor(huge))
    state = TrainState(steps=8, config=deciding_fields(config))
    CheckpointFolder(tmp_path / "run" / "checkpoints", 1).save(state, engine.parameters)
    with pytest.raises(BadInputError, match=r"embed_tokens\.weight holds numbers above 65504"):
        exported(config, tmp_path / "out", dtype="fp16")
    learned = {"model.vocab_size": 9, "model.positions": "learned", "model.max_positions": 32}
    with pytest.raises(BadInputError, match="positions learned cannot be written"):
        exported(make_config(learned), tmp_path / "out")
    with pytest.raises(BadInputError, match="no checkpoint"):
        exported(make_config({"train.out": str(tmp_path / "none")}), tmp_path / "out")
    names = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert names == {path.relative_to(tmp_path).parts[0] for path in before} == {"run"}


def test_a_file_that_does_not_read_back_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tuner.train.export.write_stored",
        lambda path, weights, dtype: write_checkpoint(
            path.parent, {}, {name: values + 1 for name, values in weights.items()}
        ),
    )
    with pytest.raises(BadInputError, match="does not read as it was written"):
        write_weights(tmp_path, {"x": np.ones(3, np.float32)}, "fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows that count upwards, a checkpoint with a tokenizer, and a config that names it alone."""
    folder = tmp_path_factory.mktemp("finetune")
    write_counting_rows(folder / "data.mindrecord", 40, (5, 16))
    source = write_family(folder / "source", "qwen3")
    (source / "tokenizer.json").write_text("{}")
    plain = {
        "data": {"path": "data.mindrecord"},
        "model": {"source": "source", "lora": {"rank": 4, "projections": ["q_proj", "up_proj"]}},
        "batching": {"strategy": "fixed", "tokens_per_batch": 128},
        "optimizer": {"learning_rate": 0.02},
        "train": {"epochs": 2, "max_steps": 6, "out": "run"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(plain))
    return folder


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "tuner.cli.train", "--config", "config.yaml", *arguments],
        cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(folder):
    done = run(folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]


def test_adapters_are_trained_on_a_checkpoint_resumed_and_merged(folder, trained):
    losses = [record["loss"] for record in trained]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    done = run(folder, "--export", "out")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "wrote" in done.stdout
    assert "qwen3" in done.stdout
    merged = load_file(folder / "out" / "model.safetensors")
    base = random_weights(hf_config("qwen3"))
    changed = {name for name in base if merged[name].tobytes() != base[name].tobytes()}
    parts = ("self_attn.q_proj.weight", "mlp.up_proj.weight")
    assert changed == {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in parts}
    for name in changed:
        # What is added has the rank of the adapters.
        added = merged[name].astype(np.float64) - base[name]
        singular = np.linalg.svd(added, compute_uv=False)
        assert singular[3] > 1e-4
        assert singular[4] < 1e-5
    assert (folder / "out" / "tokenizer.json").read_text() == "{}"


def refused(capsys, *arguments):
    code = main(list(arguments))
    captured = capsys.readouterr()
    assert code == 2
    assert "Traceback" not in captured.err
    return captured.err


def test_adapters_are_not_resumed_on_other_weights(folder, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    other = write_family(tmp_path / "other", "qwen3", seed=1)
    changes = ("--set", f"model.source={other}", "--set", "train.max_steps=8")
    line = refused(capsys, "--config", "config.yaml", "--resume", *changes)
    assert "model.source_fingerprint" in line


def test_bad_input_is_one_line_and_exit_code_2(folder, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    arguments = ("--config", "config.yaml", "--set", f"train.out={tmp_path / 'r'}", "--set")
    small = write_family(tmp_path / "small", "llama")
    config = json.loads((small / "config.json").read_text()) | {"vocab_size": 9}
    weights = random_weights(config)
    write_checkpoint(small, config, weights)
    (tmp_path / "small.yaml").write_text(
        yaml.safe_dump({"data": {"path": "data.mindrecord"}, "model": {"source": str(small)}})
    )
    line = refused(capsys, "--config", str(tmp_path / "small.yaml"))
    assert "vocabulary size 9" in line
    line = refused(capsys, *arguments, "model.max_positions=8")
    assert "model.max_positions is 8" in line
    line = refused(capsys, *arguments, "model.width=32")
    assert "model.width is 32, but source/config.json says 16" in line
    assert "no checkpoint" in refused(capsys, *arguments, "device=cpu", "--export", "new")
    for wrong in (["--best"], ["--export-dtype", "bf16"], ["--export", "x", "--resume"]):
        with pytest.raises(SystemExit) as raised:
            main(["--config", "config.yaml", *wrong])
        assert raised.value.code == 2
        assert "--export" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_run_from_a_checkpoint_is_resumed_without_it(folder, tmp_path):
    """Its first weights are all that the folder gives."""
    source = write_family(tmp_path / "source", "llama")
    config = load_config_with(folder, tmp_path, source)
    done = run(folder, "--config", str(config))
    assert done.returncode == 0, done.stderr[-3000:]
    (source / "model.safetensors").unlink()
    done = run(folder, "--config", str(config), "--resume", "--set", "train.max_steps=3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed after step 2" in done.stderr
    assert len((tmp_path / "full" / "metrics.jsonl").read_text().splitlines()) == 3


def load_config_with(folder, tmp_path, source):
    """A config with all sizes written out, as best.yaml has them."""
    from tuner.config.codec import format_config
    from tuner.config.override import override_config

    small = tmp_path / "first.yaml"
    small.write_text(
        yaml.safe_dump(
            {
                "data": {"path": "data.mindrecord"},
                "model": {"source": str(source)},
                "batching": {"strategy": "fixed", "tokens_per_batch": 128},
                "train": {"max_steps": 2, "out": str(tmp_path / "full")},
            }
        )
    )
    path = tmp_path / "whole.yaml"
    path.write_text(format_config(override_config(load_config(small), {})))
    return path

"""A checkpoint as a folder that Hugging Face's transformers loads; nothing is trained or compiled.

The folder is written beside under another name, read back, and only then renamed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.config.codec import write_text
from tuner.config.hf_config import CONFIG_FILE, check_against_source, read_hf_config
from tuner.config.hf_export import family_of, to_hf_config
from tuner.config.schema import GraphConfig, PrecisionConfig, TrainConfig
from tuner.data.staging import StagingFolder
from tuner.errors import BadInputError
from tuner.train.checkpoint import CheckpointFolder
from tuner.train.device import open_device
from tuner.train.engine import Engine
from tuner.train.hf_names import hf_name
from tuner.train.hf_tensors import BYTES_OF_NUMBER, CODES, StoredDtype, rounded, write_stored
from tuner.train.loop import run_folder
from tuner.train.lora import merged_weights
from tuner.train.provenance import deciding_fields
from tuner.train.run import CHECKPOINT_FOLDER
from tuner.train.source import INDEX_FILE, WEIGHTS_FILE, stored_tensors

# As transformers 4 did; below what file systems and downloads are bad at.
SHARD_BYTES = 5_000_000_000

COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""What a checkpoint has besides weights and config; copied from model.source."""

CONFIG_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

Weights = Mapping[str, NDArray[np.float32]]
"""Hugging Face's name -> float32 array."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is written.

    Attributes:
        dtype: Of the stored numbers.
        takes_best: The checkpoint of the lowest evaluation loss instead of the newest.
        shard_bytes: Weights above this are spread over files of at most this, or of one tensor.
    """

    dtype: StoredDtype = "fp32"
    takes_best: bool = False
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written.

    Attributes:
        folder: The new folder.
        family: llama, qwen2 or qwen3.
        steps: Steps that the checkpoint was trained for.
        num_weights: Numbers in all tensors.
    """

    folder: Path
    family: str
    steps: int
    num_weights: int


def export_run(
    config: TrainConfig, target: Path, options: ExportOptions, notice: Callable[[str], None]
) -> ExportReport:
    """Write a run's checkpoint as a Hugging Face checkpoint, adapters merged.

    Args:
        config: Of the run; its checkpoints are in train.out.
        target: Folder that is not there yet, or empty.
        options: What is written.
        notice: Told about checkpoints that had to be passed over.

    Raises:
        BadInputError: no family computes this model, the target holds something, there is no whole
            checkpoint of this model, or the disk is full.
    """
    family = family_of(config.model)
    target = target.resolve()
    _check_target(target)
    like = _source_config(config)
    engine = _engine(config)
    checkpoints = CheckpointFolder(run_folder(config) / CHECKPOINT_FOLDER, config.train.keep_last)
    load = checkpoints.load_best if options.takes_best else checkpoints.load_newest
    state = load(engine.parameters, notice)
    if state.config["model"] != deciding_fields(config)["model"]:
        raise BadInputError(
            f"the checkpoint in {config.train.out} was trained with another model section",
            fix="give the config that it was trained with",
        )
    merged = merged_weights(engine.model, config.model.lora)
    weights = {hf_name(name): values for name, values in merged.items()}
    longest = max((length for _, length in state.shapes), default=1)
    content = to_hf_config(config.model, max_positions=longest, like=like)
    _write_folder(target, weights, _with_dtype(content, options.dtype), options, config)
    return ExportReport(
        folder=target,
        family=family,
        steps=state.steps,
        num_weights=sum(values.size for values in weights.values()),
    )


def write_weights(
    folder: Path, weights: Weights, dtype: StoredDtype, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write model.safetensors, or shards with an index, and read them back.

    Args:
        folder: An empty folder.
        weights: In the order in which they are written.
        dtype: Of the stored numbers.
        shard_bytes: As in `ExportOptions`.

    Raises:
        BadInputError: the disk is full, a number does not fit the dtype, or what is read back is
            not what was written.
    """
    shards = _shards(weights, BYTES_OF_NUMBER[CODES[dtype]], shard_bytes)
    if len(shards) == 1:
        write_stored(folder / WEIGHTS_FILE, weights, dtype)
    else:
        file_of_name = {}
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_stored(folder / file, {name: weights[name] for name in names}, dtype)
            file_of_name.update(dict.fromkeys(names, file))
        total = sum(v.size for v in weights.values()) * BYTES_OF_NUMBER[CODES[dtype]]
        index = {"metadata": {"total_size": total}, "weight_map": file_of_name}
        write_text(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    _verify(folder, weights, dtype)


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInputError(f"{target} is there already", fix="name a new folder")


def _source_config(config: TrainConfig) -> dict[str, Any] | None:
    """The source's config.json, whose other fields are kept; None if it is gone or never was."""
    source = config.model.source
    if source is None or not (Path(source) / CONFIG_FILE).exists():
        return None
    check_against_source(config.model)
    return read_hf_config(source)


def _engine(config: TrainConfig) -> Engine:
    """On the CPU, whatever was trained on: only parameters are made and nothing runs."""
    here = config.model_copy(update={"device": "cpu", "graph": GraphConfig()})
    device = open_device(here.model_copy(update={"precision": PrecisionConfig()}))
    # The precision stays: in fp16 the parameters have other names.
    return Engine(here, device, 1, reads_source=config.model.lora is not None)


def _with_dtype(content: Mapping[str, Any], dtype: StoredDtype) -> dict[str, Any]:
    # transformers 5 writes "dtype" and reads both.
    name = "dtype" if "dtype" in content else "torch_dtype"
    return {**content, name: CONFIG_DTYPES[dtype]}


def _write_folder(
    target: Path,
    weights: Weights,
    content: Mapping[str, Any],
    options: ExportOptions,
    config: TrainConfig,
) -> None:
    staging = StagingFolder(target)
    staging.open()
    is_whole = False
    try:
        write_weights(staging.path, weights, options.dtype, options.shard_bytes)
        write_text(staging.path / CONFIG_FILE, json.dumps(content, indent=2) + "\n")
        _copy_from_source(config, staging.path)
        if read_hf_config(staging.path) != content:
            raise _not_written(staging.path / CONFIG_FILE)
        staging.path.rename(target)
        is_whole = True
    finally:
        staging.close(keep_folders=is_whole)


def _copy_from_source(config: TrainConfig, folder: Path) -> None:
    if config.model.source is None:
        return
    for name in COPIED_FILES:
        file = Path(config.model.source) / name
        if file.is_file():
            shutil.copyfile(file, folder / name)


def _shards(weights: Weights, number_bytes: int, shard_bytes: int) -> list[list[str]]:
    """Names in order, cut where the next tensor would pass the limit."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, values in weights.items():
        size = values.size * number_bytes
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _verify(folder: Path, weights: Weights, dtype: StoredDtype) -> None:
    stored = stored_tensors(folder)
    for name, values in weights.items():
        found = stored[name]
        if found.dtype != CODES[dtype] or not np.array_equal(found.read(), rounded(values, dtype)):
            raise _not_written(found.file)
    if set(stored) != set(weights):
        raise _not_written(folder)


def _not_written(path: Path) -> BadInputError:
    return BadInputError(f"{path.name} does not read as it was written", fix="check the disk")

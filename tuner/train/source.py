"""Initial weights from a Hugging Face checkpoint: model.safetensors, or shards with an index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from tuner.config.schema import ModelConfig
from tuner.errors import BadInputError
from tuner.train.hf_names import is_known_extra, names_by_hf_name
from tuner.train.hf_tensors import StoredTensor, read_header
from tuner.train.lora import is_adapter

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Files up to this are hashed as a whole; of larger ones the header and evenly spaced blocks.
WHOLE_HASH_BYTES = 64 * 2**20
SAMPLED_BLOCKS = 256
BLOCK_BYTES = 64 * 2**10


def load_source(model: nn.Cell, config: ModelConfig) -> None:
    """Set a decoder's weights to those of `config.source`; adapters stay as they are.

    All names and shapes are compared before the first tensor is read; then one tensor is in
    memory at a time.

    Raises:
        BadInputError: a file is missing or damaged, a weight is missing or has another shape, or
            there is a tensor that the decoder has no weight for.
    """
    folder = Path(config.source or "")
    stored = stored_tensors(folder)
    weights = {
        name: weight for name, weight in model.parameters_and_names() if not is_adapter(name)
    }
    ours = names_by_hf_name(weights)
    _check_names(folder, stored, ours, is_tied=config.tie_embedding)
    for hf_name, name in ours.items():
        _check_shape(hf_name, stored[hf_name], weights[name])
    for hf_name, name in ours.items():
        weights[name].set_data(Tensor(stored[hf_name].read(), ms.float32))


def source_fingerprint(folder: str | Path) -> str:
    """sha256 of a checkpoint's weights: of every file its name, size, header and payload.

    Of files above 64 MiB only evenly spaced blocks of the payload are read: another checkpoint
    differs in nearly all of its bytes.

    Raises:
        BadInputError: as `load_source`, as far as files are concerned.
    """
    folder = Path(folder)
    digest = hashlib.sha256()
    for path in sorted({tensor.file for tensor in stored_tensors(folder).values()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        for start, end in _hashed_ranges(path, size):
            with path.open("rb") as file:
                file.seek(start)
                digest.update(file.read(end - start))
    return digest.hexdigest()


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Hugging Face's name -> tensor, of all files of a checkpoint; headers only are read.

    Raises:
        BadInputError: a file is missing or damaged, or the index names what is not there.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.exists():
        return read_header(single)
    if not index.exists():
        raise BadInputError(
            f"model.source {folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}",
            fix="get the checkpoint in the safetensors format",
        )
    file_of_name = _read_index(index)
    headers = {file: read_header(folder / file) for file in sorted(set(file_of_name.values()))}
    for name, file in file_of_name.items():
        if name not in headers[file]:
            raise BadInputError(
                f"{index} says that {name} is in {file}, but it is not there",
                fix="get both files again",
            )
    return {name: tensor for header in headers.values() for name, tensor in header.items()}


def _hashed_ranges(path: Path, size: int) -> list[tuple[int, int]]:
    if size <= WHOLE_HASH_BYTES:
        return [(0, size)]
    payload = min(tensor.start for tensor in read_header(path).values())
    stride = (size - payload) // SAMPLED_BLOCKS
    starts = [payload + number * stride for number in range(SAMPLED_BLOCKS)]
    return [(0, payload), *((start, start + BLOCK_BYTES) for start in starts)]


def _read_index(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        file_of_name = dict(content["weight_map"])
        # A name with a folder in it would lead out of the checkpoint.
        is_whole = all(Path(file).name == file for file in file_of_name.values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise BadInputError(f"{path} is damaged: {reason}", fix="get that file again") from None
    if not file_of_name or not is_whole:
        raise BadInputError(
            f"{path} is damaged: weight_map must name files of its own folder",
            fix="get that file again",
        )
    return file_of_name


def _check_names(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    ours: Mapping[str, str],
    *,
    is_tied: bool,
) -> None:
    missing = [name for name in ours if name not in stored]
    if missing:
        raise BadInputError(
            f"model.source {folder} lacks {_listed(missing)}",
            fix="get all files of the checkpoint, or mend the model section",
        )
    unknown = [
        name for name in stored if name not in ours and not is_known_extra(name, is_tied=is_tied)
    ]
    if unknown:
        raise BadInputError(
            f"model.source {folder} holds {_listed(unknown)}, for which the model has no place",
            fix="take a plain checkpoint of the Llama, Qwen2 or Qwen3 family",
        )


def _check_shape(hf_name: str, tensor: StoredTensor, weight: Parameter) -> None:
    if tensor.shape != tuple(weight.shape):
        raise BadInputError(
            f"{tensor.file}: {hf_name} has shape {list(tensor.shape)}, the model needs "
            f"{list(weight.shape)}",
            fix="get weights and config.json of one checkpoint",
        )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

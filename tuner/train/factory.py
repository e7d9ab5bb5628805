"""The user's own Cell in place of the built-in decoder: `model.factory: package.module:function`.

The function is called as `function(config, max_length)` with the whole `TrainConfig` and the
tokens of the longest padded row, and returns a Cell with

    def construct(self, input_ids_BT, segment_ids_BT, position_ids_BT): ...  # logits [B, T, V]

Each input is int32 [B, T]. Segment ids are 1, 2, ... for the samples of a row and 0 for padding:
they are the attention mask of padded rows (1 and 0) and keep the samples of packed rows apart. A
token may see tokens of its own segment only, none after itself. Positions start at 0 in every
sample. V is model.vocab_size, the logits are of any float dtype, and logits of padding are not
looked at. B and T differ between batches, and are not known in a dynamic graph.

The module is imported with the current folder on the path, the random seed is train.seed, and what
the parameters are then is what training starts from. `config.precision` is the Cell's own to
follow; the loss is computed here.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.train.graph import op_by_op

CHECKED_ROWS = 2
CHECKED_TOKENS = 8
FLOAT_DTYPES = (ms.float32, ms.float16, ms.bfloat16)
MEND = "mend it: the contract stands in tuner/train/factory.py and in the README"


def build_from_factory(config: TrainConfig, max_length: int) -> nn.Cell:
    """Call the factory of a config and check what it returns.

    One small forward runs op by op, which compiles nothing.

    Args:
        config: With model.factory.
        max_length: Longest padded row in tokens, inclusive.

    Raises:
        BadInputError: as `make_cell`; or the Cell breaks the contract.
    """
    model = make_cell(config, max_length)
    length = min(CHECKED_TOKENS, max_length)
    _check_forward(config.model.factory or "", model, config.model.vocab_size, length)
    return model


def make_cell(config: TrainConfig, max_length: int) -> nn.Cell:
    """Call the factory of a config; the Cell does not run yet.

    Args:
        config: With model.factory.
        max_length: Longest padded row in tokens, inclusive.

    Raises:
        BadInputError: the module or function is not there, either raises, or what comes back is
            no Cell with parameters; or fp32_ops names parts that only the built-in decoder has.
    """
    factory = config.model.factory or ""
    parts = [group for group in config.precision.fp32_ops if group != "loss"]
    if parts:
        raise BadInputError(
            f"precision.fp32_ops names parts of the built-in decoder ({', '.join(parts)}), but "
            f"model.factory {factory} makes its own",
            fix="leave only loss in it",
        )
    function = _import(factory)
    ms.set_seed(config.train.seed)
    model = _call(factory, lambda: function(config, max_length))
    if not isinstance(model, nn.Cell):
        raise BadInputError(
            f"model.factory {factory} must return a mindspore.nn.Cell (got {_kind(model)})",
            fix=MEND,
        )
    if not model.trainable_params():
        raise BadInputError(f"the Cell of {factory} has no trainable parameter", fix=MEND)
    return model


def _import(factory: str) -> Callable[[TrainConfig, int], Any]:
    module_name, _, function_name = factory.partition(":")
    # A console script has its own folder on the path, not the one the user is in.
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"model.factory {factory}: no module named {error.name}",
            fix="check the name, start from the folder that holds it, or install it",
        ) from None
    except Exception as error:
        raise _failed(factory, error) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise BadInputError(
            f"model.factory {factory}: {module_name} has no function {function_name}",
            fix="check the name behind the colon",
        )
    return function  # type: ignore[no-any-return]


def _check_forward(factory: str, model: nn.Cell, vocab_size: int, length: int) -> None:
    shape = (CHECKED_ROWS, length)
    ids = np.zeros(shape, np.int32)
    segments = np.ones(shape, np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), shape).copy()
    with op_by_op():
        logits = _call(factory, lambda: model(Tensor(ids), Tensor(segments), Tensor(positions)))
    if not isinstance(logits, Tensor) or logits.dtype not in FLOAT_DTYPES:
        found = f"{logits.dtype} tensor" if isinstance(logits, Tensor) else _kind(logits)
        raise BadInputError(
            f"the Cell of {factory} must return one float tensor of logits (got {found})", fix=MEND
        )
    if tuple(logits.shape) != (*shape, vocab_size):
        raise BadInputError(
            f"the Cell of {factory} must return logits [B, T, vocab_size] = "
            f"{[*shape, vocab_size]} (got {list(logits.shape)})",
            fix=MEND,
        )


def _call(factory: str, body: Callable[[], Any]) -> Any:
    try:
        return body()
    except Exception as error:
        raise _failed(factory, error) from error


def _failed(factory: str, error: Exception) -> BadInputError:
    """What the user's code raised, and where in it."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not _is_of_library(frame.filename)
    ]
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    text = " ".join(str(error).split())[:300]
    return BadInputError(
        f"model.factory {factory} raised {type(error).__name__}: {text}{place}", fix=MEND
    )


def _is_of_library(filename: str) -> bool:
    libraries = (Path(ms.__file__).parent, Path(__file__).parent, Path(importlib.__file__).parent)
    return filename.startswith("<") or any(map(Path(filename).is_relative_to, libraries))


def _kind(value: object) -> str:
    return type(value).__name__

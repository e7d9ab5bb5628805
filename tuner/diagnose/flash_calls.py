"""What a model hands to `ops.flash_attention_score`, caught and checked while it is traced.

Meanwhile a function stands in for the op wherever the op is held: under any name in any module
that is imported, so also after `from mindspore.ops import flash_attention_score`, and in
attributes of the model's Cells. Not seen are calls through a closure, a `functools.partial` or a
list, and those of the primitive `FlashAttentionScore` itself.

Arguments are held to the documentation, as `tuner.train.flash_arguments` has it. On Ascend the op
itself is then called (not run: no NPU was at hand). Other devices have no such op. So that the
trace can go on there, attention is computed by NumPy; a call that is refused has no defined
result, and zeros of the shape and dtype of query stand for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from tuner.diagnose.cell_calls import RefusedCall
from tuner.diagnose.flash_math import attend_in_numpy
from tuner.errors import BadInputError
from tuner.train.flash import FLASH_DEVICE, chosen_device
from tuner.train.flash_arguments import FlashCall, check_flash_arguments


class FlashWatch:
    """Takes down calls of flash attention whose arguments are not as documented."""

    def __init__(self, name_of_cell: Callable[[], str]) -> None:
        """Watch nothing yet.

        Args:
            name_of_cell: Names the Cell that is under way.
        """
        self.refused: list[RefusedCall] = []
        self.num_stand_ins = 0
        self._name_of_cell = name_of_cell
        self._op: Callable[..., Any] = ops.flash_attention_score

    @contextmanager
    def watching(self, model: nn.Cell) -> Iterator[None]:
        """Stand in for the op inside the block; afterwards it is where it was."""
        places = list(_places_of(self._op, model))
        try:
            for names, name in places:
                names[name] = self._attend
            yield
        finally:
            for names, name in places:
                names[name] = self._op

    def _attend(self, *arguments: Any, **options: Any) -> Any:
        given = inspect.signature(self._op).bind(*arguments, **options).arguments
        call = FlashCall(**given)
        has_op = chosen_device() == FLASH_DEVICE
        is_sound = self._check(call, is_replaced=not has_op)
        if has_op:
            return self._op(*arguments, **options)
        if is_sound:
            self.num_stand_ins += 1
            found = attend_in_numpy(call)
        else:
            found = np.zeros(tuple(call.query.shape), np.float32)
        return Tensor(found, ms.float32).astype(call.query.dtype)

    def _check(self, call: FlashCall, *, is_replaced: bool) -> bool:
        try:
            check_flash_arguments(call)
        except BadInputError as error:
            self.refused.append(
                RefusedCall(cell_name=self._name_of_cell(), error=error, is_replaced=is_replaced)
            )
            return False
        return True


def _places_of(function: object, model: nn.Cell) -> Iterator[tuple[dict[str, Any], str]]:
    """Where it is held: names of modules, attributes of Cells."""
    holders = [vars(one) for one in list(sys.modules.values()) if isinstance(one, ModuleType)]
    holders += [vars(cell) for _, cell in model.cells_and_names()]
    for names in holders:
        for name, value in list(names.items()):
            if value is function:
                yield names, name

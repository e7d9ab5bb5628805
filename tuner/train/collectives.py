"""What ranks do together: gradients are summed, and every rank learns the numbers of all.

Both go through AllReduce with SUM in float32, which is all that MindSpore has for CPU (2.10: no
MAX, no int32, no Barrier); it picks MCCL there and HCCL on Ascend, the latter from the
documentation, not run. Numbers are gathered and not only summed: every rank has a place of its own
in the sum, where the others add 0, so that what comes out is exactly what went in. A float64 goes
as three float32, which together hold its 53 bits, within the range of float32.

One AllReduce for each parameter: measured with two ranks on CPU, 27 parameters of 1.4 million
numbers took 71 ms one by one and 260 ms as one flat array, for the copying; 14 small ones took as
long either way. On Ascend `sum_gradients` is a graph of its own and nothing overlaps with it.

Shapes: W ranks, K numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from numpy.typing import NDArray

from tuner.errors import BadInputError
from tuner.train.device import ASCEND, Device
from tuner.train.engine import Engine
from tuner.train.rank_names import name_of_rank
from tuner.train.ranks import Numbers
from tuner.train.world import ROLE_VARIABLE, World

PIECES = 3
"""float32 numbers that hold a float64."""


class Signs(Protocol):
    """Where a rank says what it is doing, and that it waits for the others."""

    def at(self, place: str, step: int) -> None:
        """Say what is being done, after so many steps."""

    def waiting(self) -> AbstractContextManager[None]:
        """A block in which this rank waits for the others."""


def join(world: World, device: Device) -> None:
    """Meet the other ranks; no tensor was made yet.

    Raises:
        BadInputError: the launcher is for Ascend alone, or those that met are not those that it
            told of.
    """
    if device.name != ASCEND and ROLE_VARIABLE not in os.environ:
        # Elsewhere `init` asks the scheduler of msrun, which is not there (2.10).
        raise BadInputError(
            "mpirun and rank tables bring ranks together on Ascend only",
            fix="give --workers, or start it within msrun",
        )
    init()
    met = World(rank=get_rank(), size=get_group_size(), local_rank=world.local_rank)
    if met != world:
        raise BadInputError(
            f"the launcher says rank {world.rank} of {world.size}, MindSpore says rank {met.rank} "
            f"of {met.size}",
            fix="start all ranks with one launcher",
        )


def serve_as_scheduler() -> None:
    """Bring the ranks together; returns when all of them have ended."""
    ms.set_device("CPU")
    init()


class ParameterSum(nn.Cell):
    """Puts the sum over all ranks into each parameter, one after another on every rank."""

    def __init__(self, parameters: ParameterTuple, is_given: tuple[bool, ...]) -> None:
        """Prepare.

        Args:
            parameters: The same on every rank.
            is_given: For each, whether this rank adds its own; else it adds 0. Of what one rank
                alone gives, all get exactly that.
        """
        super().__init__()
        self.parameters = parameters
        self.is_given = is_given
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM)

    def construct(self, done: Tensor) -> Tensor:
        """Takes and returns a float32 scalar of no meaning."""
        for i in range(len(self.parameters)):
            given = self.parameters[i]
            if not self.is_given[i]:
                given = ops.zeros_like(given)
            # Ranks must reduce in one order: nothing else would keep a graph from reordering.
            summed = self.all_reduce(ops.depend(given, done))
            done = ops.depend(done, ops.assign(self.parameters[i], summed))
        return done


class NumberSum(nn.Cell):
    """The sum over all ranks of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM)

    def construct(self, numbers: Tensor) -> Tensor:
        """float32 [K] to float32 [K]."""
        return self.all_reduce(numbers)


class AllRanks:
    """The ranks of a run on several devices; see `Ranks`."""

    def __init__(self, world: World, engine: Engine, signs: Signs) -> None:
        """Prepare; nothing is sent or compiled yet.

        Args:
            world: This rank; `join` was called.
            engine: Whose buffers are summed.
            signs: Told what this rank does.
        """
        self.world = world
        self._engine = engine
        self._signs = signs
        self._numbers = NumberSum()
        self._gradients = ParameterSum(engine.gradients, (True,) * len(engine.gradients))
        self._weights: ParameterSum | None = None
        if engine.owners is not None:
            is_own = tuple(owner == world.rank for owner in engine.owners)
            self._weights = ParameterSum(ParameterTuple(engine.weights), is_own)

    def warm_up(self) -> None:
        """Compile what sums gradients: the first thing that the ranks do together."""
        with self._engine.recompiles.planned():
            self.sum_gradients()
            if self._weights is not None:
                # Not run: whether all start from the same weights is looked at later.
                self._weights.compile(Tensor(0.0, ms.float32))

    def gather(self, values: Sequence[float]) -> Numbers:
        """The values of every rank: float64 [W, K], exactly as given."""
        pieces = np.zeros((self.world.size, len(values) * PIECES), dtype=np.float32)
        pieces[self.world.rank] = split(np.array(values, dtype=np.float64)).reshape(-1)
        summed = self._sum(pieces.reshape(-1))
        return join_pieces(summed.reshape(self.world.size, len(values), PIECES))

    def sum_gradients(self) -> None:
        """Make every rank's gradient buffers the sum of all."""
        with self._signs.waiting():
            self._engine.recompiles.run(self._gradients, Tensor(0.0, ms.float32))

    def share_weights(self) -> None:
        """After an update: give every rank the weights that another has updated."""
        if self._weights is not None:
            with self._signs.waiting():
                self._engine.recompiles.run(self._weights, Tensor(0.0, ms.float32))

    def moments_of_others(self) -> Mapping[str, NDArray[Any]]:
        """Moments that ranks 1 and up keep, by name, for the first rank.

        One at a time, so that no rank needs the memory of all of them on its device.
        """
        found: dict[str, NDArray[Any]] = {}
        if self._weights is None:
            return found
        here, elsewhere = self._engine.moments, self._engine.moments_elsewhere
        for name in sorted({*here, *elsewhere}):
            own = here[name].asnumpy() if name in here else np.zeros(elsewhere[name], np.float32)
            summed = self._sum(own.reshape(-1))
            if self.world.is_first and name in elsewhere:
                found[name] = summed.reshape(own.shape).copy()
        return found

    def gradients_of_others(self) -> Mapping[str, NDArray[Any]]:
        """Buffers of ranks 1 and up as they are, by `name_of_rank`, for the first rank.

        The sum of one rank's buffers and of zeros is exact, so they are summed in turn.
        """
        found: dict[str, NDArray[Any]] = {}
        with self._kept_gradients() as restore:
            for rank in range(1, self.world.size):
                if rank == self.world.rank:
                    restore()
                else:
                    self._engine.clear_gradients()
                self.sum_gradients()
                if self.world.is_first:
                    found |= {
                        name_of_rank(gradient.name, rank): gradient.asnumpy().copy()
                        for gradient in self._engine.gradients
                    }
        return found

    def at(self, place: str, step: int) -> None:
        """Tell the others what is being done, after so many steps."""
        self._signs.at(place, step)

    def _sum(self, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        # Each length is compiled once, when it is met: some milliseconds.
        with self._signs.waiting(), self._engine.recompiles.planned():
            summed = self._engine.recompiles.run(self._numbers, Tensor(numbers)).asnumpy()
        return np.asarray(summed, np.float32)

    @contextmanager
    def _kept_gradients(self) -> Iterator[Callable[[], None]]:
        own = self._engine.read_gradients()

        def restore() -> None:
            for gradient, value in zip(self._engine.gradients, own, strict=True):
                gradient.set_data(Tensor(value))

        try:
            yield restore
        finally:
            restore()


def split(values_K: NDArray[np.float64]) -> NDArray[np.float32]:
    """Each value as three float32 that add up to it: float32 [K, 3].

    What is beyond the range of float32 becomes infinite.
    """
    pieces = np.zeros((len(values_K), PIECES), dtype=np.float32)
    rest = values_K.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in range(PIECES):
            pieces[:, piece] = rest
            rest = np.where(np.isfinite(pieces[:, piece]), rest - pieces[:, piece], 0.0)
    return pieces


def join_pieces(pieces: NDArray[np.float32]) -> Numbers:
    """The inverse of `split`, along the last axis."""
    # The smallest first, so that the one rounding is that of the exact sum.
    total: Numbers = pieces[..., ::-1].astype(np.float64).sum(axis=-1)
    return total

"""How the ranks of a run come together before the first step, so that none waits in vain.

They meet when the device is open, and compare what they are about to train. Then each compiles all
of its graphs at its own pace, without a collective that a slow one would keep waiting; only when
the files say that all are ready do they do the first thing together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tuner.errors import BadInputError
from tuner.train.agreement import check_agreement, check_files, values_of
from tuner.train.collectives import AllRanks, join
from tuner.train.device import Device
from tuner.train.engine import Engine
from tuner.train.rank_watch import RankWatch
from tuner.train.ranks import Ranks
from tuner.train.run_inputs import RunInputs
from tuner.train.state import TrainState
from tuner.train.warmup import StoppedError


def meet(
    watch: RankWatch, inputs: RunInputs, device: Device, saved: TrainState | None
) -> dict[str, Any]:
    """Meet the other ranks; the device is open, and no tensor was made yet.

    Args:
        watch: This rank.
        inputs: Rows and plan.
        device: The opened device.
        saved: What the run goes on from; None: it starts.

    Returns:
        What this rank is about to train, for `wait_and_agree`.

    Raises:
        BadInputError: a rank is about to train something else.
    """
    values = values_of(inputs, device, saved)
    try:
        watch.folder.write_values(watch.world.rank, values)
    except OSError as error:
        raise BadInputError(
            f"cannot write {watch.folder.path}: {error.strerror or error}",
            fix="choose a train.out that can be written",
        ) from None
    join(watch.world, device)
    watch.met()
    check_files(watch.folder, watch.world.size)
    return values


def wait_and_agree(
    watch: RankWatch,
    engine: Engine,
    values: Mapping[str, Any],
    notice: Callable[[str], None],
    stop_requested: Callable[[], bool],
) -> Ranks:
    """Wait until all ranks have compiled everything; then agree on what is trained.

    Args:
        watch: This rank.
        engine: Warmed up; its buffers are 0.
        values: Of this rank, as `meet` gave them.
        notice: Told now and then who is waited for.
        stop_requested: Asked while waiting.

    Raises:
        StoppedError: a stop was requested.
        BadInputError: a rank is about to train something else.
    """
    if not watch.wait_for_others(notice, stop_requested):
        raise StoppedError
    ranks = AllRanks(watch.world, engine, watch)
    check_agreement(ranks, values, watch.folder)
    watch.at("warm-up", detail="the sum of the gradients")
    ranks.warm_up()
    return ranks

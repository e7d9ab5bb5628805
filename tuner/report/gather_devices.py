"""The best config on several devices, as the report and the summary show it; pure."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.errors import BadInputError
from tuner.report.contents import Absent, SeveralDevices
from tuner.report.markup import count, percent
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.measurement import CostKey
from tuner.simulate.screen import Screen
from tuner.simulate.stragglers import StragglerCost, simulate_stragglers
from tuner.simulate.warm_up_time import choose_timeouts, describe_timeouts
from tuner.study.result import StudyResult
from tuner.study.setup import StudySetup

RANDOM_BATCHES = (
    " Batches of random rows become as long as the longest row of all devices; buckets and packed "
    "rows do not."
)

NO_WAIT = 5e-4
"""Share of the time that is shown as 0.0 %."""

AS_FAST = 5e-3
"""Speeds that differ by less are shown as equal."""

METHOD = (
    "Simulated from the cost model fitted on one device; communication, updates and devices of "
    "different speed are left out. Other shapes: every rank takes the batches of the plan in an "
    "order of its own and waits for the slowest after every step. Same shape: the plan for so "
    "many ranks, fillers included. A rank's batch is of the same size throughout, so "
    "an epoch has fewer, larger updates on more devices."
)


def gather_devices(result: StudyResult, setup: StudySetup) -> SeveralDevices | Absent:
    """What ranks of other shapes would lose to waiting, what equal shapes cost, and time limits.

    Args:
        result: All that is known.
        setup: Gives the rows and the device.
    """
    best = result.best
    if best is None or best.outcome.estimate is None:
        return Absent()
    config = best.outcome.config
    costs = result.book.known(CostKey.of(config, setup.installation.device))
    screen = Screen(LengthHistogram.from_tokens(setup.data.lengths.own_tokens))
    try:
        lines = simulate_stragglers(screen, config, costs.model.step)
    except BadInputError as error:
        return Absent(reason=f"Several devices were not simulated: {error}")
    timeouts = choose_timeouts(best.outcome.estimate.estimated_compile_s)
    is_random = config.batching.strategy == "dynamic"
    return SeveralDevices(
        lines=lines,
        verdict=describe_stragglers(lines) + (RANDOM_BATCHES if is_random else ""),
        note=" ".join([METHOD, *_too_few(lines), describe_timeouts(timeouts)]),
    )


def describe_stragglers(lines: Sequence[StragglerCost]) -> str:
    """What follows for so many devices, of the line of the most ranks that have batches enough.

    Args:
        lines: At least one, by number of ranks.
    """
    line = max(
        (line for line in lines if line.num_batches >= line.world_size),
        key=lambda line: line.world_size,
        default=lines[0],
    )
    devices, speed = count(line.world_size, "device"), line.same_shape_speed
    cost = f"{percent(line.filler_fraction)} of its rows being fillers"
    if line.wait_fraction < NO_WAIT:
        return (
            f"All steps take the same time, so of {devices} none waits for another, whoever takes "
            f"which batch; the plan for so many is {speed:.2f} times as fast, {cost}."
        )
    told = (
        f"On {devices} that take other shapes, {percent(line.wait_fraction)} of the time would "
        "be lost to waiting for the slowest. The same shape on all of them, as every plan here "
        "has it, would"
    )
    if speed > 1.0 + AS_FAST:
        return f"{told} be {speed:.2f} times as fast, {cost}."
    if speed > 1.0 - AS_FAST:
        return f"{told} take as long, {cost}."
    return (
        f"{told} not be faster ({speed:.2f} times as fast), {cost}: the data is small for so "
        "many. Fewer devices, fewer shapes or smaller batches leave fewer fillers."
    )


def _too_few(lines: Sequence[StragglerCost]) -> list[str]:
    few = [line for line in lines if line.num_batches < line.world_size]
    if not few:
        return []
    sizes = " and ".join(f"{line.world_size:,}" for line in few)
    return [
        f"Batches of one device in an epoch: {few[0].num_batches:,}. So of {sizes} devices some "
        "would have nothing to do."
    ]

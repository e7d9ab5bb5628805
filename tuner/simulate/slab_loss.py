"""What planning in slabs costs, from the histogram of the lengths; no plan is made.

The figures of a plan in slabs against those of one plan of all rows: exact but for `dynamic`,
whose padded tokens are expectations.
"""

from __future__ import annotations

from tuner.batching.slab_shares import count_slabs
from tuner.batching.slabs import SlabLoss
from tuner.config.override import override_config
from tuner.config.schema import TrainConfig
from tuner.simulate.screen import Screen, ScreenedPlan


def estimate_slab_loss(
    screen: Screen, config: TrainConfig, world_size: int = 1
) -> SlabLoss | None:
    """The loss from slabs; None if the rows are planned together.

    Args:
        screen: Of the rows.
        config: Sections `data` and `batching` decide.
        world_size: Ranks, >= 1.

    Raises:
        BadInputError: as `plan_batches`.
    """
    num_rows = screen.num_admitted(config)
    num_slabs = count_slabs(num_rows, config.batching)
    if num_slabs < 2:
        return None
    in_one = override_config(config, {"batching.rows_per_slab": num_rows}, source="one plan")
    plan, whole = (screen.plan(each, world_size) for each in (config, in_one))
    num_slots, least_slots = (_slots(each, world_size) for each in (plan, whole))
    return SlabLoss(
        num_slabs=num_slabs,
        num_slots=num_slots,
        extra_slots=num_slots - least_slots,
        extra_padded_fraction=plan.padded_tokens / whole.padded_tokens - 1.0,
    )


def _slots(plan: ScreenedPlan, world_size: int) -> int:
    return round(sum(size * steps for (size, _), steps in plan.shape_counts.items())) * world_size

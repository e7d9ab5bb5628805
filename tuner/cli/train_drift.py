"""What `varseq-train --accept-data` says of data that a config was not tuned on."""

from __future__ import annotations

from tuner.simulate.drift import WORTH_TUNING_AGAIN, Drift, DriftPlan
from tuner.simulate.length_shift import RESOLUTION, LengthShift


def describe_drift(drift: Drift, config_path: str, data_path: str) -> list[str]:
    """How far the lengths are apart, what that costs, and what to do.

    Args:
        drift: What was found.
        config_path: Of the tuned config.
        data_path: Of the data at hand.
    """
    lines = ["this is not the data that the config was tuned on; its shapes stay as they are"]
    lines += _shift_lines(drift.shift)
    if drift.num_over_long:
        lines.append(
            f"{drift.num_over_long:,} rows are longer than every tuned shape: with them "
            f"{drift.token_loss:.1%} of the tokens are cut or dropped, as data.overflow says"
        )
    lines.append(f"tuned shapes: {_plan(drift.tuned)}")
    lines.append(f"solved anew:  {_plan(drift.anew)}")
    lines.append(f"(estimated over the planned run with compiles, costs of {drift.cost_source})")
    lines.append(_advice(drift, config_path, data_path))
    return lines


def _shift_lines(shift: LengthShift | None) -> list[str]:
    if shift is None:
        return ["the config does not say how long its rows were: lengths are not compared"]
    if not shift.is_resolved:
        return [
            "lengths: the same as far as the percentiles in the config tell (Kolmogorov-Smirnov "
            f"statistic below {RESOLUTION})"
        ]
    likely = "by chance alone that is rare" if shift.chance < 0.01 else "that may be chance"
    return [
        f"lengths: Kolmogorov-Smirnov statistic {shift.statistic:.2f}: {shift.share_now:.0%} of "
        f"the rows now have at most {shift.at_length:,} tokens, {shift.share_before:.0%} of the "
        f"tuned ones had, and at no length is the difference larger",
        f"{likely} (p = {shift.chance:.1g}); with many rows p is tiny for any difference, so what "
        "counts is the time that it costs:",
    ]


def _plan(plan: DriftPlan) -> str:
    shown = ", ".join(map(str, plan.padded_lengths[:8]))
    more = f" and {len(plan.padded_lengths) - 8} more" if len(plan.padded_lengths) > 8 else ""
    return (
        f"{plan.real_tokens_per_s:,.0f} real tokens/s, effective token fraction "
        f"{plan.effective_token_fraction:.3f}, padded to {shown}{more}"
    )


def _advice(drift: Drift, config_path: str, data_path: str) -> str:
    loss = max(0.0, drift.speed_loss)
    if drift.advice == "keep":
        return (
            f"keep: the tuned shapes lose {loss:.1%}, and tuning again pays from "
            f"{WORTH_TUNING_AGAIN:.0%} on"
        )
    reason = (
        f"the tuned shapes lose {loss:.1%} of the speed"
        if drift.speed_loss >= WORTH_TUNING_AGAIN
        else f"{drift.token_loss:.1%} of the tokens fit into no tuned shape"
    )
    return f"retune: {reason}; varseq-tune --data {data_path} --config {config_path}"

"""What `varseq-data inspect` suggests: values in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from tuner.batching.slabs import SlabLoss
from tuner.simulate.advice import Verdict
from tuner.simulate.sampling import SampledPadding
from tuner.simulate.suggest import NOT_WORTH_MORE, ROWS_PER_SLAB, PlanChoice, Suggestion

BOUNDARIES_A_LINE = 12


def format_advice(verdict: Verdict, suggestion: Suggestion) -> str:
    """The verdict, the suggestion with its reasons, and the tables behind it."""
    return "\n\n".join(
        [
            f"{verdict.reason}\n{describe_gain(suggestion)}",
            _format_suggestion(suggestion),
            "Its batches:\n" + _format_buckets(suggestion.best),
            *_describe_slabs(suggestion),
            "Padding against the number of shapes, boundaries of least padding, "
            f"aligned to {suggestion.best.align}:\n" + _format_curve(suggestion),
            "Alignments, each with its fastest number of buckets:\n" + _format_aligns(suggestion),
            _format_assumptions(suggestion),
        ]
    )


def describe_gain(suggestion: Suggestion) -> str:
    """The simulated gain over padding to the longest, in a sentence."""
    best = suggestion.best
    run = f"Simulated over {describe_epochs(suggestion)}, compile time included: "
    if len(best.boundaries) == 1:
        return (
            f"{run}no number of buckets trains faster than padding to the longest by "
            f"{NOT_WORTH_MORE:.0%} or more."
        )
    text = (
        f"{run}{_buckets(best)} train {suggestion.gain:.2f} times the real tokens a second of "
        "padding to the longest"
    )
    if best.break_even is None:
        return f"{text}."
    return f"{text}, ahead from step {best.break_even.steps:,} on."


def describe_epochs(suggestion: Suggestion) -> str:
    """`1 epoch` or `3 epochs`."""
    epochs = suggestion.setting.epochs
    return f"{epochs} epoch{'s' if epochs > 1 else ''}"


def describe_sampling(
    fixed: SampledPadding, best: SampledPadding, num_sampled: int, num_rows: int
) -> str:
    """How far the figures of a sample can be off, in a sentence."""
    return (
        f"Estimated from a sample of {num_sampled:,} of {num_rows:,} rows. With 95 % confidence "
        f"padding to the longest wastes {_interval(fixed)}, the suggested boundaries "
        f"{_interval(best)} of the tokens (fillers of last batches aside). The longest row is "
        "exact."
    )


def suggestion_values(suggestion: Suggestion) -> dict[str, Any]:
    """The same for machines: JSON values."""
    return {
        "epochs": suggestion.setting.epochs,
        "tokens_per_batch": suggestion.setting.tokens_per_batch,
        "cost_source": suggestion.setting.cost.source,
        "estimated_gain_over_fixed": suggestion.gain,
        "suggested": _values(suggestion.best),
        "fixed": _values(suggestion.fixed),
        "packed": _values(suggestion.packed),
        "curve": [_values(choice) for choice in suggestion.curve],
        "best_of_align": [_values(choice) for choice in suggestion.best_of_align],
        "slabs": _slab_values(suggestion.slab_loss),
    }


def sampling_values(fixed: SampledPadding, best: SampledPadding) -> dict[str, Any]:
    """The sampling error for machines: JSON values."""
    return {
        name: {"padding_fraction": item.padding_fraction, "half_width_95": item.half_width}
        for name, item in (("pad_to_longest", fixed), ("suggested_boundaries", best))
    }


def _format_suggestion(suggestion: Suggestion) -> str:
    best, fastest = suggestion.best, min(suggestion.curve, key=_run_s)
    quickest = min(suggestion.best_of_align, key=_run_s)
    coarsest = suggestion.best_of_align[-1]
    lines = [f"Suggested: {_buckets(best)}, aligned to {best.align} tokens", *_list_ends(best)]
    if fastest is best:
        lines.append("  buckets    the fastest number: fewer pad more, more compile longer")
    else:
        lines.append(
            f"  buckets    {len(fastest.boundaries)} are the fastest; these take "
            f"{_run_s(best) / _run_s(fastest) - 1:.1%} longer with "
            f"{fastest.num_shapes - best.num_shapes} compiles fewer"
        )
    if quickest.align == best.align:
        coarser = f"; coarser ones take over {NOT_WORTH_MORE:.0%} longer"
        lines.append(f"  alignment  none is faster{coarser if coarsest is not quickest else ''}")
    else:
        lines.append(
            f"  alignment  the coarsest that takes at most {NOT_WORTH_MORE:.0%} longer than the "
            f"fastest ({quickest.align})"
        )
    lines.append(
        f"  to try     batching: {{strategy: bucketed, num_buckets: {len(best.boundaries)}, "
        f"align: {best.align}, tokens_per_batch: {suggestion.setting.tokens_per_batch}"
        f"{_slabs_to_try(suggestion)}}}"
    )
    return "\n".join(lines)


def _slabs_to_try(suggestion: Suggestion) -> str:
    most = suggestion.setting.rows_per_slab
    return "" if most == ROWS_PER_SLAB else f", rows_per_slab: {most}"


def _describe_slabs(suggestion: Suggestion) -> list[str]:
    loss = suggestion.slab_loss
    if loss is None:
        return []
    most = suggestion.setting.rows_per_slab
    title = f"With at most {most:,} rows planned at a time (batching.rows_per_slab):"
    return [f"{title}\n{loss.text}."]


def _format_buckets(choice: PlanChoice) -> str:
    plan = choice.plan
    rows = [
        (
            f"{length}",
            f"{size}",
            f"{steps:,}",
            f"{plan.real_tokens_of_shape[size, length] / plan.real_tokens:.1%}",
            f"{1 - plan.real_tokens_of_shape[size, length] / (size * length * steps):.1%}",
        )
        for (size, length), steps in sorted(plan.shape_counts.items(), key=lambda item: item[0][1])
    ]
    headers = ["padded length", "rows", "steps an epoch", "share of tokens", "padding"]
    return tabulate(rows, headers, disable_numparse=True, colalign=["right"] * 5)


def _list_ends(choice: PlanChoice) -> Sequence[str]:
    ends = [str(end) for end in choice.boundaries]
    starts = range(0, len(ends), BOUNDARIES_A_LINE)
    lines = [", ".join(ends[start : start + BOUNDARIES_A_LINE]) for start in starts]
    return [f"  {'boundaries' if not i else '':<10} {line}" for i, line in enumerate(lines)]


def _format_curve(suggestion: Suggestion) -> str:
    named = [
        (f"{len(choice.boundaries)} buckets" if i else "1 bucket", choice)
        for i, choice in enumerate(suggestion.curve)
    ]
    rows = [
        (
            *_figures(name, choice, suggestion),
            "<- suggested" if choice is suggestion.best else "",
        )
        for name, choice in [*named, ("packed", suggestion.packed)]
    ]
    headers = ["", "shapes", "padding", "steps", "run time", "ahead from step", ""]
    return tabulate(
        rows,
        headers,
        disable_numparse=True,
        colalign=("left", "right", "right", "right", "right", "right", "left"),
    )


def _format_aligns(suggestion: Suggestion) -> str:
    rows = [
        _figures(f"{choice.align}: {_buckets(choice)}", choice, suggestion)[:5]
        for choice in suggestion.best_of_align
    ]
    return tabulate(
        rows,
        ["", "shapes", "padding", "steps", "run time"],
        disable_numparse=True,
        colalign=("left", *["right"] * 4),
    )


def _format_assumptions(suggestion: Suggestion) -> str:
    setting = suggestion.setting
    cost = setting.cost
    return (
        "padding: of the plan, fillers of last batches included; steps: of an epoch, batches of\n"
        f"at most {setting.tokens_per_batch:,} tokens; run time: estimated, pad-to-longest = 1\n"
        f"costs: {cost.source} (a compile takes {cost.compile_base_s:.1f} s and "
        f"{cost.compile_per_step_s:.1f} steps);\n`varseq-tune` measures what counts on your device"
    )


def _figures(name: str, choice: PlanChoice, suggestion: Suggestion) -> tuple[str, ...]:
    return (
        name,
        f"{choice.num_shapes}",
        f"{choice.plan.padding_fraction:.1%}",
        f"{choice.plan.num_steps:,}",
        f"{_run_s(choice) / _run_s(suggestion.fixed):.3f}",
        _ahead_from(choice, suggestion),
    )


def _ahead_from(choice: PlanChoice, suggestion: Suggestion) -> str:
    if choice.plan.shape_counts == suggestion.fixed.plan.shape_counts:
        return "-"
    return "never" if choice.break_even is None else f"{choice.break_even.steps:,}"


def _values(choice: PlanChoice) -> dict[str, Any]:
    ahead = choice.break_even
    return {
        "strategy": choice.name,
        "num_buckets": len(choice.boundaries),
        "boundaries": list(choice.boundaries),
        "align": choice.align,
        "padding_fraction": choice.plan.padding_fraction,
        "num_shapes": choice.num_shapes,
        "steps_per_epoch": choice.plan.num_steps,
        "buckets": [
            {
                "rows": size,
                "padded_length": length,
                "steps_per_epoch": steps,
                "real_tokens": choice.plan.real_tokens_of_shape[size, length],
            }
            for (size, length), steps in choice.plan.shape_counts.items()
        ],
        "estimated_run_s": _run_s(choice),
        "estimated_compile_s": choice.estimate.estimated_compile_s,
        "break_even_steps": None if ahead is None else ahead.steps,
    }


def _slab_values(loss: SlabLoss | None) -> dict[str, Any] | None:
    if loss is None:
        return None
    return {
        "num_slabs": loss.num_slabs,
        "extra_rows": loss.extra_slots,
        "extra_padded_fraction": loss.extra_padded_fraction,
    }


def _buckets(choice: PlanChoice) -> str:
    count = len(choice.boundaries)
    return f"{count} bucket{'s' if count > 1 else ''}"


def _run_s(choice: PlanChoice) -> float:
    return choice.estimate.estimated_run_s


def _interval(padding: SampledPadding) -> str:
    return f"{padding.padding_fraction:.2%} +- {padding.half_width:.2%}"

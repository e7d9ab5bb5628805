"""Is variable length worth it for this data? The verdict, with its reason.

Source: the rule of thumb of the article that this product started from: fixed padding that wastes
more than 30 % of the tokens pays for the trouble of variable lengths, less than 20 % does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tuner.simulate.waste import LengthProfile

PAYS_ABOVE_PADDING_FRACTION = 0.30
FIXED_BELOW_PADDING_FRACTION = 0.20

Decision = Literal["variable_length", "fixed", "depends"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to do about the lengths, and why."""

    decision: Decision
    reason: str
    """Whole sentences, for people."""


def judge_lengths(profile: LengthProfile) -> Verdict:
    """Choose between fixed padding and variable lengths by the padding of the former."""
    padded_tokens = profile.num_samples * profile.longest
    padding_fraction = (padded_tokens - profile.total_tokens) / padded_tokens
    wasted = f"padding every row to the longest ({profile.longest} tokens) wastes "
    wasted += f"{padding_fraction:.1%} of the tokens"
    if padding_fraction > PAYS_ABOVE_PADDING_FRACTION:
        return Verdict(decision="variable_length", reason=_pays(profile, wasted))
    if padding_fraction < FIXED_BELOW_PADDING_FRACTION:
        limit = f"less than {FIXED_BELOW_PADDING_FRACTION:.0%}"
        return Verdict(
            decision="fixed",
            reason=f"Stay with fixed length: {wasted}, {limit}. More shapes would cost more "
            "compiling and memory than that.",
        )
    return Verdict(decision="depends", reason=_what_decides(profile, wasted, padding_fraction))


def _pays(profile: LengthProfile, wasted: str) -> str:
    limit = f"more than {PAYS_ABOVE_PADDING_FRACTION:.0%}"
    reason = f"Variable length pays: {wasted}, {limit}."
    random_padding = 1 - profile.fraction_of_random_batches
    if random_padding > PAYS_ABOVE_PADDING_FRACTION:
        reason += (
            f" Random batches of {profile.batch_size} padded to their own longest still waste "
            f"{random_padding:.1%}: group rows of like length."
        )
    return reason


def _what_decides(profile: LengthProfile, wasted: str, padding_fraction: float) -> str:
    return (
        f"It depends: {wasted}, between {FIXED_BELOW_PADDING_FRACTION:.0%} and "
        f"{PAYS_ABOVE_PADDING_FRACTION:.0%}. What decides is the length of the run: static graphs "
        f"cost a compile for each of their shapes once and save at most {padding_fraction:.1%} "
        "of each step's tokens. A long run or an epoch of many steps earns that back, a short one "
        "does not, nor does a device whose memory is too small for several shapes. `varseq-tune` "
        "measures both."
    )

"""What the advice says, and that its figure is a picture of the right points."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import skewed_tokens

from tuner.errors import BadInputError
from tuner.report.advice import (
    describe_gain,
    describe_sampling,
    format_advice,
    suggestion_values,
)
from tuner.report.figures import draw_waste
from tuner.simulate.advice import judge_lengths
from tuner.simulate.cost import default_cost_model
from tuner.simulate.histogram import LengthHistogram
from tuner.simulate.sampling import SampledPadding
from tuner.simulate.suggest import RunSetting, suggest_buckets
from tuner.simulate.waste import profile_lengths

HISTOGRAM = LengthHistogram.from_tokens(np.array(skewed_tokens(3000, longest=1000)))


def suggest(histogram=HISTOGRAM, epochs=3, **more):
    cost = default_cost_model()
    setting = RunSetting(tokens_per_batch=8192, epochs=epochs, cost=cost, **more)
    return suggest_buckets(histogram, setting)


@pytest.fixture(scope="module")
def suggestion():
    return suggest()


def test_the_gain_is_told_with_its_run(suggestion):
    text = describe_gain(suggestion)
    assert f"{suggestion.gain:.2f} times the real tokens a second" in text
    assert f"ahead from step {suggestion.best.break_even.steps:,} on" in text
    assert "over 3 epochs" in text
    assert "over 1 epoch," in describe_gain(suggest(epochs=1))


def test_where_nothing_is_gained_it_says_so():
    same = LengthHistogram.from_tokens(np.full(50, 64))
    assert "no number of buckets trains faster" in describe_gain(suggest(same))


def test_the_tables_hold_the_whole_curve_and_mark_the_suggestion(suggestion):
    verdict = judge_lengths(profile_lengths(HISTOGRAM, 16))
    text = format_advice(verdict, suggestion)
    curve = [line for line in text.splitlines() if line.split()[1:2] in (["bucket"], ["buckets"])]
    curve = [line for line in curve if line[0].isdigit()]
    assert len(curve) == len(suggestion.curve)
    for line, choice in zip(curve, suggestion.curve, strict=True):
        assert f"{choice.plan.padding_fraction:.1%}" in line
        assert f"{choice.plan.num_steps:,}" in line
        assert ("<- suggested" in line) == (choice is suggestion.best)
    assert verdict.reason in text
    assert (
        f"num_buckets: {len(suggestion.best.boundaries)}, align: {suggestion.best.align}" in text
    )
    assert suggestion.setting.cost.source in text
    assert max(map(len, text.removeprefix(verdict.reason).splitlines())) < 160


def test_the_loss_from_slabs_is_told_where_there_are_any(suggestion):
    verdict = judge_lengths(profile_lengths(HISTOGRAM, 16))
    assert "slab" not in format_advice(verdict, suggestion)
    assert suggestion_values(suggestion)["slabs"] is None
    in_slabs = suggest(rows_per_slab=1200)
    text = format_advice(verdict, in_slabs)
    assert "With at most 1,200 rows planned at a time" in text
    assert f"{in_slabs.slab_loss.text}.\n" in text and in_slabs.slab_loss.num_slabs == 3
    assert "tokens_per_batch: 8192, rows_per_slab: 1200}" in text
    values = suggestion_values(in_slabs)["slabs"]
    assert values["extra_padded_fraction"] == in_slabs.slab_loss.extra_padded_fraction != 0


def test_every_suggested_bucket_has_its_padding(suggestion):
    text = format_advice(judge_lengths(profile_lengths(HISTOGRAM, 16)), suggestion)
    table = text.split("Its batches:\n")[1].split("\n\n")[0].splitlines()[2:]
    plan = suggestion.best.plan
    assert [line.split()[0] for line in table] == [str(end) for end in suggestion.best.boundaries]
    for line, length in zip(table, suggestion.best.boundaries, strict=True):
        ((size, steps),) = [(b, n) for (b, end), n in plan.shape_counts.items() if end == length]
        padding = 1 - plan.real_tokens_of_shape[size, length] / (size * length * steps)
        assert line.split()[1:3] == [str(size), f"{steps:,}"]
        assert line.split()[-1] == f"{padding:.1%}"
    shown = suggestion_values(suggestion)["suggested"]["buckets"]
    assert sum(bucket["real_tokens"] for bucket in shown) == plan.real_tokens


def test_values_for_machines_are_those_of_the_suggestion(suggestion):
    values = suggestion_values(suggestion)
    assert values["suggested"]["boundaries"] == list(suggestion.best.boundaries)
    assert values["estimated_gain_over_fixed"] == suggestion.gain
    assert [item["num_buckets"] for item in values["curve"]] == list(
        range(1, len(suggestion.curve) + 1)
    )
    assert values["packed"]["num_shapes"] == 1


def test_the_error_of_a_sample_stands_beside_its_figure():
    text = describe_sampling(
        SampledPadding(padding_fraction=0.75, half_width=0.0123),
        SampledPadding(padding_fraction=0.05, half_width=0.001),
        1000,
        1_000_000,
    )
    assert "1,000 of 1,000,000 rows" in text
    assert "75.00% +- 1.23%" in text and "5.00% +- 0.10%" in text


def test_the_figure_is_a_picture_and_replaces_the_old_one(suggestion, tmp_path):
    path = tmp_path / "new" / "waste.png"
    for _ in range(2):
        draw_waste(suggestion, path)
        assert [file.name for file in path.parent.iterdir()] == ["waste.png"]
    from matplotlib import image

    pixels = image.imread(path)
    assert pixels.shape[0] > 500 and pixels.shape[1] > 500
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50


def test_a_figure_that_cannot_be_written_is_one_line(suggestion, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match=r"cannot write .*waste\.png") as caught:
        draw_waste(suggestion, tmp_path / "file" / "waste.png")
    assert "\n" not in str(caught.value)

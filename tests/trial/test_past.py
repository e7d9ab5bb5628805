"""What a trial measured, read back from its folder."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_case import measure

from tuner.trial.folder import TrialFolder
from tuner.trial.past import read_measured
from tuner.trial.record import to_json

ITEMS = (measure((8, 64), 0.5), measure((4, 32), 0.25, has_compiled=False))


@pytest.fixture
def folder(tmp_path):
    return TrialFolder(tmp_path)


def lines_of(items):
    return "".join(to_json(item) + "\n" for item in items)


def test_lines_come_back_in_their_order(folder):
    folder.measured.write_text(lines_of(ITEMS))
    assert read_measured(folder) == ITEMS


def test_a_trial_that_measured_nothing(folder):
    assert read_measured(folder) == ()
    folder.measured.write_text("")
    assert read_measured(folder) == ()


@pytest.mark.parametrize("end", [1, 20, -2])
def test_a_line_cut_off_by_a_kill_is_left_out(folder, end):
    folder.measured.write_text(lines_of(ITEMS) + to_json(ITEMS[0])[:end])
    assert read_measured(folder) == ITEMS


def test_broken_bytes_are_left_out(folder):
    folder.measured.write_bytes(b"\xff\xfe\n" + lines_of(ITEMS).encode() + b"\x00{}\n")
    assert read_measured(folder) == ITEMS


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"steady_s":[', '"steady_s":[NaN,'),
        ('"steady_s":[', '"steady_s":[0.0,'),
        ('"first_call_s":', '"first_call_s":-'),
        ('"batch_size":8', '"batch_size":0'),
    ],
)
def test_what_cannot_be_true_is_left_out(folder, old, new):
    good = to_json(ITEMS[0])
    assert old in good
    folder.measured.write_text(good.replace(old, new) + "\n" + lines_of(ITEMS[1:]))
    assert read_measured(folder) == ITEMS[1:]


def test_a_shape_told_again_has_its_last_figures_at_its_first_place(folder):
    again = replace(ITEMS[0], steady_s=(*ITEMS[0].steady_s, 9.0))
    folder.measured.write_text(lines_of((*ITEMS, again)))
    assert read_measured(folder) == (again, *ITEMS[1:])

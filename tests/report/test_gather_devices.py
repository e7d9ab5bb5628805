"""Several devices in the report and the summary, against plans and costs counted anew."""

from __future__ import annotations

import dataclasses

import pytest
from result_case import ALL, HIDDEN, confirmed, context_of, measured_result, result_setup
from strategies import skewed_tokens
from study_case import make_setup
from test_html import Page

from tuner.batching.plan import plan_batches
from tuner.report.contents import Absent
from tuner.report.device_table import DEVICE_HEADERS, device_rows
from tuner.report.gather import gather_contents
from tuner.report.gather_devices import describe_stragglers, gather_devices
from tuner.report.html import format_html
from tuner.report.study import summary_text
from tuner.simulate.measurement import CostKey
from tuner.simulate.stragglers import StragglerCost
from tuner.trial.fake import FakeRunner


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return result_setup(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def searched(setup):
    return measured_result(setup)


def line_of(**changes):
    line = StragglerCost(
        world_size=8,
        num_batches=800,
        mean_step_s=0.5,
        slowest_step_s=2.0,
        same_shape_num_steps=110,
        same_shape_step_s=0.5,
        filler_fraction=0.08,
    )
    return dataclasses.replace(line, **changes)


class TestGather:
    def test_lines_are_of_the_best_config_and_its_device(self, searched, setup):
        devices = gather_devices(searched, setup)
        config = searched.best.outcome.config
        key = CostKey.of(config, setup.installation.device)
        assert [line.world_size for line in devices.lines] == [8, 64, 512]
        for line in devices.lines:
            plan = plan_batches(setup.data.lengths, config, world_size=line.world_size)
            counts = plan.shape_counts()
            seconds = sum(steps * HIDDEN.step_s(shape, key) for shape, steps in counts.items())
            assert line.same_shape_epoch_s == pytest.approx(seconds, rel=1e-3)
            assert line.filler_fraction == pytest.approx((plan.rows_per_slot == 0).mean())
        alone = plan_batches(setup.data.lengths, config).shape_counts()
        slowest_s = max(HIDDEN.step_s(shape, key) for shape in alone)
        assert devices.lines[-1].slowest_step_s == pytest.approx(slowest_s, rel=1e-3)

    def test_the_note_says_what_it_rests_on_and_how_long_hccl_must_wait(self, searched, setup):
        devices = gather_devices(searched, setup)
        assert devices.note.startswith("Simulated from the cost model fitted on one device")
        assert "communication" in devices.note and "left out" in devices.note
        # A few seconds of compiles on the made-up device: the defaults are long enough.
        assert searched.best.outcome.estimate.estimated_compile_s < 200.0
        assert "HCCL_CONNECT_TIMEOUT=600 HCCL_EXEC_TIMEOUT=1836" in devices.note
        num_batches = devices.lines[0].num_batches
        few = [str(size) for size in (8, 64, 512) if num_batches < size]
        assert few and f"So of {' and '.join(few)} devices some" in devices.note

    def test_rows_enough_for_all_have_no_word_about_it(self, setup, tmp_path):
        tokens = skewed_tokens(20_000, longest=256)
        large = make_setup(tmp_path, tokens, setup.space, base={"batching.tokens_per_batch": 512})
        devices = gather_devices(measured_result(large, [(None, {})]), large)
        assert devices.lines[0].num_batches >= 512
        assert "nothing to do" not in devices.note
        assert devices.verdict.startswith("On 512 devices")

    def test_random_batches_have_a_word_of_their_own(self, setup):
        result = measured_result(setup, [ALL[1]])
        told = gather_devices(result, setup).verdict
        assert "take as long" in told and told.endswith("buckets and packed rows do not.")

    def test_without_a_best_config_there_is_nothing_to_simulate(self, setup):
        assert gather_devices(measured_result(setup, []), setup) == Absent()
        failing = FakeRunner(HIDDEN, fails=lambda config: ("oom", "9.10 GB"))
        assert gather_devices(measured_result(setup, ALL[:2], failing), setup) == Absent()


class TestWords:
    def test_equal_shapes_that_pay(self):
        """100 steps of 2 s against 110 of 0.5 s: 200 / 55."""
        assert describe_stragglers([line_of()]).replace("\xa0", " ") == (
            "On 8 devices that take other shapes, 75.0 % of the time would be lost to waiting "
            "for the slowest. The same shape on all of them, as every plan here has it, would be "
            "3.64 times as fast, 8.0 % of its rows being fillers."
        )

    def test_equal_shapes_that_do_not(self):
        told = describe_stragglers([line_of(same_shape_num_steps=500)])
        assert "would not be faster (0.80 times as fast)" in told and "Fewer devices" in told

    def test_equal_shapes_that_take_as_long(self):
        """200 s against 400 steps of 0.5 s."""
        told = describe_stragglers([line_of(same_shape_num_steps=400)])
        assert "as every plan here has it, would take as long, 8.0" in told

    def test_steps_of_one_length_wait_for_nobody(self):
        """50 s against 110 steps of 0.5 s."""
        told = describe_stragglers([line_of(slowest_step_s=0.5)])
        assert told.startswith("All steps take the same time, so of 8 devices none waits")
        assert "is 0.91 times as fast" in told

    def test_are_of_the_most_devices_that_have_batches(self):
        lines = [line_of(world_size=size) for size in (8, 64, 512)]
        assert describe_stragglers(lines).startswith("On 512 devices")
        few = [dataclasses.replace(line, num_batches=100) for line in lines]
        assert describe_stragglers(few).startswith("On 64 devices")
        fewest = [dataclasses.replace(line, num_batches=3) for line in lines]
        assert describe_stragglers(fewest).startswith("On 8 devices")

    def test_a_row_of_the_table(self):
        (row,) = device_rows([line_of(world_size=512)])
        assert [cell.replace("\xa0", " ") for cell in row] == [
            "512", "500 ms", "2 s", "75.0 %", "4 s", "500 ms", "8.0 %", "55 s", "0.07 x",
        ]  # fmt: skip
        assert len(set(DEVICE_HEADERS)) == len(DEVICE_HEADERS) == len(row)


class TestPages:
    def test_the_report_has_the_table(self, searched, setup):
        text = format_html(gather_contents(searched, setup, context_of(setup)))
        told = Page(text).text.replace("\xa0", " ")
        part = told[told.index("Several devices On ") :]
        devices = gather_devices(searched, setup)
        for row in device_rows(devices.lines):
            assert " ".join(row).replace("\xa0", " ") in part
        assert "Simulated from the cost model" in part
        given = gather_contents(searched, setup, context_of(setup), devices)
        assert given.devices is devices
        assert gather_contents(searched, setup, context_of(setup)).devices == devices

    def test_the_summary_has_the_table(self, searched, setup):
        devices = gather_devices(searched, setup)
        text = summary_text(searched, context_of(setup), devices)
        part = text[text.index("Several devices. On ") :].split("\n\n")[0]
        assert "\xa0" not in text
        lines = part.splitlines()
        assert lines[1].split("  ")[0] == "ranks"
        assert [line.split()[0] for line in lines[3:6]] == ["8", "64", "512"]
        assert lines[6].startswith("Simulated from the cost model fitted on one device")

    def test_the_summary_without_it_has_no_such_part(self, setup):
        result = measured_result(setup, [])
        assert "Several devices" not in summary_text(
            result, context_of(setup), gather_devices(result, setup)
        )

    def test_a_confirmed_winner_is_the_one_that_is_simulated(self, searched, setup):
        chosen = confirmed(searched, {"trial 5": [1.0, 1.0], "trial 4": [2.0, 2.0]})
        assert chosen.best.number == 5 and searched.best.number == 4
        assert gather_devices(chosen, setup) != gather_devices(searched, setup)

"""What the pages of a study say, on outcomes made by hand."""

from __future__ import annotations

import csv
import dataclasses
import io
from typing import Any

import pytest
from strategies import make_config

from tuner.report.study import (
    CSV_COLUMNS,
    StudyContext,
    describe_config,
    failure_lines,
    report_markdown,
    summary_text,
    trials_csv,
)
from tuner.simulate.estimate import Estimate
from tuner.study.outcome import NumberedOutcome, Outcome

CONTEXT = StudyContext(
    data_path="/data/chat.mindrecord",
    num_samples=10_162,
    longest=512,
    device="CPU",
    versions={"mindspore": "2.10.0", "numpy": "1.26.4"},
    notes=("jit_level O1 not tried", "no --config: a small decoder"),
    command="varseq-tune --data chat.mindrecord --trials 60",
    best_config_path="results/best.yaml",
)
TABLE_RULE = [{"multiple": 8, "up_to": 128}, {"multiple": 64}]


def measured(number: int, tokens_per_s: float, changes: dict[str, Any]) -> NumberedOutcome:
    """A run of 120,000 real tokens."""
    return NumberedOutcome(
        number=number,
        outcome=Outcome(
            config=make_config({"train.epochs": 3, **changes}),
            status="ok",
            reason="",
            num_measured_shapes=2,
            shapes=((8, 512), (32, 128)),
            effective_token_fraction=0.75,
            num_steps=321,
            length_autocorrelation=-0.015625,
            estimate=Estimate(
                estimated_run_s=120_000 / tokens_per_s,
                estimated_run_error_s=1.5,
                estimated_compile_s=12.5,
                estimated_real_tokens_per_s=tokens_per_s,
                estimated_steady_real_tokens_per_s=tokens_per_s * 1.25,
                measured_time_fraction=1.0,
                max_fit_error=0.01,
                estimated_peak_bytes=2.5e9,
            ),
            peak_bytes=2_340_000_000,
            memory_kind="resident set of the process",
            wall_s=41.5,
        ),
    )


def failed(number: int, status: str, reason: str, changes: dict[str, Any]) -> NumberedOutcome:
    whole = measured(number, 1.0, changes).outcome
    lost = dataclasses.replace(whole, status=status, reason=reason, estimate=None)
    return NumberedOutcome(number=number, outcome=lost)


FIXED = measured(0, 400.0, {"batching.strategy": "fixed"})
SLOWER_FIXED = measured(3, 320.0, {"batching.strategy": "fixed", "batching.align": 64})
BUCKETED = measured(
    4,
    1000.0,
    {
        "batching.strategy": "bucketed",
        "batching.boundaries": [128, 512],
        "batching.align": TABLE_RULE,
        "batching.tokens_per_batch": 4096,
        "train.tokens_per_update": 4096,
    },
)
OOM = failed(1, "oom", "9.10 GB, over the limit of 8.00 GB", {"batching.strategy": "dynamic"})
ODD = failed(7, "crashed", 'ValueError: a | b, "c"\tü', {"graph.mode": "dynamic"})
ALL = (FIXED, OOM, SLOWER_FIXED, BUCKETED, ODD)
NOTHING = (OOM, ODD)


class TestCsv:
    def rows(self, outcomes: tuple[NumberedOutcome, ...]) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(trials_csv(outcomes))))

    def test_has_a_line_for_each_trial_by_number(self):
        rows = self.rows(ALL)
        assert [row["trial"] for row in rows] == ["0", "1", "3", "4", "7"]
        assert all(tuple(row) == CSV_COLUMNS for row in rows)
        assert all(None not in row.values() for row in rows)

    def test_parses_back_to_the_figures(self):
        row = self.rows(ALL)[3]
        assert float(row["estimated_real_tokens_per_s"]) == 1000.0
        assert float(row["estimated_steady_real_tokens_per_s"]) == 1250.0
        assert float(row["estimated_run_s"]) == 120.0
        assert float(row["estimated_compile_s"]) == 12.5
        assert int(row["peak_bytes"]) == 2_340_000_000
        assert float(row["trial_wall_s"]) == 41.5
        assert (row["status"], row["strategy"], row["num_buckets"]) == ("ok", "bucketed", "2")
        assert (row["boundaries"], row["align"]) == ("128 512", "8<=128 64")
        assert (row["num_shapes"], row["num_steps_per_epoch"]) == ("2", "321")
        assert row["length_autocorrelation"] == "-0.015625"

    def test_a_failure_has_its_reason_and_empty_figures(self):
        row = self.rows(ALL)[4]
        assert (row["status"], row["reason"]) == ("crashed", 'ValueError: a | b, "c"\tü')
        assert row["estimated_real_tokens_per_s"] == row["estimated_run_s"] == ""

    def test_without_trials_is_a_header(self):
        assert trials_csv(()).strip() == ",".join(CSV_COLUMNS)


@pytest.mark.parametrize("page", [summary_text, report_markdown])
class TestBothPages:
    def test_name_the_best_and_its_figures(self, page):
        text = page(ALL, CONTEXT)
        assert (
            "Best of 5 trials: trial 4, bucketed 2, align 8<=128 64, 4096 tokens a batch, static "
            "graph, O0: 1,000 real tokens/s over a run of 3 epochs, compile time included"
        ) in text

    def test_hold_it_against_the_best_that_pads_to_the_longest(self, page):
        # 1000 / 400; in the table 1000, 400 and 320 over 400.
        text = page(ALL, CONTEXT)
        assert "2.50 times the best that pads to the longest (trial 0)" in text
        ratios = [
            line.replace("|", " ").split()[-2]
            for line in text.splitlines()
            if line.replace("|", " ").strip()[:1].isdigit() and "resident" not in line
            if line.replace("|", " ").split()[-1] == "2.34"
        ]
        assert ratios == ["2.50", "1.00", "0.80"]

    def test_say_so_where_padding_to_the_longest_is_the_fastest(self, page):
        text = page((FIXED, SLOWER_FIXED), CONTEXT)
        assert "padding everything to the longest is the fastest here" in text
        assert "times the best that pads" not in text

    def test_say_so_where_that_was_not_measured(self, page):
        text = page((BUCKETED,), CONTEXT)
        assert "; padding to the longest was not measured." in text

    def test_list_every_failure_with_its_reason(self, page):
        text = page(ALL, CONTEXT)
        assert "9.10 GB, over the limit of 8.00 GB" in text
        assert "oom" in text and "crashed" in text

    def test_end_with_the_next_commands(self, page):
        text = page(ALL, CONTEXT)
        assert "train it:      varseq-train --config results/best.yaml" in text
        assert "search longer: varseq-tune --data chat.mindrecord --trials 60" in text

    def test_of_a_study_without_failures_have_no_such_section(self, page):
        assert "failed" not in page((FIXED, BUCKETED), CONTEXT).lower()

    def test_speak_of_no_best_config_when_nothing_was_measured(self, page):
        text = page(NOTHING, CONTEXT)
        assert "No trial of 2 could be measured." in text
        assert "best.yaml" not in text and "varseq-train" not in text
        assert "9.10 GB, over the limit of 8.00 GB" in text
        assert "search longer: " in text

    def test_say_what_data_and_device(self, page):
        text = page(ALL, CONTEXT)
        assert (
            "/data/chat.mindrecord: 10162 rows, longest 512 tokens; CPU, MindSpore 2.10.0" in text
        )


class TestMarkdown:
    def test_states_assumptions_and_versions(self):
        text = report_markdown(ALL, CONTEXT)
        assert "- jit_level O1 not tried" in text
        assert "- no --config: a small decoder" in text
        assert "mindspore 2.10.0, numpy 1.26.4" in text

    def test_describes_the_best_config(self):
        text = report_markdown(ALL, CONTEXT)
        best = text[text.index("## The best config") : text.index("## Trials")]
        cells = {
            line.split("|")[1].strip(): line.split("|")[2].strip()
            for line in best.splitlines()
            if line.startswith("|")
        }
        assert cells["boundaries (tokens)"] == "128, 512"
        assert cells["shapes (B x L)"] == "8 x 512, 32 x 128"
        assert cells["effective token fraction, exact"] == "0.7500"
        assert cells["estimated run seconds"] == "120.0"

    def test_every_line_of_a_table_has_its_columns(self):
        """A reason may hold the character that parts the columns."""
        text = report_markdown(ALL, CONTEXT)
        section = text[text.index("## Failed trials") : text.index("## How")]
        lines = [line for line in section.splitlines() if line.startswith("|")]
        assert len(lines) == 4
        assert {line.replace("\\|", "").count("|") for line in lines} == {5}
        assert "a \\| b" in section


def test_failure_lines_are_one_a_trial():
    assert failure_lines(ALL) == (
        "trial 1: oom: 9.10 GB, over the limit of 8.00 GB\n"
        'trial 7: crashed: ValueError: a | b, "c"\tü'
    )


def test_a_config_in_words():
    config = make_config({"batching.strategy": "dynamic", "graph.mode": "dynamic"})
    assert describe_config(config) == "dynamic, align 8, 4096 tokens a batch, dynamic graph, O0"

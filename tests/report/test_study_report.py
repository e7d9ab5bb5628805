"""What the summary and the table of a study say."""

from __future__ import annotations

import csv
import dataclasses
import io
import shlex

import pytest
from result_case import (
    ALL,
    EPOCHS,
    HIDDEN,
    TOKENS,
    confirmed,
    context_of,
    measured_result,
    result_setup,
    with_failure,
)
from strategies import make_config

from tuner.report.study import (
    CSV_COLUMNS,
    describe_config,
    failure_lines,
    next_commands,
    summary_text,
    trials_csv,
)
from tuner.study.baselines import PAD_TO_LONGEST, RANDOM_BATCHES, TEN_QUANTILES
from tuner.study.outcome import PrecisionCheck
from tuner.trial.fake import FakeRunner

REASON = 'ValueError: a | b, "c"\tü'
ROUNDS = {
    "trial 4": [100.0, 102.0],
    PAD_TO_LONGEST: [200.0, 205.0],
    TEN_QUANTILES: [120.0, 121.0],
}


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return result_setup(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def searched(setup):
    return with_failure(measured_result(setup), 1, "crashed", REASON)


@pytest.fixture(scope="module")
def context(setup):
    return context_of(setup)


class TestCsv:
    def rows(self, result):
        return list(csv.DictReader(io.StringIO(trials_csv(result.outcomes))))

    def test_has_a_line_for_each_trial_by_number(self, searched):
        rows = self.rows(searched)
        assert [row["trial"] for row in rows] == [str(number) for number in range(7)]
        assert all(tuple(row) == CSV_COLUMNS for row in rows)
        assert all(None not in row.values() for row in rows)

    def test_parses_back_to_the_figures(self, searched):
        row, outcome = self.rows(searched)[5], searched.outcomes[5].outcome
        estimate = outcome.estimate
        for name, value in vars(estimate).items():
            assert float(row[name]) == pytest.approx(value, rel=1e-6)
        assert (row["status"], row["strategy"], row["num_buckets"]) == ("ok", "bucketed", "4")
        assert row["boundaries"] == " ".join(map(str, outcome.config.batching.boundaries))
        assert (row["compute_dtype"], row["fp32_ops"], row["baseline"]) == ("fp32", "", "")
        assert int(row["num_shapes"]) == 4
        assert int(row["num_new_measured_shapes"]) == len(outcome.measured) < 4
        assert int(row["num_steps_per_epoch"]) == outcome.figures.num_steps
        assert float(row["finished_at_s"]) == outcome.finished_at_s
        assert row["loss_deviation"] == row["precision_violation"] == ""

    def test_a_failure_has_its_reason_and_empty_figures(self, searched):
        row = self.rows(searched)[1]
        assert (row["status"], row["reason"]) == ("crashed", REASON)
        assert row["baseline"] == RANDOM_BATCHES
        assert row["estimated_real_tokens_per_s"] == row["estimated_run_s"] == ""

    def test_has_the_check_of_a_precision(self, searched):
        check = PrecisionCheck(
            loss_deviation=0.001, gradient_deviation=None, num_nonfinite=3, violation=0.5
        )
        low = {"precision.compute_dtype": "fp16", "precision.fp32_ops": ["softmax", "loss"]}
        outcome = dataclasses.replace(
            searched.outcomes[0].outcome, precision=check, config=make_config(low)
        )
        item = dataclasses.replace(searched.outcomes[0], outcome=outcome)
        row = self.rows(dataclasses.replace(searched, outcomes=(item,)))[0]
        assert (row["loss_deviation"], row["gradient_deviation"]) == ("0.001", "")
        assert (row["num_nonfinite"], row["precision_violation"]) == ("3", "0.5")
        assert (row["compute_dtype"], row["fp32_ops"]) == ("fp16", "softmax loss")

    def test_without_trials_is_a_header(self):
        assert trials_csv(()).strip() == ",".join(CSV_COLUMNS)


class TestSummary:
    def test_begins_with_data_verdict_and_best(self, searched, context):
        lines = summary_text(confirmed(searched, ROUNDS), context).split("\n\n")
        assert lines[0] == (
            f"/data/chat.mindrecord: {len(TOKENS)} rows, longest {max(TOKENS)} tokens; CPU, "
            "MindSpore 2.10.0"
        )
        assert lines[1].startswith("Yes: training with 8 buckets (trial 4) is 2.0")
        speed = searched.outcomes[4].outcome.real_tokens_per_s
        assert lines[2] == (
            "Best of 7 trials: trial 4, bucketed 8, align 8, 2048 tokens a batch, static graph, "
            f"O0: {speed:,.0f} real tokens/s over a run of {EPOCHS} epochs, compile time "
            "included."
        )

    def test_tables_the_confirmation(self, searched, context):
        failed = {"trial 5": ("oom", "over the limit")}
        text = summary_text(confirmed(searched, ROUNDS, failed), context)
        part = text[text.index("Measured again in 2 rounds. trial 4 wins beyond noise") :]
        rows = part.splitlines()[3:7]
        assert [row.split("  ")[0] for row in rows] == [
            "trial 4", TEN_QUANTILES, PAD_TO_LONGEST, "trial 5",
        ]  # fmt: skip
        ratio = (100 * 102 / (120 * 121)) ** 0.5
        assert f"{ratio:.3f}" in rows[1] and " to " in rows[1]
        assert rows[0].endswith("<- taken")
        assert "oom" in rows[3] and rows[3].endswith("over the limit")

    def test_one_round_has_no_intervals(self, searched, context):
        one = {name: rounds[:1] for name, rounds in ROUNDS.items()}
        text = summary_text(confirmed(searched, one), context)
        assert "Measured again in 1 round. One round says nothing about noise" in text
        assert "inf" not in text.split() and "not known" in text

    def test_without_a_confirmation_there_is_no_such_table(self, searched, context):
        text = summary_text(searched, context)
        assert "Not confirmed: by the estimates" in text and "Measured again" not in text

    def test_tables_all_baselines_and_the_ten_best(self, setup, context):
        many = [(None, {"batching.num_buckets": count}) for count in range(2, 15)]
        result = measured_result(setup, [ALL[0], *many])
        text = summary_text(result, context)
        table = text[text.index("trials, by estimates") :].split("\n\n")[0].splitlines()
        speeds = {item.number: item.outcome.real_tokens_per_s for item in result.outcomes}
        best = sorted(list(speeds)[1:], key=lambda number: -speeds[number])[:10]
        assert [int(line.split()[0]) for line in table[3:]] == [*best, 0]
        assert "3 slower ones are in trials.csv" in table[0]
        assert table[-1].split("  ")[-1].strip() and "pad to the longest: fixed" in table[-1]

    def test_lists_every_failure_with_its_reason(self, searched, context):
        text = summary_text(searched, context)
        part = text[text.index("trials that failed or were stopped") :]
        assert "218 static shapes, over max_static_shapes 32" in part
        assert "crashed" in part and 'ValueError: a | b, "c"' in part
        whole = measured_result_without_failures(searched)
        assert "failed" not in summary_text(whole, context)

    def test_of_nothing_has_no_best_config(self, setup, context):
        result = measured_result(
            setup, ALL[:2], FakeRunner(HIDDEN, fails=lambda config: ("oom", "9.10 GB"))
        )
        text = summary_text(result, context)
        assert "Not known: none of 2 trials could be measured." in text
        assert "best.yaml" not in text and "varseq-train" not in text
        assert "9.10 GB" in text and "search longer:" in text
        assert "cost_model.yaml" not in text


def measured_result_without_failures(result):
    whole = [item for item in result.outcomes if item.outcome.status == "ok"]
    return dataclasses.replace(result, outcomes=tuple(whole))


class TestNextCommands:
    def commands(self, result, context):
        return dict(next_commands(result, context))

    def test_are_whole_command_lines(self, searched, context):
        commands = self.commands(searched, context)
        assert commands == {
            "train it": "varseq-train --config results/best.yaml",
            "search longer": "varseq-tune --data chat.mindrecord --trials 60",
            "read the report": "results/report.html",
            "look at the trials in a browser": "optuna-dashboard sqlite:///results/study.db",
            "rank the space without a device": (
                "varseq-tune --data chat.mindrecord --trials 60 "
                "--cost-model results/cost_model.yaml --dry-run"
            ),
        }
        assert summary_text(searched, context).count("varseq-t") == 3

    def test_paths_with_spaces_are_one_word(self, searched, context):
        spaced = dataclasses.replace(context, best_config_path="my results/best.yaml")
        for name, command in next_commands(searched, spaced):
            if name != "read the report":
                words = shlex.split(command)
                assert not [word for word in words if word.startswith("results/")]

    @pytest.mark.parametrize(
        ("storage", "told"),
        [
            ("journal:/shared/study.log", "/shared/study.log"),
            ("/shared/study.db", "sqlite:////shared/study.db"),
            ("postgresql://tuner:hush@db/studies", "'postgresql+psycopg2://tuner:***@db/studies'"),
            ("mysql://tuner:hush@db/studies", "'mysql+pymysql://tuner:***@db/studies'"),
        ],
    )
    def test_show_the_dashboard_of_any_storage(self, searched, context, storage, told):
        elsewhere = dataclasses.replace(context, storage=storage)
        commands = self.commands(searched, elsewhere)
        assert commands["look at the trials in a browser"] == f"optuna-dashboard {told}"


def test_failure_lines_are_one_a_trial(searched):
    assert failure_lines(searched.outcomes) == (
        f"trial 1: crashed: {REASON}\n"
        "trial 6: refused: 218 static shapes, over max_static_shapes 32"
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"batching.strategy": "dynamic", "graph.mode": "dynamic"},
            "dynamic, align 8, 4096 tokens a batch, dynamic graph, O0",
        ),
        (
            {
                "batching.strategy": "fixed",
                "batching.tokens_per_batch": None,
                "batching.samples_per_batch": 4,
                "batching.align": [{"multiple": 8, "up_to": 128}, {"multiple": 64}],
                "precision.compute_dtype": "fp16",
                "precision.fp32_ops": ["softmax", "loss"],
            },
            "fixed, align 8<=128 64, 4 rows a batch, static graph, O0, fp16+softmax+loss",
        ),
        (
            {
                "batching.boundaries": [64, 128],
                "batching.batch_sizes": [8, 4],
                "batching.tokens_per_batch": None,
            },
            "bucketed 2, align 8, 8 4 rows a batch, static graph, O0",
        ),
    ],
)
def test_a_config_in_words(changes, told):
    assert describe_config(make_config(changes)) == told

"""Stored rows whose columns do not fit together, found before a run and without reading all."""

from __future__ import annotations

import itertools

import numpy as np
from machine_case import host
from strategies import make_config

from tuner.data.mindrecord import MindRecordWriter, RowSchema
from tuner.data.record_files import open_mindrecord
from tuner.diagnose.config_check import check_config
from tuner.diagnose.row_check import TIME_LIMIT_S, check_rows

ARRAY = {"type": "int32", "shape": [-1]}
SCHEMA = RowSchema(
    columns={
        "input_ids": ARRAY, "labels": ARRAY, "attention_mask": ARRAY, "token_type_ids": ARRAY,
        "weights": ARRAY, "text": {"type": "string"},
    }
)  # fmt: skip


def stored(length=5, **changes):
    """A sound row with other columns in it; `weights` is named like none that has one a token."""
    ones = np.ones(length, np.int32)
    columns = {
        "input_ids": ones, "labels": ones, "attention_mask": ones, "token_type_ids": 0 * ones,
        "weights": ones[:2], "text": "x",
    }  # fmt: skip
    return columns | {name: np.array(values, np.int32) for name, values in changes.items()}


def written(path, rows, **changes):
    with MindRecordWriter(path, description={}, schema=SCHEMA) as writer:
        writer.write(rows)
    return make_config({"data.path": str(path), "model.vocab_size": 10, **changes})


def looked_at(config, **options):
    findings = check_rows(open_mindrecord(config.data.path), config, **options)
    return {finding.name: finding for finding in findings}


def test_rows_that_fit_are_told_with_the_columns(tmp_path):
    config = written(tmp_path / "rows.mindrecord", [stored(length) for length in (5, 1, 3)])
    [(name, finding)] = looked_at(config).items()
    assert (name, finding.severity) == ("config-rows", "ok")
    assert finding.what == (
        "input_ids, labels, attention_mask, token_type_ids fit together (rows looked at: 3)"
    )


def test_a_mask_one_short_is_named_with_its_row_by_the_check_of_a_config(tmp_path):
    rows = [stored(), stored(attention_mask=[1] * 4), stored(attention_mask=[1] * 6)]
    config = written(tmp_path / "rows.mindrecord", rows)
    named = {one.name: one for one in check_config(config, host(), "CPU", {})}
    finding = named["column-length"]
    assert finding.severity == "warning"
    assert finding.what == (
        "row 1: attention_mask has 4 values, input_ids has 5 (2 of 3 rows looked at)"
    )
    assert "together" in finding.fix and "does not read" in finding.why
    # Where MindSpore does not start no row can be read.
    without = {one.name for one in check_config(config, host(), None, {})}
    assert "config-data" in without and not without & {"column-length", "config-rows"}


def test_every_rule_has_a_finding_and_what_ends_a_run_is_an_error(tmp_path):
    rows = [
        stored(attention_mask=[1] * 4, token_type_ids=[0]),
        stored(labels=[1] * 4),
        stored(input_ids=[1, 2, 3, 4, 10]),
        stored(attention_mask=[1, 1, 1, 0, 0]),
        stored(attention_mask=[1, 1, 2, 1, 1]),
    ]
    found = looked_at(written(tmp_path / "rows.mindrecord", rows))
    assert {name: one.severity for name, one in found.items()} == {
        "column-length": "warning",
        "labels-length": "error",
        "outside-vocabulary": "error",
        "row-is-padded": "warning",
        "mask-values": "warning",
    }
    assert found["column-length"].what.startswith(
        "row 0: attention_mask has 4 values, input_ids has 5; row 0: token_type_ids has 1 values"
    )
    assert "trained on" in found["row-is-padded"].why
    assert all(one.what.endswith("(1 of 5 rows looked at)") for one in found.values())


def test_rows_are_spread_evenly_and_bounded_in_number(tmp_path):
    """Of 90 rows 10: the first, the last and every tenth or so between."""
    rows = [stored(labels=[1] * 4) for _ in range(90)]
    config = written(tmp_path / "rows.mindrecord", rows)
    finding = looked_at(config, most_rows=10)["labels-length"]
    assert finding.what.startswith("row 0: ") and "(10 of 10 rows looked at)" in finding.what
    config = written(
        tmp_path / "few.mindrecord",
        [stored(labels=[1] * (4 if row in (0, 9, 89) else 5)) for row in range(90)],
    )
    assert "(3 of 10 rows" in looked_at(config, most_rows=10)["labels-length"].what


def test_no_row_is_read_once_the_time_is_up(tmp_path):
    config = written(tmp_path / "rows.mindrecord", [stored() for _ in range(20)])
    clock = itertools.count(0.0, TIME_LIMIT_S / 4)
    found = looked_at(config, clock=lambda: next(clock))
    # Past the limit at the fifth look after the start.
    assert "(rows looked at: 5)" in found["config-rows"].what


def test_a_config_without_labels_needs_none(tmp_path):
    config = written(tmp_path / "rows.mindrecord", [stored()], **{"data.label_column": None})
    assert looked_at(config)["config-rows"].what.startswith("input_ids, attention_mask")


def test_a_number_a_row_is_no_column_of_tokens_whatever_its_name(tmp_path):
    columns = {"input_ids": ARRAY, "labels": ARRAY, "group_ids": {"type": "int32"}}
    path = tmp_path / "rows.mindrecord"
    ids = np.ones(3, np.int32)
    with MindRecordWriter(path, description={}, schema=RowSchema(columns=columns)) as writer:
        writer.write([{"input_ids": ids, "labels": ids, "group_ids": 7}])
    [finding] = looked_at(make_config({"data.path": str(path)})).values()
    assert finding.what.startswith("input_ids, labels fit together (rows looked at: 1)")

"""Ranks of a real msrun on this machine train what one process trains on all their batches."""

from __future__ import annotations

import json

import numpy as np
import pytest
from launched_case import (
    LIMIT_S,
    Launched,
    can_bind,
    records,
    saved,
    trained_in_one_process,
    write_config,
)
from run_case import write_counting_rows

from tuner.config.codec import load_config

pytestmark = [pytest.mark.mindspore, pytest.mark.timeout(4 * LIMIT_S)]

STEPS = 30


def train_and_compare(folder, out, workers, device, **changes):
    """Run the command; its records, after its weights were compared with one process."""
    config = write_config(folder, out, **changes)
    with Launched(config, folder / out, workers) as run:
        # When all ranks have met, their server listens.
        run.until(lambda: run.is_at(0, "warm-up") or run.is_at(0, "step"), LIMIT_S)
        ports = run.listening_ports()
        assert run.wait(3 * LIMIT_S) == 0, run.tails()
        output = run.output
        assert run.leftovers() == []
        assert all(map(can_bind, ports))
    lines = records(folder / out)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    weights, losses, real_tokens = trained_in_one_process(
        load_config(str(config)), workers, STEPS, device
    )
    found = saved(folder / out, STEPS)
    for name, value in weights.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=1e-5)
    assert sum(line["real_tokens"] for line in lines) == real_tokens
    assert {line["recompiles"] for line in lines} == {0}
    return output


def test_two_ranks_train_what_one_process_does(tmp_path, device):
    write_counting_rows(tmp_path / "data.mindrecord", 61, (3, 17))
    output = train_and_compare(tmp_path, "two", 2, device, evaluation={
        "fraction": 0.1, "every_steps": 15})  # fmt: skip
    assert "Traceback" not in output
    # The first alone writes: one line for each evaluation, one table at the end.
    evaluations = (tmp_path / "two" / "evaluation.jsonl").read_text().splitlines()
    first, last = (json.loads(line)["step"] for line in evaluations)
    assert (first in (15, 16), last) == (True, STEPS)
    assert output.count("recompiles after warm-up") == 1
    assert not list((tmp_path / "two" / "ranks").glob("metrics*"))


@pytest.mark.slow
def test_four_ranks_train_what_one_process_does(tmp_path, device):
    write_counting_rows(tmp_path / "data.mindrecord", 121, (3, 17))
    train_and_compare(tmp_path, "four", 4, device)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_rows_that_divide_by_nothing_hang_nobody(tmp_path, device, workers):
    """101 rows, most of them short, a few long: a prime, and so are the rows of no bucket."""
    write_counting_rows(tmp_path / "data.mindrecord", 101, (2, 40), seed=5)
    train_and_compare(
        tmp_path, "skewed", workers, device,
        batching={"num_buckets": 4, "tokens_per_batch": 80, "align": 4},
    )  # fmt: skip

"""Evaluation against a decoder in NumPy, row by row; and that training does not feel it."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from numpy_decoder import decoder_logits, log_softmax
from strategies import make_config
from tiny_model import TINY_MODEL

from tuner.batching.plan import plan_batches
from tuner.config.override import override_config
from tuner.data.held_out import is_held_out, training_part
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import MindRecordWriter, open_mindrecord
from tuner.errors import BadInputError
from tuner.train.checkpoint import CheckpointFolder
from tuner.train.engine import Engine
from tuner.train.evaluation import Evaluation
from tuner.train.evaluation_rows import open_rows
from tuner.train.loop import Loop, RunParts
from tuner.train.metrics import EvaluationRecord
from tuner.train.run_log import RunLog
from tuner.train.state import TrainState

pytestmark = pytest.mark.mindspore

VOCAB = 23
NO_LABELS = -100
TINY = {**TINY_MODEL, "model.num_layers": 1, "evaluation.fraction": 0.4}


def make_rows(num_rows=40):
    """(ids, labels): of one token, without a label, with some, with all."""
    rng = np.random.default_rng(5)
    rows = []
    for number in range(num_rows):
        length = 16 if number == 0 else int(rng.integers(1, 17))
        ids = rng.integers(0, VOCAB, length).astype(np.int32)
        labels = ids.copy()
        if number % 4 == 1:
            labels[:] = NO_LABELS
        elif number % 4 == 2:
            labels[: length // 2] = NO_LABELS
        rows.append((ids, labels))
    return rows


ROWS = make_rows()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "data.mindrecord"
    with MindRecordWriter(path, description={"length_of": "input_ids"}) as writer:
        for ids, labels in ROWS:
            writer.write([{"input_ids": ids, "labels": labels, "length": len(ids)}])
    return open_mindrecord(path)


class Evaluated:
    """An engine and its evaluation, compiled."""

    def __init__(self, dataset, device, **changes):
        self.config = make_config({**TINY, "data.path": str(dataset.path), **changes})
        lengths = scan_lengths(dataset)
        self.dataset = dataset
        self.lengths = training_part(lengths, self.config.evaluation)
        self.plan = plan_batches(self.lengths, self.config)
        self.engine = Engine(self.config, device, max(n for _, n in self.plan.shapes))
        self.rows = open_rows(self.config, dataset, lengths, self.plan)
        self.evaluation = Evaluation(self.engine, self.rows)
        self.notices = []
        self.evaluation.warm_up(self.notices.append, lambda: False)
        self.held_out = np.flatnonzero(is_held_out(len(ROWS), self.config.evaluation)).tolist()

    def losses_of_rows(self):
        """row -> (summed loss, labels) by NumPy in float64, from the engine's own weights."""
        weights = {
            name: parameter.asnumpy().astype(np.float64)
            for name, parameter in self.engine.model.parameters_and_names()
        }
        found = {}
        for row in self.held_out:
            ids, labels = ROWS[row]
            logits = decoder_logits(ids[None], weights, self.config.model)[0]
            logs = log_softmax(logits)
            targets = labels[1:]
            counted = np.flatnonzero(targets != NO_LABELS)
            found[row] = (-sum(logs[place, targets[place]] for place in counted), len(counted))
        return found


BUCKETED = {
    "batching.num_buckets": 2,
    "batching.align": 8,
    "batching.tokens_per_batch": 64,
    "train.max_steps": 6,
    "train.epochs": 3,
    "train.tokens_per_update": 40,
    "optimizer.learning_rate": 0.02,
    "evaluation.every_steps": 1,
}


@pytest.fixture(scope="module")
def evaluated(dataset, device):
    return Evaluated(dataset, device, **BUCKETED)


def assert_is_numpys(record, losses, tolerance=1e-5):
    total = sum(loss for loss, _ in losses.values())
    labels = sum(count for _, count in losses.values())
    assert record.label_tokens == labels
    assert record.rows == sum(count > 0 for _, count in losses.values())
    assert record.loss == pytest.approx(total / labels, rel=tolerance)
    assert record.perplexity == pytest.approx(math.exp(total / labels), rel=10 * tolerance)
    start = 0
    for part in record.by_length:
        rows = [row for row in losses if start < len(ROWS[row][0]) <= part.up_to]
        counted = [losses[row] for row in rows if losses[row][1]]
        assert part.rows == len(counted)
        assert part.label_tokens == sum(count for _, count in counted)
        mean = sum(loss for loss, _ in counted) / part.label_tokens
        assert part.loss == pytest.approx(mean, rel=tolerance)
        start = part.up_to
    assert sum(part.label_tokens for part in record.by_length) == labels


def test_the_loss_is_that_of_every_row_by_itself(evaluated):
    record = evaluated.evaluation.run(7)
    assert record.step == 7
    assert record.seconds > 0
    assert_is_numpys(record, evaluated.losses_of_rows())
    assert [part.up_to for part in record.by_length] == [8, 16]
    again = evaluated.evaluation.run(7)
    assert dataclasses.replace(again, seconds=record.seconds) == record


def test_its_shapes_are_those_of_the_training_compiled_before_it(evaluated):
    shapes = evaluated.evaluation.shapes
    assert set(shapes) <= set(evaluated.plan.shapes)
    assert [f"[evaluation {n}/2]" in line for n, line in enumerate(evaluated.notices, 1)] == [
        True,
        True,
    ]
    assert evaluated.engine.recompiles.found == ()


def train(evaluated, folder, evaluate):
    """A whole run from the first weights; the bytes of all parameters and the losses."""
    import mindspore as ms

    engine = evaluated.engine
    if not hasattr(evaluated, "first"):
        for shape in evaluated.plan.shapes:
            engine.run_empty_step(shape)
        engine.run_empty_update()
        evaluated.first = [parameter.asnumpy().copy() for parameter in engine.parameters]
    for parameter, value in zip(engine.parameters, evaluated.first, strict=True):
        parameter.set_data(ms.Tensor(value))
    log = RunLog(folder, 0)
    parts = RunParts(
        config=evaluated.config,
        dataset=evaluated.dataset,
        lengths=evaluated.lengths,
        engine=engine,
        checkpoints=CheckpointFolder(folder / "checkpoints", 1),
        log=log,
        on_step=lambda record: None,
        on_notice=lambda line: None,
        stop_requested=lambda: False,
        evaluate=evaluate,
    )
    Loop(parts, TrainState(), evaluated.plan).run()
    log.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    weights = b"".join(parameter.asnumpy().tobytes() for parameter in engine.parameters)
    return weights, [line["loss"] for line in lines]


def test_training_has_the_same_bits_with_and_without_and_compiles_nothing(evaluated, tmp_path):
    alone = train(evaluated, tmp_path / "alone", None)
    graphs = evaluated.engine.num_graphs()
    found: list[EvaluationRecord] = []

    def evaluate(step):
        found.append(evaluated.evaluation.run(step))
        return found[-1].loss

    beside = train(evaluated, tmp_path / "beside", evaluate)
    assert beside == alone
    assert evaluated.engine.num_graphs() == graphs
    assert evaluated.engine.recompiles.found == ()
    assert found[-1].step == 6 and len(found) >= 3
    # It is of the weights at that time: every one differs, and the last is NumPy's.
    assert len({record.loss for record in found}) == len(found)
    assert_is_numpys(found[-1], evaluated.losses_of_rows())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"batching.strategy": "packed", "batching.align": 8},
            id="packed",
            marks=pytest.mark.slow,
        ),
        pytest.param({"batching.strategy": "fixed"}, id="fixed", marks=pytest.mark.slow),
        pytest.param(
            {"batching.strategy": "dynamic", "graph.mode": "dynamic"}, id="one_dynamic_graph"
        ),
    ],
)
def test_other_strategies_have_the_same_loss(dataset, device, changes):
    found = Evaluated(dataset, device, **{"batching.align": 4, **changes})
    record = found.evaluation.run(0)
    assert_is_numpys(record, found.losses_of_rows())
    assert len(record.by_length) > 1
    if changes.get("graph.mode") == "dynamic":
        assert len(found.evaluation.shapes) == 1 < len(found.rows.plan.shapes)
    assert found.engine.recompiles.found == ()


@pytest.mark.slow
def test_in_fp16_the_loss_is_near_and_computed_in_it(dataset, device):
    found = Evaluated(dataset, device, **{"precision.compute_dtype": "fp16"})
    record = found.evaluation.run(0)
    losses = found.losses_of_rows()
    assert_is_numpys(record, losses, tolerance=2e-2)
    exact = sum(loss for loss, _ in losses.values()) / record.label_tokens
    assert record.loss != pytest.approx(exact, rel=1e-6)


def test_a_cell_with_dropout_is_evaluated_without_and_trained_with_it(dataset, device):
    found = Evaluated(
        dataset,
        device,
        **{
            "model.factory": "evaluated_cells:dropping",
            "batching.strategy": "fixed",
            "batching.align": 16,
        },
    )
    (shape,) = found.plan.shapes
    before = found.evaluation.run(0)
    weights = {
        name: parameter.asnumpy().astype(np.float64)
        for name, parameter in found.engine.model.parameters_and_names()
    }
    table, out, bias = (
        next(value for name, value in weights.items() if key in name)
        for key in ("embedding_table", "out.weight", "out.bias")
    )
    total = labels = 0
    for row in found.held_out:
        ids, row_labels = ROWS[row]
        logs = log_softmax(table[ids] @ out.T + bias)
        for place, target in enumerate(row_labels[1:]):
            if target != NO_LABELS:
                total, labels = total - logs[place, target], labels + 1
    assert before.loss == pytest.approx(total / labels, rel=1e-5)
    batch_losses = {found.engine.run_step(batch_of(found, shape)) for _ in range(3)}
    # Half of the embedding is dropped, another half every time.
    assert len(batch_losses) == 3
    after = found.evaluation.run(0)
    assert after.loss == before.loss
    assert found.engine.run_step(batch_of(found, shape)) not in batch_losses
    found.engine.recompiles.arm(lambda line: None)
    found.evaluation.run(0)
    found.engine.run_step(batch_of(found, shape))
    assert found.engine.recompiles.found == ()


def batch_of(found, shape):
    from tuner.train.loader import Batch

    return Batch.full(shape, found.config)


def test_rows_of_a_set_of_their_own(dataset, tmp_path):
    path = tmp_path / "other.mindrecord"
    with MindRecordWriter(path, description={"length_of": "input_ids"}) as writer:
        for length in (3, 20, 5):
            ids = np.arange(length, dtype=np.int32) % VOCAB
            writer.write([{"input_ids": ids, "labels": ids, "length": length}])
    own = {"evaluation.fraction": None, "evaluation.path": str(path)}
    config = make_config({**TINY, **own, "data.path": str(dataset.path)})
    lengths = scan_lengths(dataset)
    plan = plan_batches(lengths, config)
    rows = open_rows(config, dataset, lengths, plan)
    assert rows.dataset.fingerprint != dataset.fingerprint
    assert rows.plan.num_rows == 3
    assert rows.plan.num_truncated == 1
    assert rows.config.data.path == str(path)

    def refused(changes, words):
        with pytest.raises(BadInputError, match=words):
            open_rows(override_config(config, changes), dataset, lengths, plan)

    refused({"data.overflow": "error"}, r"evaluation: data\.overflow is error and 1 rows")
    refused({"model.vocab_size": 4}, "other.mindrecord: row 1: .*vocabulary size 4")
    refused({"data.input_column": "tokens"}, "tokens")
    refused({"evaluation.path": str(tmp_path / "none")}, "none")


def test_few_rows_are_always_the_same(dataset):
    config = make_config({**TINY, "data.path": str(dataset.path), "evaluation.max_rows": 5})
    lengths = scan_lengths(dataset)
    plan = plan_batches(training_part(lengths, config.evaluation), config)
    chosen = [
        sorted(
            row
            for item in open_rows(config, dataset, lengths, plan).plan.classes
            for row in item.row_indices.tolist()
        )
        for _ in range(2)
    ]
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 5
    held_out = is_held_out(len(ROWS), config.evaluation)
    assert all(held_out[row] for row in chosen[0])

"""The order in which shapes are visited and timed, with an engine that only notes its calls."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.mindspore


class NotingEngine:
    """Compiles at every new shape, or once; has the loss that it is told for each shape."""

    def __init__(self, losses, *, is_one_graph=False):
        from tuner.train.device import Device

        self.device = Device(name="Ascend", memory_kind="")
        self.calls = []
        self._losses = losses
        self._is_one_graph = is_one_graph

    def num_graphs(self):
        return len(set(self.calls[:1] if self._is_one_graph else self.calls))

    def run_step(self, batch):
        self.calls.append(batch.shape)
        return self._losses[batch.shape]


def batches_of(*shapes):
    from tuner.train.loader import Batch

    return [
        Batch(
            input_ids_BT=np.zeros(shape, np.int32),
            targets_BT=np.zeros(shape, np.int32),
            real_tokens=10,
            label_tokens=5,
        )
        for shape in shapes
    ]


@pytest.fixture
def no_memory(monkeypatch):
    """There is no NPU whose memory could be read."""
    monkeypatch.setattr("tuner.trial.measure.memory_bytes", lambda _: 7)


LARGE, SMALL = (2, 40), (8, 8)


def test_all_are_visited_and_then_timed_in_turn(no_memory):
    from tuner.trial.measure import measure_shapes

    engine = NotingEngine({LARGE: 15.0, SMALL: 10.0})
    told = []
    found = measure_shapes(engine, batches_of(LARGE, SMALL), 3, told.append)
    # By hand: two calls of a new graph are not typical, the third is the first of three steps.
    assert engine.calls == [LARGE] * 3 + [SMALL] * 3 + [LARGE, SMALL] * 2
    assert [item.shape for item in told] == [LARGE, SMALL, LARGE, SMALL]
    assert [len(item.steady_s) for item in told] == [1, 1, 3, 3]
    assert tuple(told[2:]) == found
    assert [item.loss for item in found] == [3.0, 2.0]
    assert [len(item.settling_s) for item in found] == [1, 1]
    assert [(item.memory_bytes, item.added_bytes) for item in found] == [(7, 0)] * 2


def test_of_one_graph_only_the_first_shape_compiles(no_memory):
    from tuner.trial.measure import measure_shapes

    engine = NotingEngine({LARGE: 15.0, SMALL: 10.0}, is_one_graph=True)
    found = measure_shapes(engine, batches_of(LARGE, SMALL), 2, lambda _: None)
    assert [item.has_compiled for item in found] == [True, False]


@pytest.mark.parametrize(
    ("shapes", "call_s", "timed"),
    [
        # By hand: a shape is enough after its share of 15 s, or after 3 s; two steps at least.
        ((LARGE, SMALL), (4.0, 0.5), (2, 4)),
        ((LARGE,), (4.0,), (4,)),
        ((LARGE,), (2.0,), (8,)),
        (tuple((n, 8) for n in range(1, 8)), (1.0,) * 7, (3,) * 7),
        (tuple((n, 8) for n in range(1, 8)), (9.0,) * 7, (2,) * 7),
    ],
)
def test_long_steps_are_timed_a_few_times(no_memory, monkeypatch, shapes, call_s, timed):
    from tuner.trial import measure

    engine = NotingEngine(dict.fromkeys(shapes, 15.0))
    seconds, clock = dict(zip(shapes, call_s, strict=True)), [0.0]

    def run_step(batch, run=engine.run_step):
        clock[0] += seconds[batch.shape]
        return run(batch)

    engine.run_step = run_step
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    timed_steps = 4 if len(shapes) == 2 else 10
    found = measure.measure_shapes(engine, batches_of(*shapes), timed_steps, lambda _: None)
    assert tuple(len(item.steady_s) for item in found) == timed
    assert [set(item.steady_s) for item in found] == [{each} for each in call_s]


def test_a_loss_that_is_no_number_ends_it_and_what_is_known_is_told(no_memory):
    from tuner.trial.measure import DivergedError, measure_shapes

    told = []
    engine = NotingEngine({LARGE: 15.0, SMALL: float("nan")})
    with pytest.raises(DivergedError, match="the loss at B=8 L=8 is nan"):
        measure_shapes(engine, batches_of(LARGE, SMALL), 3, told.append)
    assert [item.shape for item in told] == [LARGE]
    assert engine.calls[-1] == SMALL and engine.calls.count(SMALL) == 1

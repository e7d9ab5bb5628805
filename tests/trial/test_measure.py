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
    from tuner.trial.measure import Steady, measure_shapes

    engine = NotingEngine({LARGE: 15.0, SMALL: 10.0})
    told = []
    found = measure_shapes(engine, batches_of(LARGE, SMALL), Steady(steps=3), told.append)
    # By hand: two calls of a new graph are not typical, the third is the first of three steps.
    assert engine.calls == [LARGE] * 3 + [SMALL] * 3 + [LARGE, SMALL] * 2
    assert [item.shape for item in told] == [LARGE, SMALL, LARGE, SMALL]
    assert [len(item.steady_s) for item in told] == [1, 1, 3, 3]
    assert tuple(told[2:]) == found
    assert [item.loss for item in found] == [3.0, 2.0]
    assert [len(item.settling_s) for item in found] == [1, 1]
    assert [(item.memory_bytes, item.added_bytes) for item in found] == [(7, 0)] * 2


def test_of_one_graph_only_the_first_shape_compiles(no_memory):
    from tuner.trial.measure import Steady, measure_shapes

    engine = NotingEngine({LARGE: 15.0, SMALL: 10.0}, is_one_graph=True)
    found = measure_shapes(engine, batches_of(LARGE, SMALL), Steady(steps=2), lambda _: None)
    assert [item.has_compiled for item in found] == [True, False]


@pytest.mark.parametrize(
    ("timed_steps", "timed_s", "timed"),
    [
        # By hand: 3 s are enough of a shape, but for two steps at least.
        (4, 0.0, (2, 4)),
        (2, 4.9, (2, 2)),
        # Two steps of each are 5 s, both together 2.5 s more each time.
        (2, 5.1, (3, 3)),
        (2, 12.0, (5, 5)),
        (4, 12.0, (5, 7)),
    ],
)
def test_long_steps_are_timed_twice_unless_more_seconds_are_wanted(
    no_memory, monkeypatch, timed_steps, timed_s, timed
):
    """The clock of the large shape's calls goes by 2 s, that of the small one's by 0.5 s."""
    from tuner.trial import measure

    engine = NotingEngine({LARGE: 15.0, SMALL: 10.0})
    clock = [0.0]

    def run_step(batch, run=engine.run_step):
        clock[0] += 2.0 if batch.shape == LARGE else 0.5
        return run(batch)

    engine.run_step = run_step
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    batches = batches_of(LARGE, SMALL)
    steady = measure.Steady(steps=timed_steps, seconds=timed_s)
    found = measure.measure_shapes(engine, batches, steady, lambda _: None)
    assert [item.steady_s for item in found] == [(2.0,) * timed[0], (0.5,) * timed[1]]


@pytest.mark.parametrize("is_shared", [False, True])
def test_steady_steps_are_taken_in_turns_and_visits_before_them(no_memory, is_shared):
    from tuner.trial.measure import Steady, measure_shapes
    from tuner.trial.turns import Turns

    engine = NotingEngine({LARGE: 15.0, SMALL: 10.0})

    class Noted(Turns):
        are_shared = is_shared

        def take(self):
            engine.calls.append("take")

        def pass_on(self):
            engine.calls.append("pass on")

    batches = batches_of(LARGE, SMALL)
    found = measure_shapes(engine, batches, Steady(steps=2, turns=Noted(None)), lambda _: None)
    visits = [LARGE] * 3 + [SMALL] * 3
    # Two calls are not typical; the third counts unless others have not stepped meanwhile.
    num_passes = 2 if is_shared else 1
    in_turns = ["pass on", LARGE, "pass on", SMALL] * num_passes
    assert engine.calls == [*visits, "take", *in_turns]
    assert [len(item.steady_s) for item in found] == [2, 2]
    assert [len(item.settling_s) for item in found] == [2 if is_shared else 1] * 2


def test_a_loss_that_is_no_number_ends_it_and_what_is_known_is_told(no_memory):
    from tuner.trial.measure import DivergedError, Steady, measure_shapes

    told = []
    engine = NotingEngine({LARGE: 15.0, SMALL: float("nan")})
    with pytest.raises(DivergedError, match="the loss at B=8 L=8 is nan"):
        measure_shapes(engine, batches_of(LARGE, SMALL), Steady(steps=3), told.append)
    assert [item.shape for item in told] == [LARGE]
    assert engine.calls[-1] == SMALL and engine.calls.count(SMALL) == 1

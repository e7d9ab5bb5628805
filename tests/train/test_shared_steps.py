"""A run planned for two ranks that one goes on with: in every step it takes both their batches."""

from __future__ import annotations

import json

import numpy as np
import pytest
from launched_case import trained_in_one_process, write_config
from run_case import write_counting_rows

from tuner.config.codec import load_config
from tuner.train.checkpoint import CheckpointFolder
from tuner.train.engine import Engine
from tuner.train.loop import Loop, RunParts
from tuner.train.run_inputs import initial_state, open_inputs
from tuner.train.run_log import RunLog

pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

STEPS = 12


class Alone:
    """Runs of one engine on the plan of two ranks, each into a folder of its own."""

    def __init__(self, folder, device):
        write_counting_rows(folder / "data.mindrecord", 61, (3, 17))
        path = write_config(folder, "alone", train={"max_steps": STEPS})
        self.given = load_config(str(path))
        self.inputs = open_inputs(self.given, None, 2)
        self.engine = Engine(self.inputs.config, device, self.inputs.longest)
        for shape in self.inputs.plan.shapes:
            self.engine.run_empty_step(shape)
        self.engine.run_empty_update()
        self.first = [parameter.asnumpy().copy() for parameter in self.engine.parameters]

    def run(self, out, *, until=STEPS, resume=False):
        """All parameters by name at its end, and the state."""
        import mindspore as ms

        for parameter, value in zip(self.engine.parameters, self.first, strict=True):
            parameter.set_data(ms.Tensor(value))
        state, folder = initial_state(self.inputs), CheckpointFolder(out / "checkpoints", 9)
        if resume:
            own = [gradient.name for gradient in self.engine.gradients]
            state = folder.load_newest(self.engine.parameters, pytest.fail, own=own)
        log = RunLog(out, state.steps)
        parts = RunParts(
            config=self.inputs.config,
            dataset=self.inputs.dataset,
            lengths=self.inputs.lengths,
            engine=self.engine,
            checkpoints=folder,
            log=log,
            on_step=lambda record: None,
            on_notice=pytest.fail,
            stop_requested=lambda: loop.state.steps >= until,
        )
        loop = Loop(parts, state, self.inputs.plan)
        end = loop.run()
        log.close()
        return {one.name: one.asnumpy().copy() for one in self.engine.parameters}, end


@pytest.fixture(scope="module")
def alone(tmp_path_factory, device):
    return Alone(tmp_path_factory.mktemp("shared"), device)


@pytest.fixture(scope="module")
def whole(alone, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return *alone.run(out), [json.loads(line) for line in (out / "metrics.jsonl").open()]


def test_steps_rows_and_updates_are_those_of_two_ranks(alone, whole, device):
    found, end, lines = whole
    weights, losses, real_tokens = trained_in_one_process(alone.given, 2, STEPS, device)
    assert (end.steps, end.world_size, end.real_tokens) == (STEPS, 2, real_tokens)
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=1e-12)
    for name, value in weights.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert [line["padded_tokens"] for line in lines] == [
        2 * line["batch_size"] * line["padded_length"] for line in lines
    ]
    assert {line["recompiles"] for line in lines} == {0}


def test_resumed_within_a_window_it_ends_with_the_same_bits(alone, whole, tmp_path):
    _, stopped = alone.run(tmp_path, until=5)
    assert (stopped.steps, stopped.window_label_tokens > 0) == (5, True)
    found, end = alone.run(tmp_path, resume=True)
    assert end == whole[1]
    for name, value in whole[0].items():
        assert found[name].tobytes() == value.tobytes(), name

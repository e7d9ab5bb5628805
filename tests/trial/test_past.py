"""Costs from an earlier study's trials."""

from __future__ import annotations

import dataclasses

import pytest
from strategies import make_config

from tuner.errors import BadInputError
from tuner.simulate.estimate import ShapeMeasurement
from tuner.trial.folder import StudyFolder
from tuner.trial.past import measured_cost_model
from tuner.trial.record import TrialSpec, to_json

SHAPES = [(8, 64), (8, 128), (2, 256), (3, 512)]


def step_s_of(shape):
    size, length = shape
    return 0.01 + 1e-4 * size * length + 1e-7 * size * length * length


def measured(shape, factor=1.0):
    step_s = factor * step_s_of(shape)
    return ShapeMeasurement(
        batch_size=shape[0],
        padded_length=shape[1],
        first_call_s=3.0 + 3 * step_s,
        step_s=step_s,
        step_spread_s=0.0,
        num_timed_steps=5,
        memory_bytes=10**9,
        loss=None,
    )


def write_trial(study, number, shapes, **graph):
    folder = study.trial(number)
    folder.path.mkdir(parents=True)
    config = make_config({f"graph.{name}": value for name, value in graph.items()})
    spec = TrialSpec(
        config=config,
        lengths_file="lengths.npy",
        max_shapes=8,
        timed_steps=5,
        time_limit_s=60.0,
        memory_limit_bytes=10**9,
    )
    folder.spec.write_text(to_json(spec))
    folder.measured.write_text("".join(to_json(item) + "\n" for item in shapes))
    return folder


@pytest.fixture
def study(tmp_path):
    return StudyFolder(tmp_path / "results")


def test_measurements_of_all_static_trials_are_fitted_together(study):
    write_trial(study, 0, map(measured, SHAPES[:2]))
    write_trial(study, 1, map(measured, SHAPES[2:]))
    write_trial(study, 2, [measured(SHAPES[0], factor=50)], mode="dynamic")
    model = measured_cost_model(study)
    for shape in [*SHAPES, (16, 32), (3, 300)]:
        assert model.step.step_s(shape) == pytest.approx(step_s_of(shape), rel=1e-6)
        assert model.compile_s(shape) == pytest.approx(3.0 + 2 * step_s_of(shape), rel=1e-6)
    assert model.source == f"measured by 2 trials in {study.path}"


def test_a_shape_of_several_trials_counts_with_its_median(study):
    for number, factor in enumerate((1.0, 1.0, 40.0)):
        write_trial(study, number, [measured(shape, factor) for shape in SHAPES])
    assert measured_cost_model(study).step.step_s((8, 128)) == pytest.approx(
        step_s_of((8, 128)), rel=1e-6
    )


def test_the_level_with_most_measurements_is_taken(study):
    write_trial(study, 0, map(measured, SHAPES), jit_level="O1")
    write_trial(study, 1, [measured(SHAPES[0], factor=9)], jit_level="O0")
    model = measured_cost_model(study)
    assert model.step.step_s(SHAPES[0]) == pytest.approx(step_s_of(SHAPES[0]), rel=1e-6)


def test_what_a_killed_trial_measured_before_counts_and_broken_files_do_not(study):
    with write_trial(study, 0, map(measured, SHAPES)).measured.open("a") as file:
        file.write('{"batch_size": 8, "padded')
    write_trial(study, 1, []).measured.write_text("{")
    write_trial(study, 2, map(measured, SHAPES)).spec.unlink()
    write_trial(study, 3, map(measured, SHAPES)).spec.write_bytes(b"\xff")
    assert measured_cost_model(study).source.startswith("measured by 1 trial in")


@pytest.mark.parametrize("kind", ["nothing", "dynamic only", "no folder"])
def test_a_study_without_static_measurements_is_refused(study, kind):
    if kind == "dynamic only":
        write_trial(study, 0, map(measured, SHAPES), mode="dynamic")
    elif kind == "nothing":
        study.path.mkdir()
    with pytest.raises(BadInputError, match="holds no trial that measured a static graph"):
        measured_cost_model(study)


def test_a_first_call_faster_than_a_step_is_a_compile_of_nothing(study):
    quick = [dataclasses.replace(measured(shape), first_call_s=0.0) for shape in SHAPES]
    write_trial(study, 0, quick)
    assert measured_cost_model(study).compile_s((8, 64)) == pytest.approx(0.0, abs=1e-9)

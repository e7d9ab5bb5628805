"""cost_model.yaml: what was written is known again, and people may write one."""

from __future__ import annotations

import dataclasses

import pytest
from cost_case import DYNAMIC, STATIC, measure, process_of, seconds_of

from tuner.config.codec import format_config
from tuner.errors import BadInputError
from tuner.simulate.cost_book import LEAST_SHAPES, CostBook
from tuner.simulate.cost_file import cost_file, given_models, read_cost_file, read_static_model

KNOWN = (0.0213, 1.1e-4, 3.3e-7)
SHAPES = [(8, 1024), (32, 64), (16, 128), (4, 512)]
FAR = (3, 700)
O1 = dataclasses.replace(STATIC, jit_level="O1")
FP16 = dataclasses.replace(DYNAMIC, precision="fp16+softmax+loss")

BY_HAND = """
model: any
costs:
- device: CPU
  graph_mode: static
  jit_level: O0
  precision: fp32
  rows: single
  seconds: {overhead_s: 0.5, token_s: 1e-3, attention_s: 0, compile_base_s: 4,
            compile_per_step_s: 2.0}
  memory: {fixed_bytes: 1e9, graph_bytes: 0, token_bytes: 500, attention_bytes: 0.5}
"""


def measured(key, shapes=SHAPES, factor=1.0, **fields):
    items = []
    for i, shape in enumerate(shapes):
        step_s = factor * seconds_of(shape, KNOWN) * (1 + 0.01 * (-1) ** i)
        one_graph = key.graph_mode == "dynamic" and i > 0
        items.append(
            measure(
                shape,
                step_s,
                step_s if one_graph else 4.0 + step_s,
                has_compiled=not one_graph,
                added_bytes=0 if one_graph else 50_000 * shape[0] * shape[1],
            )
        )
    return process_of(key, items, **fields)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cost_model.yaml"


def write(path, *processes, model="a" * 64):
    book = CostBook(processes)
    path.write_text(format_config(cost_file(book, model), header="Costs"))
    return book


class TestRoundTrip:
    PROCESSES = (
        measured(STATIC, base_bytes=9 * 10**8, peak_bytes=3 * 10**9),
        measured(STATIC, SHAPES[1:3], factor=1.07, update=None),
        measured(DYNAMIC, factor=1.9, base_bytes=9 * 10**8, peak_bytes=3 * 10**9),
        measured(O1, SHAPES[:1], factor=0.8),
        measured(FP16, SHAPES[:2], factor=3.1),
    )

    def test_the_text_is_the_file(self, path):
        book = write(path, *self.PROCESSES)
        assert read_cost_file(path) == cost_file(book, "a" * 64)
        assert read_cost_file(path).model == "a" * 64
        assert path.read_text().startswith("# Costs\n")

    @pytest.mark.parametrize("key", [STATIC, DYNAMIC, O1, FP16], ids=str)
    def test_fits_are_known_again(self, path, key):
        before = write(path, *self.PROCESSES).known(key)
        after = CostBook(models=given_models(read_cost_file(path))).known(key)
        for shape in [*SHAPES, FAR]:
            # A study that reads the file has measured nothing: it knows the fits.
            model = before.model
            assert after.step_s(shape) == pytest.approx(model.step.step_s(shape), rel=1e-12)
            half_width_s = model.step.half_width_s(shape)
            if len(before.steps_s) < LEAST_SHAPES:
                # Of a borrowed fit the file holds one relative error for all shapes.
                error = max(2 * model.step.relative_error, model.step.scaled_error)
                half_width_s = error * model.step.step_s(shape)
            assert after.half_width_s(shape) == pytest.approx(half_width_s, rel=1e-12)
            assert after.shape_s(shape) == pytest.approx(model.shape_s(shape), rel=1e-12)
        assert after.model.compile_error == pytest.approx(before.model.compile_error)
        assert after.model.is_one_graph is before.model.is_one_graph
        assert after.memory == before.memory

    def test_what_nobody_measured_is_not_written(self, path):
        write(path, measured(STATIC), process_of(DYNAMIC, []))
        (entry,) = read_cost_file(path).costs
        assert (entry.graph_mode, len(entry.measured)) == ("static", 1)
        assert entry.memory is None

    def test_the_fit_is_written_for_people(self, path):
        exact = process_of(
            STATIC, [measure(s, seconds_of(s, KNOWN), 4.0 + seconds_of(s, KNOWN)) for s in SHAPES]
        )
        write(path, exact)
        seconds = read_cost_file(path).costs[0].seconds
        assert (seconds.overhead_s, seconds.token_s, seconds.attention_s) == pytest.approx(KNOWN)
        assert (seconds.compile_base_s, seconds.compile_per_step_s) == pytest.approx((4.0, 1.0))
        # Four shapes and three terms: s^2 is 4 * 0.06^2 / (4 + 1).
        assert seconds.step_error == pytest.approx(2 * (4 * 0.06**2 / 5) ** 0.5)


class TestByHand:
    def test_without_measurements_the_written_fit_counts(self, path):
        path.write_text(BY_HAND)
        known = CostBook(models=given_models(read_cost_file(path))).known(STATIC)
        step_s = 0.5 + 1e-3 * 2100
        assert known.step_s(FAR) == pytest.approx(step_s)
        assert known.half_width_s(FAR) == pytest.approx(0.15 * step_s)
        assert known.shape_s(FAR) == pytest.approx(4 + 2 * step_s)
        assert known.model.compile_error == 0.3
        assert known.memory is not None
        assert known.memory.peak_bytes([FAR]) == 1e9 + 500 * 2100 + 0.5 * 2100 * 700
        assert known.memory.least_peak_bytes([FAR]) == pytest.approx(
            1e9 + 0.8 * (500 * 2100 + 0.5 * 2100 * 700)
        )

    def test_the_graph_mode_decides_what_is_paid_once(self, path):
        path.write_text(BY_HAND.replace("static", "dynamic"))
        known = CostBook(models=given_models(read_cost_file(path))).known(DYNAMIC)
        assert known.model.is_one_graph
        assert known.memory is not None and known.memory.is_one_graph
        assert known.compile_s([FAR, FAR]) == pytest.approx(4 + 2 * 2 * (0.5 + 1e-3 * 2100))

    @pytest.mark.parametrize(
        ("old", "new", "says"),
        [
            ("model: any", "modle: any", "unknown key modle; did you mean model?"),
            ("token_s: 1e-3", "tokens_s: 1e-3", "unknown key costs.0.seconds.tokens_s"),
            ("  rows: single\n", "", "costs.0.rows is missing"),
            ("token_s: 1e-3", "token_s: -1e-3", "costs.0.seconds.token_s: Input should be great"),
            ("fixed_bytes: 1e9", "fixed_bytes: -1", "costs.0.memory.fixed_bytes: Input should b"),
            ("fixed_bytes: 1e9", "fixed_bytes: .inf", "costs.0.memory.fixed_bytes: Input shoul"),
            ("overhead_s: 0.5", "overhead_s: .nan", "costs.0.seconds.overhead_s: Input should"),
            ("graph_mode: static", "graph_mode: statik", "costs.0.graph_mode: Input should be"),
            ("model: any", "model: any\nformat: 2", "format: Input should be 1 (got 2)"),
            (
                "overhead_s: 0.5, token_s: 1e-3",
                "overhead_s: 0, token_s: 0",
                "one of overhead_s, token_s and attention_s must be above 0",
            ),
        ],
    )
    def test_faults_are_told_in_one_line(self, path, old, new, says):
        assert old in BY_HAND
        path.write_text(BY_HAND.replace(old, new, 1))
        with pytest.raises(BadInputError) as caught:
            read_cost_file(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_key_stands_once(self, path):
        entry = BY_HAND.split("costs:\n")[1]
        path.write_text(BY_HAND + entry)
        with pytest.raises(BadInputError, match="got CPU static O0 fp32 single twice"):
            read_cost_file(path)

    @pytest.mark.parametrize(
        ("old", "new", "says"),
        [
            ("batch_size: 8\n", "batch_size: 0\n", "measured.0.shapes.0.batch_size"),
            ("steady_s: [", "steady_s: [-1.0, ", "measured.0.shapes.0.steady_s.0"),
            ("steady_s: [", "steady_s: [.nan, ", "measured.0.shapes.0.steady_s.0"),
            ("has_compiled: true", "has_compiled: perhaps", "measured.0.shapes.0.has_compiled"),
            ("update_s: 0.5", "update_s: 0.0", "measured.0.update.update_s"),
            ("peak_bytes: 0", "peak_bytes: -1", "measured.0.peak_bytes"),
            ("peak_bytes: 0", "peek_bytes: 0", "unknown key costs.0.measured.0.peek_bytes"),
        ],
    )
    def test_faults_in_measurements_too(self, path, old, new, says):
        write(path, measured(STATIC))
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(BadInputError) as caught:
            read_cost_file(path)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


class TestStaticModel:
    def test_the_key_with_most_measured_shapes_is_taken(self, path):
        """Two processes of one shape are one shape."""
        few = [measured(STATIC, SHAPES[:3], factor=5)] * 3
        write(path, *few, measured(O1), measured(DYNAMIC, [*SHAPES, FAR], factor=9))
        model = read_static_model(path)
        assert model.step.step_s(FAR) == pytest.approx(seconds_of(FAR, KNOWN), rel=0.05)
        assert model.source == f"measured at 4 shapes in {path}"

    def test_one_written_by_hand_says_so(self, path):
        path.write_text(BY_HAND)
        model = read_static_model(path)
        assert model.source == f"written by hand in {path}"
        assert model.step.step_s((1, 500)) == 1.0

    def test_a_file_without_static_graphs_is_refused(self, path):
        write(path, measured(DYNAMIC))
        with pytest.raises(BadInputError, match="holds no costs of static graphs"):
            read_static_model(path)

    def test_a_file_that_is_not_there_is_refused(self, path):
        with pytest.raises(BadInputError, match="no such file"):
            read_static_model(path)

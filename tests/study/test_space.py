"""Search space files: found from anywhere, strict about what they hold, fitted to the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from strategies import align_slowly, make_config
from study_case import ONE_POINT, make_space

from tuner.config.override import override_config
from tuner.config.schema import AlignRule, ModelConfig
from tuner.errors import BadInputError
from tuner.study.space import (
    Choice,
    SearchSpace,
    all_choices,
    choice_overrides,
    first_choices,
    fit_to_device,
    fit_to_model,
    fit_to_update,
    is_compilable,
    load_space,
    tokens_per_update,
)

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = sorted(file.stem for file in (REPOSITORY / "search_spaces").glob("*.yaml"))


def refusal(tmp_path: Path, **changes: Any) -> str:
    file = tmp_path / "space.yaml"
    file.write_text(yaml.safe_dump({**ONE_POINT, **changes}))
    with pytest.raises(BadInputError) as caught:
        load_space(str(file))
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{file}: ")


class TestLoading:
    @pytest.mark.parametrize("name", SHIPPED)
    def test_every_shipped_space_loads_by_name_from_any_folder(self, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        space = load_space(name)
        assert isinstance(space, SearchSpace)
        assert all_choices(space)

    def test_the_default_is_shipped_and_has_what_its_comments_say(self):
        space = load_space("default")
        assert set(space.strategy) == {"bucketed", "packed", "dynamic", "fixed"}
        assert (space.num_buckets.low, space.num_buckets.high) == (2, 64)
        assert space.compute_dtype == ("fp32", "fp16", "bf16") and not space.fill_memory
        assert space.align[-1] == (
            AlignRule(up_to=128, multiple=8),
            AlignRule(up_to=512, multiple=32),
            AlignRule(multiple=64),
        )

    def test_the_shipped_ones_are_these_and_the_readme_lists_them(self):
        assert SHIPPED == [
            "ascend-910a", "ascend-910b", "cpu", "default", "long-context", "packing",
            "precision", "short-sequences",
        ]  # fmt: skip
        text = (REPOSITORY / "search_spaces" / "README.md").read_text()
        listed = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
        assert sorted(listed) == [f"{name}.yaml" for name in SHIPPED]

    @pytest.mark.parametrize("kind", ["folder", "file"])
    def test_something_called_default_does_not_hide_the_shipped_one(
        self, tmp_path, monkeypatch, kind
    ):
        monkeypatch.chdir(tmp_path)
        if kind == "folder":
            (tmp_path / "default").mkdir()
        else:
            (tmp_path / "default").write_text("not a space")
        assert load_space("default").strategy

    def test_a_file_by_relative_or_absolute_path(self, tmp_path, monkeypatch):
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(ONE_POINT))
        (tmp_path / "plain").write_text(yaml.safe_dump(ONE_POINT))
        monkeypatch.chdir(tmp_path)
        expected = make_space()
        assert load_space("mine.yaml") == expected
        assert load_space("./plain") == expected
        assert load_space(str(tmp_path / "mine.yaml")) == expected

    def test_an_unknown_name_lists_the_shipped_ones(self):
        with pytest.raises(BadInputError) as caught:
            load_space("defalt")
        assert str(caught.value) == (
            "--space: no search space is called 'defalt'; give a file, or one of: "
            + ", ".join(SHIPPED)
        )

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(BadInputError, match=r"no such file: .*gone\.yaml"):
            load_space(str(tmp_path / "gone.yaml"))

    @pytest.mark.parametrize("text", ["", "- a", "strategy: [", "\x00"])
    def test_a_file_that_is_no_mapping(self, tmp_path, text):
        (tmp_path / "space.yaml").write_text(text)
        with pytest.raises(BadInputError, match=r"space\.yaml"):
            load_space(str(tmp_path / "space.yaml"))


def steps(space: SearchSpace) -> list[int]:
    """Every multiple that a space aligns to."""
    return [
        multiple
        for align in space.align
        for multiple in ([align] if isinstance(align, int) else [r.multiple for r in align])
    ]


class TestWhatIsShipped:
    @pytest.mark.parametrize("name", SHIPPED)
    def test_every_choice_can_be_compiled_and_most_shapes_are_allowed(self, name):
        space = load_space(name)
        for choice in all_choices(space):
            assert is_compilable(choice.graph_mode, choice.jit_level)
        # Of static graphs no more buckets are planned than are allowed (guide.py).
        assert space.num_buckets.high <= space.max_static_shapes or (
            space.strategy == ("packed", "fixed") or "dynamic" in space.graph_mode
        )
        assert set(first_choices(space)) <= set(all_choices(space))

    @pytest.mark.parametrize("name", SHIPPED)
    def test_every_choice_has_its_reason_above_it(self, name):
        text = (REPOSITORY / "search_spaces" / f"{name}.yaml").read_text()
        blocks = [block.splitlines() for block in text.split("\n\n")]
        assert all(block[0].startswith("# ") for block in blocks)
        assert max(map(len, text.splitlines())) <= 101

    @pytest.mark.parametrize("name", ["cpu", "precision", "packing", "long-context"])
    def test_a_cpu_is_left_with_something_to_try(self, name):
        fitted, _ = fit_to_device(load_space(name), "CPU")
        assert all_choices(fitted) and "bf16" not in fitted.compute_dtype

    def test_910a_has_no_bf16_and_static_graphs_alone_so_that_o2_is_possible(self):
        space = load_space("ascend-910a")
        assert space.compute_dtype == ("fp32", "fp16")
        assert space.graph_mode == ("static",) and "O2" in space.jit_level
        assert "dynamic" not in space.strategy
        assert min(steps(space)) == 16

    def test_910b_has_bf16_and_both_graph_modes(self):
        space = load_space("ascend-910b")
        assert space.compute_dtype == ("fp32", "bf16")
        assert set(space.graph_mode) == {"static", "dynamic"} and "O2" not in space.jit_level
        assert min(steps(space)) == 16 and space.fill_memory

    def test_cpu_needs_nothing_left_out(self):
        space = load_space("cpu")
        assert fit_to_device(space, "CPU") == (space, [])

    def test_short_rows_have_fine_steps_and_long_ones_coarse(self):
        short, long = load_space("short-sequences"), load_space("long-context")
        assert {8, 16} <= set(short.align) and max(steps(short)) <= 64
        assert min(a for a in long.align if isinstance(a, int)) == 64 and long.fill_memory
        assert min(long.longest_rows_per_batch) == 1 < min(short.longest_rows_per_batch)
        assert "fixed" not in long.strategy and short.strategy[0] == "packed"

    def test_packing_is_held_against_padding_to_the_longest_alone(self):
        space = load_space("packing")
        assert set(space.strategy) == {"packed", "fixed"}
        packed = {c.packed_lengths for c in all_choices(space) if c.strategy == "packed"}
        assert packed == set(range(1, 7))

    def test_precision_varies_precisions_under_stricter_tolerances(self):
        space, default = load_space("precision"), load_space("default")
        assert set(space.compute_dtype) == {"fp32", "fp16", "bf16"}
        assert space.max_loss_deviation < default.max_loss_deviation
        assert space.max_gradient_deviation < default.max_gradient_deviation
        assert len(all_choices(space)) == 10  # 5 numbers of buckets x 2 steps


class TestMistakes:
    def test_an_unknown_key_names_the_nearest(self, tmp_path):
        assert refusal(tmp_path, strategies=["fixed"]).startswith(
            "unknown key strategies; did you mean strategy"
        )
        assert refusal(tmp_path, num_buckets={"low": 1, "hi": 2}).startswith(
            "unknown key num_buckets.hi; did you mean high?"
        )

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"num_buckets": {"low": 9, "high": 2}}, "low must be at most high (got 9 and 2)"),
            ({"num_buckets": {"low": 0, "high": 2}}, "num_buckets.low"),
            ({"num_buckets": 3}, "num_buckets"),
            ({"num_buckets": {"low": 1.5, "high": 2}}, "num_buckets.low"),
            ({"strategy": []}, "strategy"),
            ({"strategy": ["packet"]}, "'packet'"),
            ({"strategy": "fixed"}, "strategy"),
            ({"align": [0]}, "align"),
            ({"align": []}, "align"),
            ({"align": [[{"multiple": 8, "up_to": 12}, {"multiple": 8}]]}, "up_to"),
            ({"longest_rows_per_batch": [0]}, "longest_rows_per_batch"),
            ({"longest_rows_per_batch": [-2]}, "-2"),
            ({"graph_mode": ["eager"]}, "'eager'"),
            ({"jit_level": ["O3"]}, "'O3'"),
            ({"max_static_shapes": 0}, "max_static_shapes"),
        ],
    )
    def test_a_value_out_of_its_range_is_named(self, tmp_path, changes, words):
        assert words in refusal(tmp_path, **changes)

    @pytest.mark.parametrize("field", sorted(ONE_POINT))
    def test_a_missing_field_is_named(self, tmp_path, field):
        rest = {name: value for name, value in ONE_POINT.items() if name != field}
        (tmp_path / "space.yaml").write_text(yaml.safe_dump(rest))
        with pytest.raises(BadInputError, match=f"{field} is missing"):
            load_space(str(tmp_path / "space.yaml"))


class TestFittingToTheModel:
    def test_a_users_own_cell_is_not_searched_for_precisions(self):
        space = make_space(compute_dtype=["fp32", "fp16"], align=[8, 16])
        model = ModelConfig(vocab_size=5, factory="package.module:function")
        fitted, (note,) = fit_to_model(space, model)
        assert fitted.compute_dtype == ("fp32",)
        assert fitted.model_copy(update={"compute_dtype": space.compute_dtype}) == space
        assert "the Cell of package.module:function chooses its own precision" in note
        assert fit_to_model(fitted, model) == (fitted, [])

    def test_the_built_in_decoder_takes_all(self):
        space = make_space(compute_dtype=["fp32", "fp16"])
        assert fit_to_model(space, ModelConfig(vocab_size=5)) == (space, [])


class TestFittingToTheUpdate:
    """Rows of up to 100 tokens."""

    def base(self, tokens):
        return make_config({"train.tokens_per_update": tokens})

    def test_batches_that_hold_more_than_an_update_are_left_out(self):
        space = make_space(longest_rows_per_batch=[2, 4, 8, 16])
        fitted, (note,) = fit_to_update(space, self.base(500), 100)
        assert fitted.longest_rows_per_batch == (2, 4)
        assert fitted.model_copy(update={"longest_rows_per_batch": (2, 4, 8, 16)}) == space
        assert note == (
            "longest_rows_per_batch 8, 16 not tried: batches of that many rows of 100 tokens hold "
            "more than an update, train.tokens_per_update 500"
        )
        assert fit_to_update(fitted, self.base(500), 100) == (fitted, [])

    @pytest.mark.parametrize(("tokens", "kept"), [(727, (4,)), (728, (4, 8)), (800, (4, 8))])
    def test_a_tenth_more_is_let_pass(self, tokens, kept):
        """8 rows of 100 are 1.1 times 727.3."""
        space = make_space(longest_rows_per_batch=[4, 8])
        assert fit_to_update(space, self.base(tokens), 100)[0].longest_rows_per_batch == kept

    def test_the_smallest_stay_and_it_is_said_that_updates_are_larger(self):
        space = make_space(longest_rows_per_batch=[8, 2])
        fitted, notes = fit_to_update(space, self.base(150), 100)
        assert fitted.longest_rows_per_batch == (2,)
        assert len(notes) == 2
        assert notes[1].startswith("batches of 2 rows of 100 tokens, the smallest of the space")
        assert "train.tokens_per_update 150" in notes[1]

    def test_nothing_is_left_out_where_the_config_leaves_the_update_open(self):
        space = make_space(longest_rows_per_batch=[2, 16])
        assert fit_to_update(space, make_config(), 100) == (space, [])


class TestFittingToTheDevice:
    def test_cpu_drops_levels_that_change_nothing_there_and_says_why(self):
        space = make_space(jit_level=["O0", "O1", "O2"], align=[8, 16])
        fitted, notes = fit_to_device(space, "CPU")
        assert fitted.jit_level == ("O0",)
        assert fitted.model_copy(update={"jit_level": space.jit_level}) == space
        (note,) = notes
        assert note.startswith("jit_level O1, O2 not tried: on CPU every level compiles to the")

    def test_cpu_takes_o0_where_the_space_has_only_others(self):
        fitted, notes = fit_to_device(make_space(jit_level=["O1"]), "CPU")
        assert fitted.jit_level == ("O0",) and len(notes) == 1

    def test_nothing_to_drop_is_nothing_to_say(self):
        space = make_space()
        assert fit_to_device(space, "CPU") == (space, [])

    def test_ascend_keeps_every_level(self):
        space = make_space(jit_level=["O0", "O1"], compute_dtype=["fp32", "bf16"])
        assert fit_to_device(space, "Ascend") == (space, [])
        whole = make_space(jit_level=["O0", "O1", "O2"])
        fitted, (note,) = fit_to_device(whole, "Ascend")
        assert fitted == whole and note.startswith("jit_level O2 is tried with static graphs only")

    def test_cpu_has_no_bf16_and_says_that_fp16_is_slow_there(self):
        space = make_space(compute_dtype=["fp32", "fp16", "bf16"])
        fitted, notes = fit_to_device(space, "CPU")
        assert fitted.compute_dtype == ("fp32", "fp16")
        assert [note.split()[0] for note in notes] == ["bf16", "fp16"]
        only, _ = fit_to_device(make_space(compute_dtype=["bf16"]), "CPU")
        assert only.compute_dtype == ("fp32",)


class TestPoints:
    def test_all_points_by_hand(self):
        space = make_space(
            strategy=["bucketed", "fixed"],
            num_buckets={"low": 2, "high": 4},
            align=[8, 16],
            graph_mode=["static", "dynamic"],
            jit_level=["O0", "O1"],
            longest_rows_per_batch=[2, 4, 8],
        )
        points = all_choices(space)
        # (3 bucket counts + 1 for fixed) x 2 x 3 x 2 x 2.
        assert len(points) == len(set(points)) == 96
        assert {(point.strategy, point.num_buckets) for point in points} == {
            ("bucketed", 2), ("bucketed", 3), ("bucketed", 4), ("fixed", None),
        }  # fmt: skip

    def test_the_first_are_pad_to_longest_then_one_of_each_strategy(self):
        space = load_space("default")
        space = space.model_copy(update={"strategy": (*space.strategy, "packed")})
        first = first_choices(space)
        assert [(choice.strategy, choice.graph_mode) for choice in first] == [
            ("fixed", "static"), ("bucketed", "static"), ("packed", "static"),
            ("dynamic", "dynamic"),
        ]  # fmt: skip
        assert set(first) <= set(all_choices(space))

    @pytest.mark.parametrize(
        "changes",
        [
            {"strategy": ["dynamic"]},
            {"strategy": ["bucketed"], "num_buckets": {"low": 7, "high": 9}},
            {"strategy": ["bucketed"], "num_buckets": {"low": 1, "high": 1}},
            {"strategy": ["dynamic", "fixed"], "graph_mode": ["dynamic"]},
        ],
    )
    def test_the_first_are_points_of_any_space(self, changes):
        space = make_space(**changes)
        assert set(first_choices(space)) <= set(all_choices(space))

    @pytest.mark.parametrize(
        "align", [8, (AlignRule(up_to=128, multiple=8), AlignRule(multiple=64))]
    )
    @pytest.mark.parametrize("longest", [100, 128, 129, 500])
    def test_the_budget_holds_whole_longest_rows(self, align, longest):
        choice = Choice(
            strategy="fixed",
            num_buckets=None,
            align=align,
            longest_rows_per_batch=3,
            graph_mode="static",
            jit_level="O0",
        )
        config = override_config(make_config(), choice_overrides(choice, longest))
        assert config.batching.tokens_per_batch == 3 * align_slowly(longest, align)
        assert config.batching.align == align

    def test_a_choice_overrides_every_rule_of_the_base(self):
        base = make_config(
            {
                "batching.strategy": "bucketed",
                "batching.boundaries": [64, 128],
                "batching.tokens_per_batch": None,
                "batching.batch_sizes": [8, 4],
                "graph.mode": "dynamic",
            }
        )
        choice = Choice(
            strategy="bucketed",
            num_buckets=5,
            align=16,
            longest_rows_per_batch=2,
            graph_mode="static",
            jit_level="O1",
        )
        config = override_config(base, choice_overrides(choice, 100))
        assert config.batching.boundaries == config.batching.batch_sizes == ()
        assert config.batching.num_buckets == 5
        assert config.batching.tokens_per_batch == 2 * 112
        assert (config.graph.mode, config.graph.jit_level) == ("static", "O1")


class TestTokensPerUpdate:
    def test_the_largest_budget_of_the_space_for_all(self):
        space = make_space(longest_rows_per_batch=[2, 8, 4])
        assert tokens_per_update(space, make_config(), longest=100) == 800

    def test_the_users_own_figure_stays(self):
        base = make_config({"train.tokens_per_update": 1234})
        assert tokens_per_update(make_space(), base, longest=100) == 1234


def test_an_installed_wheel_finds_its_spaces_from_any_folder(tmp_path):
    def run(*arguments: object, cwd: Path, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    pip = ("-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "wheel", ".", "--no-deps", "-w", tmp_path / "wheel", cwd=REPOSITORY)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    run(*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel, cwd=tmp_path)
    code = (
        "import tuner; from tuner.study.space import load_space\n"
        f"print(tuner.__file__); print([load_space(name).strategy for name in {SHIPPED!r}])"
    )
    (tmp_path / "elsewhere").mkdir()
    output = run("-c", code, cwd=tmp_path / "elsewhere", PYTHONPATH=str(tmp_path / "site"))
    assert output.startswith(str(tmp_path / "site"))
    assert "bucketed" in output

"""Fragments for other stacks: read back by their own rules, the dataset by MindSpore itself."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from strategies import TABLE, align_slowly, make_config, make_lengths

from tuner.batching.plan import BatchPlan, plan_batches, resolve_boundaries
from tuner.config.override import override_config
from tuner.config.schema import TrainConfig
from tuner.data.lengths import Lengths, scan_lengths
from tuner.data.mindrecord import MindRecordSet, MindRecordWriter, open_mindrecord
from tuner.errors import BadInputError
from tuner.report.handover import STACKS, hand_over

BENCH = Path(__file__).resolve().parents[1] / "bench"
WIDTHS = (8, 16, 40)
AROUND = [n for width in WIDTHS for n in (width - 1, width, width + 1)][:-1]
"""One below, at and above every width; none above the last."""
PREDICTION = {
    "estimated_run_s": 1.0,
    "estimated_real_tokens_per_s": 1.0,
    "estimated_steady_real_tokens_per_s": 1.0,
    "estimated_compile_s": 1.0,
    "effective_token_fraction": 0.75,
    "peak_bytes": 1,
}


def tuned(lengths: Lengths, changes: Mapping[str, Any]) -> tuple[TrainConfig, BatchPlan]:
    """A config as varseq-tune writes it, and its plan."""
    config = resolve_boundaries(lengths, make_config(changes))
    plan = plan_batches(lengths, config)
    tokens = np.percentile(lengths.tokens, np.arange(101), method="nearest")
    provenance = {
        "data_fingerprint": lengths.fingerprint,
        "num_samples": lengths.num_samples,
        "device": "CPU",
        "versions": {},
        "study": "test",
        "trial": 0,
        "shapes": [list(shape) for shape in plan.shapes],
        "prediction": PREDICTION,
        "length_percentiles": [int(value) for value in tokens],
    }
    return override_config(config, {"provenance": provenance}, source="test"), plan


def bucketed(**more: Any) -> dict[str, Any]:
    return {
        "batching.strategy": "bucketed",
        "batching.boundaries": list(WIDTHS),
        "batching.num_buckets": len(WIDTHS),
        "batching.tokens_per_batch": 80,
        **{f"{name.replace('__', '.')}": value for name, value in more.items()},
    }


def emitted(config: TrainConfig, stack: str) -> str:
    return hand_over(config, stack, peak_rate=config.optimizer.learning_rate)


def widths_of_rows(plan: BatchPlan) -> Counter[int]:
    """Padded length of every row of an epoch."""
    return Counter(
        batch.padded_length
        for batch in plan.steps_of_rank(0)
        for _ in range(int(batch.rows_per_slot.sum()))
    )


def write_rows(path: Path, tokens: Sequence[int]) -> MindRecordSet:
    """Row i holds i + 1 over and over, and labels of 100 + i."""
    with MindRecordWriter(path, description={"length_of": "input_ids"}) as writer:
        writer.write(
            [
                {
                    "input_ids": np.full(length, i + 1, np.int32),
                    "labels": np.full(length, 100 + i, np.int32),
                    "length": length,
                }
                for i, length in enumerate(tokens)
            ]
        )
    return open_mindrecord(str(path))


def run_snippet(text: str, dataset: MindRecordSet, folder: Path, **options: Any) -> list[Any]:
    """All batches of the emitted file, imported as a user would."""
    path = folder / "minddata.py"
    path.write_text(text)
    names: dict[str, Any] = {"__name__": "minddata"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    files = [str(file) for file in dataset.files]
    batches = names["open_batches"](files, **options)
    return list(batches.create_dict_iterator(num_epochs=1, output_numpy=True))


def check_padding(batches: list[Any], tokens: Sequence[int], longest: int, pad_id: int) -> None:
    """Every row there once, whole, filled with the pad id, its labels with -100."""
    seen = []
    for batch in batches:
        assert batch["input_ids"].shape == batch["labels"].shape
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            row = int(ids[0]) - 1
            seen.append(row)
            length = min(tokens[row], longest)
            assert ids.tolist() == [row + 1] * length + [pad_id] * (len(ids) - length)
            assert labels.tolist() == [100 + row] * length + [-100] * (len(ids) - length)
    assert sorted(seen) == [row for row, length in enumerate(tokens) if length]


@pytest.mark.mindspore
class TestDatasetBuckets:
    def test_rows_at_below_and_above_a_width_get_the_planned_one(self, tmp_path):
        tokens = AROUND * 3 + [0, 1, 40]
        config, plan = tuned(make_lengths(tokens), bucketed(data__pad_id=7))
        dataset = write_rows(tmp_path / "rows.mindrecord", tokens)
        batches = run_snippet(emitted(config, "minddata"), dataset, tmp_path)
        check_padding(batches, tokens, 40, 7)
        widths = Counter(b["input_ids"].shape[1] for b in batches for _ in b["input_ids"])
        assert widths == widths_of_rows(plan)
        # By hand: 7, 8 three times each and 1; 9, 15, 16 three times; 17, 39, 40 and one more 40.
        assert widths == {8: 7, 16: 9, 40: 10}

    def test_batch_sizes_are_those_of_the_plan_and_only_last_ones_are_smaller(self, tmp_path):
        tokens = AROUND * 5
        config, plan = tuned(make_lengths(tokens), bucketed())
        dataset = write_rows(tmp_path / "rows.mindrecord", tokens)
        text = emitted(config, "minddata")
        whole = run_snippet(text, dataset, tmp_path, drop_remainder=True)
        assert whole and {b["input_ids"].shape for b in whole} <= set(plan.shapes)
        sizes = {length: size for size, length in plan.shapes}
        for width, rows in widths_of_rows(plan).items():
            count = sum(b["input_ids"].shape[1] == width for b in whole)
            assert count == rows // sizes[width]

    def test_longer_rows_are_cut_left_out_or_an_error(self, tmp_path):
        tokens = [5, 41, 39, 100]
        dataset = write_rows(tmp_path / "rows.mindrecord", tokens)
        lengths = make_lengths(tokens)
        config, plan = tuned(lengths, bucketed())
        batches = run_snippet(emitted(config, "minddata"), dataset, tmp_path)
        check_padding(batches, tokens, 40, 0)
        config, plan = tuned(lengths, bucketed(data__overflow="drop"))
        batches = run_snippet(emitted(config, "minddata"), dataset, tmp_path)
        assert sum(len(b["input_ids"]) for b in batches) == 2 == len(plan.row_indices)
        config = override_config(config, {"data.overflow": "error"})
        with pytest.raises(RuntimeError, match="more than 40"):
            run_snippet(emitted(config, "minddata"), dataset, tmp_path)

    def test_ids_are_the_labels_where_there_are_none(self, tmp_path):
        tokens = [3, 9]
        dataset = write_rows(tmp_path / "rows.mindrecord", tokens)
        config, _ = tuned(make_lengths(tokens), bucketed(data__label_column=None))
        batches = run_snippet(emitted(config, "minddata"), dataset, tmp_path)
        rows = {b["input_ids"].shape[1]: b for b in batches}
        assert rows[8]["labels"].tolist() == [[1] * 3 + [-100] * 5]
        assert rows[16]["input_ids"].tolist() == [[2] * 9 + [0] * 7]

    def test_fixed_is_one_bucket(self, tmp_path):
        tokens = [3, 9, 30, 31]
        changes = {"batching.strategy": "fixed", "batching.tokens_per_batch": 64}
        config, plan = tuned(make_lengths(tokens), changes)
        dataset = write_rows(tmp_path / "rows.mindrecord", tokens)
        batches = run_snippet(emitted(config, "minddata"), dataset, tmp_path)
        assert [b["input_ids"].shape for b in batches] == [(2, 32)] * 2
        assert plan.shapes == ((2, 32),)
        check_padding(batches, tokens, 32, 0)


@pytest.mark.mindspore
@pytest.mark.parametrize("align", [8, TABLE])
def test_random_batches_are_padded_to_their_longest_aligned(tmp_path, align):
    tokens = [1, 7, 8, 9, 127, 128, 129, 160, 161, 511, 512, 513, 577]
    rules = align if isinstance(align, int) else [dataclass_of(rule) for rule in align]
    changes = {
        "batching.strategy": "dynamic", "batching.align": rules,
        "batching.tokens_per_batch": None, "batching.samples_per_batch": 2,
    }  # fmt: skip
    config, _ = tuned(make_lengths(tokens), changes)
    dataset = write_rows(tmp_path / "rows.mindrecord", tokens)
    batches = run_snippet(emitted(config, "minddata"), dataset, tmp_path, seed=3)
    check_padding(batches, tokens, 1000, 0)
    assert sorted(len(b["input_ids"]) for b in batches) == [1] + [2] * 6
    for batch in batches:
        longest = max(tokens[int(ids[0]) - 1] for ids in batch["input_ids"])
        assert batch["input_ids"].shape[1] == align_slowly(longest, align)


def dataclass_of(rule: Any) -> dict[str, Any]:
    return {"multiple": rule.multiple, **({"up_to": rule.up_to} if rule.up_to else {})}


PART_OF_MIX = pytest.param(("instructions",), 427, 6, id="a part")
WHOLE_MIX = pytest.param(
    ("chat", "pairs", "instructions", "documents"), 10_162, 10, id="all", marks=pytest.mark.slow
)


@pytest.mark.mindspore
@pytest.mark.parametrize(("parts", "num_rows", "num_buckets"), [PART_OF_MIX, WHOLE_MIX])
def test_every_row_of_the_mix_gets_its_planned_width(
    parts, num_rows, num_buckets, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(BENCH))
    import length_sets

    monkeypatch.setattr(length_sets, "MIX_PARTS", parts)
    dataset = open_mindrecord(str(length_sets.write_mix(tmp_path / "mix.mindrecord", 512)))
    lengths = scan_lengths(dataset)
    changes = {
        "batching.strategy": "bucketed", "batching.num_buckets": num_buckets,
        "batching.tokens_per_batch": 4096, "batching.align": 8,
    }  # fmt: skip
    config, plan = tuned(lengths, changes)
    batches = run_snippet(emitted(config, "minddata"), dataset, tmp_path)
    widths = Counter(b["input_ids"].shape[1] for b in batches for _ in b["input_ids"])
    assert sum(widths.values()) == lengths.num_samples == num_rows
    assert len(widths) == num_buckets
    assert widths == widths_of_rows(plan)
    # Shapes that are not planned are the last batch of a width: fewer rows.
    sizes = {length: size for size, length in plan.shapes}
    smaller = Counter(
        b["input_ids"].shape[1] for b in batches if b["input_ids"].shape not in plan.shapes
    )
    assert max(smaller.values(), default=0) <= 1
    assert all(len(b["input_ids"]) <= sizes[b["input_ids"].shape[1]] for b in batches)


class TestDatasetText:
    def test_it_reads_as_python_and_says_what_is_lost(self):
        config, _ = tuned(make_lengths(AROUND), bucketed())
        text = emitted(config, "minddata")
        assert "BOUNDARIES = [width + 1 for width in WIDTHS]" in text
        for word in ("Fillers", "order", "Warm-up and shape record", "Graph and precision"):
            assert word in text
        assert max(map(len, text.splitlines())) <= 99

    def test_packed_rows_are_refused_in_one_line(self):
        config, _ = tuned(make_lengths([3, 5, 30]), {"batching.strategy": "packed"})
        with pytest.raises(BadInputError, match="cannot express packed rows") as caught:
            emitted(config, "minddata")
        assert "\n" not in str(caught.value)

    def test_hostile_paths_stay_text(self):
        path = "a'''b\"\"\"$x\\'; import os #"
        config, _ = tuned(make_lengths(AROUND), bucketed(data__path=path))
        compile(emitted(config, "minddata"), "minddata.py", "exec")


def flags_of(text: str) -> dict[str, str | None]:
    """What a shell gives to a program for $VARSEQ_ARGS."""
    script = text + '\nprintf "%s\\n" $VARSEQ_ARGS\n'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    words = done.stdout.split("\n")[:-1]
    assert words == shlex.split(" ".join(words))
    flags: dict[str, str | None] = {}
    for word in words:
        if word.startswith("--"):
            last = word
            flags[word] = None
        else:
            flags[last] = word
    return flags


def comment_of(text: str) -> str:
    """The comments as running text."""
    lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    return " ".join(" ".join(lines).split())


class TestMindSpeed:
    def test_buckets_become_one_batch_size_and_one_multiple(self):
        config, _ = tuned(
            make_lengths(AROUND * 20),
            bucketed(
                batching__align=8, train__tokens_per_update=1000, precision__compute_dtype="fp16",
                precision__fp32_ops=["softmax", "norms"], precision__loss_scale=1024.0,
            ),
        )  # fmt: skip
        text = emitted(config, "mindspeed")
        flags = flags_of(text)
        assert flags["--seq-length"] == "40"
        assert flags["--micro-batch-size"] == "2"  # 80 tokens // 40
        # The mean of the rows is 18.9 tokens: 1000 / (2 x 18.9) = 26.5 batches.
        mean = np.mean(AROUND)
        assert abs(int(str(flags["--global-batch-size"])) - 1000 / mean) <= 3
        assert int(str(flags["--global-batch-size"])) % 2 == 0
        assert flags["--pad-to-multiple-of"] == "8"
        assert "--no-pad-to-seq-lengths" in flags and "--attention-softmax-in-fp32" in flags
        assert "--fp16" in flags and "--bf16" not in flags
        assert flags["--initial-loss-scale"] == "1024"
        said = comment_of(text)
        assert "10 x 8, 5 x 16, 2 x 40" in said
        assert "Token budgets that vary by bucket" in said and "up to 10" in said
        assert "fp32 op groups for which no flag is written: norms." in said

    def test_fixed_pads_to_the_sequence_length(self):
        changes = {"batching.strategy": "fixed", "train.steps_per_update": 3}
        config, _ = tuned(make_lengths([30, 100]), changes)
        flags = flags_of(emitted(config, "mindspeed"))
        assert flags["--seq-length"] == "104"
        assert "--no-pad-to-seq-lengths" not in flags and "--pad-to-multiple-of" not in flags
        batch = int(str(flags["--micro-batch-size"]))
        assert flags["--global-batch-size"] == str(3 * batch)
        assert "--fp16" not in flags and "--bf16" not in flags

    def test_packed_asks_for_packing_on_both_sides(self):
        config, _ = tuned(make_lengths([3, 5, 30] * 9), {"batching.strategy": "packed"})
        text = emitted(config, "mindspeed")
        flags = flags_of(text)
        assert flags["--seq-length"] == "32"
        assert {"--neat-pack", "--reset-attention-mask", "--reset-position-ids"} <= set(flags)
        assert "--pack --neat-pack --seq-length 32" in comment_of(text)

    def test_schedules(self):
        lengths = make_lengths(AROUND)
        wsd, _ = tuned(lengths, bucketed(schedule__kind="wsd", optimizer__learning_rate=0.02))
        text = emitted(wsd, "mindspeed")
        flags = flags_of(text)
        assert flags["--lr-decay-style"] == "WSD" and flags["--lr-wsd-decay-style"] == "linear"
        assert (flags["--lr"], flags["--min-lr"]) == ("0.02", "0.002")
        assert "--lr-wsd-decay-iters to 0.2 of" in comment_of(text)
        constant, _ = tuned(lengths, bucketed(schedule__kind="constant"))
        assert "--min-lr" not in flags_of(emitted(constant, "mindspeed"))


class TestMindFormers:
    def test_buckets_become_random_batches_of_one_dynamic_graph(self):
        config, _ = tuned(
            make_lengths(AROUND * 20),
            bucketed(
                data__pad_id=9, graph__jit_level="O2", train__tokens_per_update=1000,
                precision__compute_dtype="fp16", precision__fp32_ops=["norms", "logits"],
            ),
        )  # fmt: skip
        text = emitted(config, "mindformers")
        content = yaml.safe_load(text)
        dataset = content["train_dataset"]
        assert dataset["dynamic_batch"] is True
        assert (dataset["divisor"], dataset["remainder"]) == (8, 1)
        assert dataset["pad_token_id"] == [9, -100]
        assert dataset["batch_size"] == content["runner_config"]["batch_size"] == 2
        steps = content["runner_config"]["gradient_accumulation_steps"]
        assert abs(steps - 1000 / (2 * np.mean(AROUND))) <= 1.5
        assert content["context"] == {"mode": 0, "jit_config": {"jit_level": "O1"}}
        model = content["model"]["model_config"]
        assert model == {
            "seq_length": 40, "compute_dtype": "float16", "layernorm_compute_type": "float32",
            "softmax_compute_type": "float16", "rotary_dtype": "float16",
            "param_init_type": "float32", "is_dynamic": True,
        }  # fmt: skip
        assert content["runner_wrapper"]["scale_sense"]["loss_scale_value"] == 65536
        said = comment_of(text)
        assert "Op groups of fp32_ops without a field here: logits." in said
        assert "takes no varied lengths" in said and "10 x 8, 5 x 16, 2 x 40" in said

    @pytest.mark.parametrize("multiple", [8, 32])
    def test_its_padding_rule_leaves_the_model_our_padded_lengths(self, multiple):
        """Lengths of the stack's rule, written out from its source, one position dropped."""
        for length in range(2, 200):
            padded = ((length - 1 - 1) // multiple + 1) * multiple + 1
            # A row of k * multiple + 1 tokens fits its k * multiple predictions.
            assert padded - 1 == align_slowly(length - 1, multiple)

    def test_packed_uses_the_names_of_the_newer_family(self):
        changes = {"batching.strategy": "packed", "precision.compute_dtype": "bf16",
                   "precision.fp32_ops": ["softmax", "residual"]}  # fmt: skip
        config, _ = tuned(make_lengths([3, 5, 30] * 9), changes)
        content = yaml.safe_load(emitted(config, "mindformers"))
        dataset = content["train_dataset"]
        loader = dataset["data_loader"]
        (handler,) = loader["handler"]
        assert handler == {"type": "PackingHandler", "seq_length": 32, "pack_strategy": "pack"}
        assert content["model"]["model_config"] == {
            "compute_dtype": "bfloat16", "layernorm_compute_dtype": "bfloat16",
            "softmax_compute_dtype": "float32", "rotary_dtype": "bfloat16",
            "params_dtype": "float32", "fp32_residual_connection": True,
            "use_eod_attn_mask_compression": True,
        }  # fmt: skip
        assert content["runner_wrapper"]["scale_sense"] == 1.0
        assert loader["create_compressed_eod_mask"] is True
        assert loader["compressed_eod_mask_length"] == 128
        assert dataset["input_columns"] == dataset["construct_args_key"]
        assert dataset["input_columns"][-1] == "actual_seq_len"

    def test_fixed_and_its_schedules(self):
        lengths = make_lengths([30, 100])
        for kind, name in (
            ("cosine", "CosineWithWarmUpLR"), ("linear", "PolynomialWithWarmUpLR"),
            ("constant", "ConstantWarmUpLR"), ("wsd", "ConstantWarmUpLR"),
        ):  # fmt: skip
            config, _ = tuned(lengths, {"batching.strategy": "fixed", "schedule.kind": kind})
            text = emitted(config, "mindformers")
            content = yaml.safe_load(text)
            assert content["lr_schedule"]["type"] == name
            assert content["lr_schedule"].get("lr_end", 1e-4) == pytest.approx(1e-4)
            assert "dynamic_batch" not in content["train_dataset"]
            assert "pad them to 105 tokens" in comment_of(text)
            assert ("wsd has no counterpart" in text) == (kind == "wsd")


@pytest.mark.parametrize("stack", sorted(STACKS))
def test_a_config_without_shapes_is_refused(stack):
    with pytest.raises(BadInputError, match=r"no provenance\.shapes"):
        hand_over(make_config(), stack, peak_rate=1e-3)


@pytest.mark.parametrize("stack", sorted(STACKS))
def test_held_out_rows_are_said(stack):
    config, _ = tuned(make_lengths(AROUND), bucketed(evaluation={"fraction": 0.1}))
    assert "evaluation.fraction 0.1" in " ".join(emitted(config, stack).split())


def test_nothing_of_mindspore_is_imported():
    code = "import sys, tuner.report.handover; print('mindspore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

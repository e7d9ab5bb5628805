"""Deviation runs: a tiny real model, and processes that die on purpose."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from strategies import make_config

from tuner.batching.plan import resolve_boundaries
from tuner.config.schema import OP_GROUPS, PrecisionConfig
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import MindRecordWriter, open_mindrecord
from tuner.trial.deviation import Deviation, DeviationSpec, Reference
from tuner.trial.fake_deviation import FakeDeviations
from tuner.trial.folder import TrialFolder
from tuner.trial.record import to_json
from tuner.trial.runner import ProcessRunner

LENGTHS = [3, 5, 7, 8] * 4 + [12, 15] * 2
GB = 10**9
TINY = {
    "model.vocab_size": 32,
    "model.width": 32,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.ffn_width": 32,
    "batching.boundaries": [8, 16],
    "batching.tokens_per_batch": 64,
}


def lowered(*groups: str, dtype: str = "fp16") -> PrecisionConfig:
    kept = tuple(group for group in OP_GROUPS if group not in groups)
    return PrecisionConfig(compute_dtype=dtype, fp32_ops=kept)  # type: ignore[arg-type]


VARIANTS = (lowered(), lowered("norms"), lowered("loss"))


def make_spec(folder: Path, **changes) -> DeviationSpec:
    given = {
        "config": make_config({"batching.strategy": "fixed"}),
        "lengths_file": str(folder / "lengths.npy"),
        "variants": VARIANTS,
        "num_batches": 2,
        "time_limit_s": 120.0,
        "memory_limit_bytes": 8 * GB,
    }
    return DeviationSpec(**{**given, **changes})


def real_config(tmp_path, changes):
    """A config whose boundaries hold for rows that are written, and their lengths."""
    rng = np.random.default_rng(3)
    path = tmp_path / "data.mindrecord"
    with MindRecordWriter(path, description={"length_of": "input_ids"}) as writer:
        for length in LENGTHS:
            ids = rng.integers(1, 32, length).astype(np.int32)
            writer.write([{"input_ids": ids, "labels": ids, "length": length}])
    lengths = scan_lengths(open_mindrecord(path))
    np.save(tmp_path / "lengths.npy", lengths.tokens)
    return resolve_boundaries(lengths, make_config({**TINY, "data.path": str(path), **changes}))


@pytest.mark.mindspore
@pytest.mark.slow
def test_a_planted_fault_of_the_norms_is_found(tmp_path):
    # Embeddings whose squares, and an eps, are nothing in fp16: there the norm divides by 0.
    config = real_config(tmp_path, {"model.init_std": 1e-4, "model.norm_eps": 1e-9})
    spec = make_spec(tmp_path, config=config, variants=(lowered(), lowered("norms")))
    found = ProcessRunner().run_deviation(spec, TrialFolder(tmp_path / "0000"))
    base, norms = found.deviations
    assert (base.num_nonfinite_gradients, base.num_nonfinite_losses) == (0, 0)
    assert base.gradient_deviation < 2e-2
    assert norms.num_nonfinite_losses > 0
    assert norms.gradient_deviation is None


@pytest.mark.mindspore
def test_a_real_model_in_lower_precision(tmp_path):
    config = real_config(tmp_path, {"model.init_std": 0.02})
    too_large = PrecisionConfig(
        compute_dtype="fp16", fp32_ops=lowered().fp32_ops, loss_scale=2.0**36
    )
    variants = (*VARIANTS, lowered("loss", dtype="bf16"), PrecisionConfig(), too_large)
    folder = TrialFolder(tmp_path / "a folder" / "0000")
    spec = make_spec(tmp_path, config=config, variants=variants)
    found = ProcessRunner().run_deviation(spec, folder)
    assert (found.status, found.reason) == ("ok", ""), folder.stderr.read_text()[-2000:]
    assert [item.precision for item in found.deviations] == list(variants)
    reference = found.reference
    assert reference is not None
    # The largest shape, then the smallest: 16 rows of at most 8 tokens make two batches of 8, four
    # rows of at most 16 make one of 4.
    assert reference.batches == ((4, 16), (8, 8))
    # Untrained: as good as guessing among 32 ids.
    assert reference.loss == pytest.approx(np.log(32), abs=0.1)
    assert reference.num_gradients == 32 * 32 * (1 + 1 + 0.5 + 0.5 + 1 + 3) + 3 * 32
    base, norms, loss, bf16, fp32, rescaled = found.deviations
    for item in (base, loss, norms):
        assert item.status == "ok"
        assert 0 < item.loss_deviation < 1e-3
        assert 1e-5 < item.gradient_deviation < 2e-2
        assert (item.num_nonfinite_gradients, item.num_nonfinite_losses) == (0, 0)
        assert item.loss_scale == 65536.0
    assert bf16.status == "refused"
    assert "bf16 needs Ascend" in bf16.reason
    assert rescaled.loss_scale in (2.0**20, 2.0**16)
    assert rescaled.gradient_deviation == pytest.approx(base.gradient_deviation, rel=0.3)
    assert (fp32.loss_deviation, fp32.gradient_deviation, fp32.loss_scale) == (0.0, 0.0, None)


REFERENCE = Reference(
    loss=3.5, gradient_norm=2.0, num_gradients=100, label_tokens=50, batches=((2, 8),)
)
MEASURED = Deviation(precision=VARIANTS[0], loss_deviation=1e-4, gradient_deviation=2e-3)
PRELUDE = f"""
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[-1])
REFERENCE, MEASURED = {to_json(REFERENCE)!r}, {to_json(MEASURED)!r}
def measured(*lines):
    (folder / "measured.jsonl").write_text("\\n".join(lines))
def killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_script(tmp_path, script, **changes):
    runner = ProcessRunner(
        deviation_command=[sys.executable, "-c", PRELUDE + textwrap.dedent(script)]
    )
    return runner.run_deviation(make_spec(tmp_path, **changes), TrialFolder(tmp_path / "0000"))


@pytest.mark.parametrize(
    ("script", "changes", "status", "reason"),
    [
        ("killed()", {}, "crashed", "killed by SIGKILL"),
        ("sys.exit('Unable to allocate 3 GB')", {}, "oom", "Unable to allocate"),
        ("time.sleep(60)", {"time_limit_s": 0.7}, "timeout", "over the time limit of 0.7 s"),
        ("bytes(300_000_000); x = bytearray(os.urandom(10**6) * 300); time.sleep(60)",
         {"memory_limit_bytes": 200_000_000}, "oom", "over the limit of 0.20 GB"),
    ],
)  # fmt: skip
def test_what_was_measured_before_a_death_is_kept_and_the_running_one_gets_it(
    tmp_path, script, changes, status, reason
):
    # The last line is cut off, as by the kill.
    found = run_script(tmp_path, f"measured(REFERENCE, MEASURED, MEASURED[:40])\n{script}",
                       **changes)  # fmt: skip
    assert found.status == status
    assert reason in found.reason
    assert found.reference == REFERENCE
    died = Deviation(precision=VARIANTS[1], status=status, reason=found.reason)
    assert found.deviations == (MEASURED, died)
    assert found.wall_s > 0


def test_a_death_before_the_reference_is_no_variants_fault(tmp_path):
    found = run_script(tmp_path, "killed()")
    assert (found.status, found.reference, found.deviations) == ("crashed", None, ())


def test_an_answer_that_misses_variants_is_a_crash(tmp_path):
    script = """
    measured(REFERENCE, MEASURED)
    (folder / "result.json").write_text('{"status": "ok"}')
    """
    found = run_script(tmp_path, script)
    assert found.status == "crashed"
    assert [item.status for item in found.deviations] == ["ok", "crashed"]


def test_the_fake_adds_up_the_lowered_groups(tmp_path):
    fake = FakeDeviations()
    fake.group_deviations = {"norms": (0.1, 0.2, 0), "rope": (0.0, 0.5, 0), "loss": (1.0, 0, 7)}
    fake.products_deviation = (0.01, 0.02, 0)
    variants = (PrecisionConfig(), lowered(), lowered("norms", "rope"), lowered("loss", "norms"))
    spec = make_spec(tmp_path, variants=variants)
    found = fake.run_deviation(spec, TrialFolder(tmp_path)).deviations
    assert [item.loss_deviation for item in found] == pytest.approx([0.0, 0.01, 0.11, 1.11])
    assert [item.gradient_deviation for item in found[:3]] == pytest.approx([0.0, 0.02, 0.72])
    assert found[3].gradient_deviation is None
    assert [item.num_nonfinite_gradients for item in found] == [0, 0, 0, 7]

"""Faults planted in synthetic profiles are found and named with their share; no others are."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from profile_case import (
    COLUMNS_LEVEL0,
    CPU_DETAIL_COLUMNS,
    CPU_TYPE_COLUMNS,
    FRAMEWORK,
    Kernel,
    step_kernels,
    write_kernels,
    write_table,
)

from tuner.diagnose.fallback import read_profile


def found(folder, kernels, **options):
    """Findings of a profile by name; several of a name make a list."""
    write_kernels(folder, kernels, **options)
    findings = {}
    for finding in read_profile(folder).findings:
        findings.setdefault(finding.name, []).append(finding)
    return findings


def test_a_whole_step_has_no_warning(tmp_path):
    findings = found(tmp_path, step_kernels())
    assert set(findings) == {"ai-cpu", "op-states"}
    assert findings["ai-cpu"][0].severity == "ok"
    assert "3 op types" in findings["ai-cpu"][0].what


def test_an_op_on_ai_cpu_that_takes_a_fifth_of_the_step_is_named(tmp_path):
    # 1000 us of others and 250 us of it: 20 %.
    planted = Kernel("CustomNorm", "AI_CPU", 125.0, "8,512,512;512", "8,512,512", calls=2)
    findings = found(tmp_path, [*step_kernels(), planted])
    (finding,) = findings["ai-cpu-op"]
    assert finding.severity == "warning"
    assert "CustomNorm on AI_CPU takes 20 % of the device time" in finding.what
    assert "2 calls of 125 us" in finding.what
    assert "8,512,512;512 FLOAT16" in finding.what
    assert "another op" in finding.fix and "compile it on its own" in finding.fix
    assert "ai-cpu" not in findings
    report = read_profile(tmp_path)
    assert report.findings[0] == finding
    assert report.total_s == pytest.approx(1250e-6)
    ours = next(op for op in report.ops if op.op_type == "CustomNorm")
    assert (ours.core, ours.count) == ("AI_CPU", 2)
    assert ours.share == pytest.approx(0.2)


@pytest.mark.parametrize("core", ["AI_CPU", "AI CPU", "AICPU", "Ai_Cpu"])
def test_the_fall_back_is_found_in_every_spelling(tmp_path, core):
    kernels = [*step_kernels(), Kernel("Sort", core, 250.0, "4096", "4096", data_types="INT64")]
    (finding,) = found(tmp_path, kernels)["ai-cpu-op"]
    assert "takes 20 %" in finding.what and "INT64" in finding.what


def test_small_ops_on_ai_cpu_are_told_together(tmp_path):
    """Five of 5 us beside 1000 us: 0.49 % each, 2.44 % together."""
    small = [Kernel(f"Op{i}", "AI_CPU", 5.0, "8", "8") for i in range(5)]
    findings = found(tmp_path, [*step_kernels(), *small])
    (rest,) = findings["ai-cpu-rest"]
    assert rest.severity == "warning"
    assert "5 more op types on AI_CPU take 2.44 %" in rest.what
    assert "ai-cpu-op" not in findings
    (rest,) = found(tmp_path / "one", [*step_kernels(), *small[:1]])["ai-cpu-rest"]
    assert rest.severity == "note"
    assert "0.498 %" in rest.what


def test_a_small_pad_on_ai_cpu_belongs_to_the_host(tmp_path):
    pad = Kernel("PadV3", "AI_CPU", 60.0, "8,100;6", "8,128", calls=2)
    (finding,) = found(tmp_path, [*step_kernels(), pad])["ai-cpu-pad"]
    assert finding.severity == "warning"
    assert "PadV3 on AI_CPU takes 10.7 %" in finding.what
    assert "pad on the host" in finding.fix
    large = Kernel("PadV3", "AI_CPU", 60.0, "8,1000,1000;6", "8,1024,1024", calls=2)
    findings = found(tmp_path / "large", [*step_kernels(), large])
    assert "ai-cpu-pad" not in findings and "PadV3" in findings["ai-cpu-op"][0].what


def by_length(op_type, us_of, lengths, core="AI_VECTOR_CORE", calls=10):
    return [
        Kernel(op_type, core, us_of(n), f"8,{n},512", f"8,{n},512", calls=calls) for n in lengths
    ]


LENGTHS = (64, 128, 256, 512, 1024)


def test_a_shape_out_of_line_is_named_with_its_factor(tmp_path):
    """All take 0.1 us a position, one takes 10 times that."""
    kernels = by_length("LayerNormV3", lambda n: n * (1.0 if n == 256 else 0.1), LENGTHS)
    (finding,) = found(tmp_path, kernels)["slow-shape"]
    assert finding.severity == "warning"
    assert "LayerNormV3 on AI_VECTOR_CORE at 8,256,512 FLOAT16" in finding.what
    assert "256 us a call, 10 times" in finding.what
    # 256 of 6.4 + 12.8 + 256 + 51.2 + 102.4 us.
    assert "59.7 % of the device time" in finding.what


@pytest.mark.parametrize(
    "kernels",
    [
        # Below the factor.
        by_length("Add", lambda n: n * (0.45 if n == 256 else 0.1), LENGTHS),
        # Starting a kernel takes 5 us, which is all of the time at short lengths.
        by_length("Add", lambda n: 5 + n * 0.001, (1, 4, 16, 4096, 16384)),
        # One other shape does not say which is out of line.
        by_length("Add", lambda n: 300.0 if n == 256 else 10, (256, 512)),
        # Products grow faster than their elements: scores of 512 tokens in all.
        [
            Kernel(
                "BatchMatMul", "AI_CORE", 1e-6 * 512 * n * 64 * 8,
                f"{512 // n},8,{n},64;{512 // n},8,{n},64", f"{512 // n},8,{n},{n}",
            )
            for n in (8, 16, 64, 512)
        ],
        # Attention is not measured by size: the same tokens, 64 times the scores.
        [
            Kernel("FlashAttentionScore", "MIX_AIC", 0.1 * n, f"{4096 // n},{n},512", "")
            for n in (64, 128, 256, 4096)
        ],
    ],
    ids=["factor", "launch", "two shapes", "products", "attention"],
)  # fmt: skip
def test_times_that_follow_from_the_shape_are_in_line(tmp_path, kernels):
    assert "slow-shape" not in found(tmp_path, kernels)


def test_two_shapes_of_five_out_of_line_do_not_hide_each_other(tmp_path):
    kernels = by_length("Add", lambda n: n * (1.0 if n in (256, 512) else 0.1), LENGTHS)
    findings = found(tmp_path, kernels)["slow-shape"]
    assert ["8,256,512" in findings[0].what, "8,512,512" in findings[1].what] == [True, True]


def test_a_slow_shape_below_one_percent_is_not_told(tmp_path):
    slow = by_length("Add", lambda n: 0.1 if n == 64 else n * 1e-5, LENGTHS, calls=10)
    assert "slow-shape" in found(tmp_path, slow)
    assert "slow-shape" not in found(tmp_path / "much", [*step_kernels(), *slow])


def test_an_op_that_leaves_its_core_at_some_shapes_is_named(tmp_path):
    kernels = [
        *by_length("TopK", lambda n: 10.0, (128, 256)),
        *by_length("TopK", lambda n: 50.0, (300,), core="AI_CPU"),
    ]
    findings = found(tmp_path, kernels)
    (finding,) = findings["core-change"]
    assert finding.severity == "warning"
    assert "TopK changes its core with the shape" in finding.what
    assert "AI_CPU: 0.0005 s in 10 calls of 50 us at 8,300,512" in finding.what
    assert "8,128,512 FLOAT16, 8,256,512 FLOAT16" in finding.what
    # Found for its time as well: 500 of 700 us.
    assert "71.4 %" in findings["ai-cpu-op"][0].what


def test_a_mix_product_is_a_note_on_alignment(tmp_path):
    kernels = [
        Kernel("MatMulV3", "AI_CORE", 100.0, "4096,1024;1024,512", "4096,512"),
        Kernel("MatMulV3", "MIX_AIC", 100.0, "4096,1030;1030,512", "4096,512"),
    ]
    (finding,) = found(tmp_path, kernels)["core-change"]
    assert finding.severity == "note" and "512 bytes" in finding.why


def test_one_shape_on_two_cores_is_no_change_by_shape(tmp_path):
    kernels = [
        Kernel("Cast", core, 10.0, "8,512", "8,512") for core in ("AI_CORE", "AI_VECTOR_CORE")
    ]
    assert "core-change" not in found(tmp_path, kernels)


def test_time_in_dynamic_and_static_kernels_is_told(tmp_path):
    kernels = [
        Kernel("Add", "AI_CORE", 30.0, "8", "8", state="dynamic"),
        Kernel("Mul", "AI_CORE", 10.0, "8", "8", state="static"),
        Kernel("hcom_allReduce_", "HCCL", 60.0, state="N/A"),
    ]
    (finding,) = found(tmp_path, kernels)["op-states"]
    assert "dynamic kernels take 75 %, static ones 25 %" in finding.what
    columns = COLUMNS_LEVEL0
    assert "op-states" not in found(tmp_path / "old", kernels, columns=columns)


def test_a_profile_without_cores_is_not_called_free_of_fall_backs(tmp_path):
    kernels = [Kernel("Add", "N/A", 30.0), Kernel("Mul", "", 30.0)]
    (finding,) = found(tmp_path, kernels, columns=COLUMNS_LEVEL0)["ai-cpu"]
    assert finding.severity == "warning" and "Level1" in finding.fix


def test_the_number_of_shapes_is_bounded_and_totals_stay_exact(tmp_path, monkeypatch):
    monkeypatch.setattr("tuner.diagnose.profile_totals.MAX_SHAPES_PER_OP", 20)
    kernels = by_length("Add", lambda n: 1.0, range(1, 101), calls=1)
    kernels += by_length("Sort", lambda n: 1.0, range(1, 101), core="AI_CPU", calls=1)
    kernels += by_length("Mul", lambda n: 1.0, range(1, 11), calls=5)
    findings = found(tmp_path, kernels)
    (finding,) = findings["many-shapes"]
    assert finding.what.startswith("Add, Sort: ")
    assert "takes 40 % of the device time" in findings["ai-cpu-op"][0].what
    report = read_profile(tmp_path)
    assert {op.op_type: op.count for op in report.ops} == {"Add": 100, "Sort": 100, "Mul": 50}


def test_the_number_of_ops_is_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr("tuner.diagnose.profile_totals.MAX_SUMS", 30)
    monkeypatch.setattr("tuner.diagnose.profile_totals.MAX_OPS", 10)
    kernels = [Kernel(f"Op{i}", "AI_CORE", 1.0, "8", "8") for i in range(100)]
    write_kernels(tmp_path, kernels)
    report = read_profile(tmp_path)
    # 30 with their shapes, 10 without, and all others together.
    assert len(report.ops) == 41
    assert (report.ops[0].op_type, report.ops[0].count) == ("(other op types)", 60)
    assert sum(op.count for op in report.ops) == 100


CPU_TYPES = [
    ["MatMul", 248, 62, 852.367, 3.43696, 0.4508],
    ["BatchMatMul", 48, 12, 410.104, 8.54383, 0.2169],
    ["Mul", 372, 93, 171.555, 0.461169, 0.0907],
    ["ReduceSum", 4, 1, 0.068308, 0.017077, 3.61274e-05],
]
CPU_DETAILS = [
    ["Host", "MatMul", f"MatMul-op{i}", f"Default/MatMul-op{i}", 4, 8.0, 2.0, 0.1, "Default", 19]
    for i in range(3)
]


def test_a_profile_of_a_cpu_says_where_the_time_goes(tmp_path):
    """Figures of a real run of 2.10; the columns are all that it has."""
    path = write_table(
        tmp_path / FRAMEWORK / "cpu_op_type_info_0.csv", CPU_TYPE_COLUMNS, CPU_TYPES
    )
    write_table(tmp_path / FRAMEWORK / "cpu_op_detail_info_0.csv", CPU_DETAIL_COLUMNS, CPU_DETAILS)
    report = read_profile(tmp_path)
    assert report.sources == (path,)
    total_ms = 852.367 + 410.104 + 171.555 + 0.068308
    assert report.total_s == pytest.approx(total_ms * 1e-3)
    assert [op.op_type for op in report.ops] == ["MatMul", "BatchMatMul", "Mul", "ReduceSum"]
    assert report.ops[0].share == pytest.approx(852.367 / total_ms)
    assert {op.core for op in report.ops} == {"CPU"}
    (finding,) = report.findings
    assert finding.severity == "note"
    assert "MatMul 59.4 %, BatchMatMul 28.6 %, Mul 12 % and 1 more" in finding.what
    assert "no AI_CPU and no fall-back" in finding.why


def test_details_of_a_cpu_stand_in_for_its_types_even_with_fields_left_out(tmp_path):
    rows = [CPU_DETAILS[0], CPU_DETAILS[1][:-1], CPU_DETAILS[2][:-2]]
    write_table(tmp_path / FRAMEWORK / "cpu_op_detail_info_0.csv", CPU_DETAIL_COLUMNS, rows)
    report = read_profile(tmp_path)
    assert [(op.op_type, op.count) for op in report.ops] == [("MatMul", 12)]
    assert report.total_s == pytest.approx(24e-3)


def test_tables_of_the_host_beside_those_of_a_device_are_ops_on_the_host(tmp_path):
    write_table(tmp_path / FRAMEWORK / "cpu_op_type_info_0.csv", CPU_TYPE_COLUMNS, CPU_TYPES)
    (finding,) = found(tmp_path, step_kernels())["host-ops"]
    assert "4 op types ran on the CPU of the host, for 1.43 s: MatMul" in finding.what
    assert read_profile(tmp_path).total_s == pytest.approx(1e-3)


GIGABYTE = 1_000_000_000
MEMORY_LIMIT = 500_000_000
READ_CODE = """
import json, resource, sys
from pathlib import Path
from tuner.diagnose.fallback import read_profile
report = read_profile(Path(sys.argv[1]))
print(json.dumps({
    "ops": {f"{op.op_type} {op.core}": [op.count, op.total_s] for op in report.ops},
    "findings": {finding.name: finding.what for finding in report.findings},
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def large_block(folder):
    """Some thousand rows as the profiler writes them, with the columns of its default metrics."""
    kernels = [
        kernel
        for n in range(64, 1064)
        for kernel in (
            Kernel("LayerNormV3", "AI_VECTOR_CORE", 0.1 * n, f"8,{n},512;512", f"8,{n},512"),
            Kernel("MatMulV3", "AI_CORE", 0.2 * n, f"{8 * n},512;512,512", f"{8 * n},512"),
            Kernel("Sort", "AI_CPU", 0.1 * n, f"{n}", f"{n}", data_types="INT64"),
        )
    ]
    lines = write_kernels(folder, kernels).read_text().splitlines()
    metrics = [f"{name}_{i}" for name in ("aic", "aiv") for i in range(10)]
    header = ",".join([lines[0], *metrics])
    return header + "\n", "".join(f"{line}{',0.125' * 20}\n" for line in lines[1:])


@pytest.mark.slow
def test_a_table_of_a_gigabyte_is_read_in_bounded_memory(tmp_path):
    header, block = large_block(tmp_path / "block")
    path = tmp_path / "large" / "kernel_details.csv"
    path.parent.mkdir()
    num_blocks = GIGABYTE // len(block)
    # Then 400,000 rows, no two of one shape.
    line = block.splitlines()[0]
    assert line.count("8,64,512") == 2
    with path.open("w", encoding="utf-8") as file:
        file.write(header)
        for _ in range(num_blocks):
            file.write(block)
        for n in range(400_000):
            file.write(
                line.replace("8,64,512", f"{n},65536,512").replace("LayerNormV3", "Add") + "\n"
            )
    assert path.stat().st_size > GIGABYTE
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", READ_CODE, str(path.parent)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    read_s = time.perf_counter() - started
    result = json.loads(done.stdout)
    print(f"{path.stat().st_size} bytes in {read_s:.1f} s, peak {result['peak_bytes']} bytes")
    length_s = num_blocks * sum(range(64, 1064)) * 1e-6
    assert result["ops"] == {
        "MatMulV3 AI_CORE": [1000 * num_blocks, pytest.approx(0.2 * length_s)],
        "LayerNormV3 AI_VECTOR_CORE": [1000 * num_blocks, pytest.approx(0.1 * length_s)],
        "Sort AI_CPU": [1000 * num_blocks, pytest.approx(0.1 * length_s)],
        "Add AI_VECTOR_CORE": [400_000, pytest.approx(400_000 * 6.4e-6)],
    }
    assert "Sort on AI_CPU takes" in result["findings"]["ai-cpu-op"]
    assert result["findings"]["many-shapes"].startswith("Add: ")
    assert result["peak_bytes"] < MEMORY_LIMIT
    assert read_s < 90

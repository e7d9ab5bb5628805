"""Synthetic profiles: made from the documented columns, not by a device.

Numbers are invented; names of columns and files, spellings of cores, the quotes that msprof puts
around shapes and the tab that it puts after start times are as documented and as in public code
that reads such tables.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

OUTPUT = "host_1_20260101000000000_ascend_ms/ASCEND_PROFILER_OUTPUT"
FRAMEWORK = "host_1_20260101000000000_ascend_ms/FRAMEWORK"

COLUMNS_210 = (
    "Model ID", "Task ID", "Stream ID", "Name", "Type", "OP State", "Accelerator Core",
    "Start Time(us)", "Duration(us)", "Wait Time(us)", "Block Num", "Mix Block Num",
    "HF32 Eligible", "Input Shapes", "Input Data Types", "Input Formats", "Output Shapes",
    "Output Data Types", "Output Formats", "Context ID",
)  # fmt: skip
"""kernel_details.csv at Level1, MindSpore 2.10 on CANN 8."""

COLUMNS_OF_MSPROF = {
    "Name": "Op Name",
    "Type": "OP Type",
    "Accelerator Core": "Task Type",
    "Start Time(us)": "Task Start Time(us)",
    "Duration(us)": "Task Duration(us)",
    "Wait Time(us)": "Task Wait Time(us)",
    "Block Num": "Block Dim",
    "Mix Block Num": "Mix Block Dim",
}
"""Column of kernel_details -> the same in op_summary, with the block columns' older names."""

COLUMNS_LEVEL0 = COLUMNS_210[:5] + COLUMNS_210[6:11]

STATISTIC_COLUMNS = (
    "Device_id", "Model Name", "OP Type", "Core Type", "Count", "Total Time(us)", "Min Time(us)",
    "Avg Time(us)", "Max Time(us)", "Ratio(%)",
)  # fmt: skip
CPU_TYPE_COLUMNS = (
    "op_type", "type_occurrences", "execution_frequency(per-step)", "total_compute_time",
    "avg_time(ms)", "percent",
)  # fmt: skip
CPU_DETAIL_COLUMNS = (
    "op_side", "op_type", "op_name", "full_op_name", "op_occurrences", "op_total_time(ms)",
    "op_avg_time(ms)", "total_proportion", "subgraph", "pid",
)  # fmt: skip


class Kernel(NamedTuple):
    """Calls of one kernel, all of the same duration."""

    op_type: str
    core: str
    us: float
    inputs: str = ""
    outputs: str = ""
    calls: int = 1
    state: str = "dynamic"
    data_types: str = "FLOAT16"


def cells_of(kernel: Kernel, number: int) -> dict[str, object]:
    """A row of kernel_details."""
    return {
        "Model ID": 4294967295,
        "Task ID": number,
        "Stream ID": 2,
        "Name": f"Default/network/{kernel.op_type}-op{number}",
        "Type": kernel.op_type,
        "OP State": kernel.state,
        "Accelerator Core": kernel.core,
        "Start Time(us)": f"{1785933978517390 + 10 * number}.140\t",
        "Duration(us)": kernel.us,
        "Wait Time(us)": 0.02,
        "Block Num": 24,
        "Mix Block Num": 0,
        "HF32 Eligible": "NO",
        "Input Shapes": f'"{kernel.inputs}"',
        "Input Data Types": kernel.data_types,
        "Input Formats": "ND",
        "Output Shapes": f'"{kernel.outputs}"',
        "Output Data Types": kernel.data_types,
        "Output Formats": "ND",
        "Context ID": "N/A",
    }


def write_kernels(
    folder: Path,
    kernels: Iterable[Kernel],
    *,
    name: str = f"{OUTPUT}/kernel_details.csv",
    columns: Iterable[str] = COLUMNS_210,
    spelling: Mapping[str, str] | None = None,
) -> Path:
    """A kernel_details.csv below a folder; spelling renames columns."""
    columns = list(columns)
    called = [kernel for kernel in kernels for _ in range(kernel.calls)]
    rows = [cells_of(kernel, number) for number, kernel in enumerate(called)]
    header = [(spelling or {}).get(column, column) for column in columns]
    return write_table(
        folder / name, header, ([row[column] for column in columns] for row in rows)
    )


def write_table(path: Path, header: Iterable[str], rows: Iterable[Iterable[object]]) -> Path:
    """Any table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    return path


def step_kernels() -> list[Kernel]:
    """A step without a fault: 1000 us in all."""
    return [
        Kernel("MatMulV3", "AI_CORE", 100.0, "4096,512;512,512", "4096,512", calls=6),
        Kernel("LayerNormV3", "AI_VECTOR_CORE", 20.0, "8,512,512;512;512", "8,512,512", calls=10),
        Kernel("Cast", "AI_VECTOR_CORE", 20.0, "8,512,512", "8,512,512", calls=10),
    ]

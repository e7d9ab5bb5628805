"""Device and versions: with `graph.py` the only place that knows what MindSpore offers where.

Memory figures are labelled: MindSpore reports none on CPU (all zeros in 2.10), so there it is the
resident set of the process; on Ascend it is the device memory pool.
"""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

import mindspore as ms
import numpy as np
import psutil

from tuner import __version__
from tuner.config.schema import PrecisionConfig, TrainConfig
from tuner.errors import BadInputError

CPU = "CPU"
ASCEND = "Ascend"

CACHE_VARIABLE = "MS_COMPILER_CACHE_ENABLE"
"""MindSpore's switch of its compile cache, read at every compile."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of this process.

    Attributes:
        name: `CPU` or `Ascend`.
        memory_kind: What the memory figures are.
    """

    name: str
    memory_kind: str


def open_device(config: TrainConfig, device_id: int = 0) -> Device:
    """Set the process up for the config's device, in graph mode. Call it once, first.

    MindSpore's own compile cache is switched off; `compile_cache` alone switches it on.

    Args:
        config: Device, graph and precision.
        device_id: Of several Ascend devices the one to take; CPU has one.

    Raises:
        BadInputError: the config asks for a device, a jit_level or a dtype that is not to be had.
    """
    name = _choose(config.device)
    if config.graph.jit_level == "O2" and (name != ASCEND or config.graph.mode != "static"):
        raise BadInputError(
            "graph.jit_level O2 needs Ascend with graph.mode static "
            f"(here: {name}, {config.graph.mode})",
            fix="set graph.jit_level to O0 or O1",
        )
    check_precision(config.precision, name)
    # It makes MindSpore take graphs from the disk by their place in the order of compiles, with
    # no look at what they are, and would have a trial measure no compile.
    os.environ.pop(CACHE_VARIABLE, None)
    if name == ASCEND:
        ms.set_device(name, device_id)
    else:
        ms.set_device(name)
    ms.set_context(mode=ms.GRAPH_MODE)
    return Device(
        name=name, memory_kind="device pool" if name == ASCEND else "resident set of the process"
    )


def check_precision(precision: PrecisionConfig, device_name: str) -> None:
    """Refuse a dtype that a device does not compute in.

    Raises:
        BadInputError: bf16 elsewhere than on Ascend.
    """
    if precision.compute_dtype == "bf16" and device_name != ASCEND:
        raise BadInputError(
            "precision.compute_dtype bf16 needs Ascend: MindSpore has no bf16 kernels for CPU",
            fix="set precision.compute_dtype to fp16 or fp32",
        )


def memory_bytes(device: Device) -> int:
    """Memory in use now, in bytes, of the kind that the device says."""
    if device.name == ASCEND:
        return int(ms.runtime.memory_reserved())
    return int(psutil.Process().memory_info().rss)


def peak_memory_bytes(device: Device) -> int:
    """Largest memory of this process so far, in bytes, of the kind that the device says."""
    if device.name == ASCEND:
        return int(ms.runtime.max_memory_reserved())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kilobytes, macOS bytes.
    return peak if platform.system() == "Darwin" else peak * 1024


def installed_versions() -> dict[str, str]:
    """Versions that change results or timings, for provenance."""
    return {
        "varseq_tuner": __version__,
        "mindspore": ms.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def cann_version() -> str:
    """Version of CANN, the software below MindSpore on Ascend; empty without it."""
    home = os.environ.get("ASCEND_HOME_PATH", "")
    file = Path(home) / "compiler" / "version.info"
    if not home or not file.is_file():
        return ""
    return file.read_text(encoding="utf-8", errors="replace").strip()


def _choose(wanted: str) -> str:
    if wanted == "cpu":
        return CPU
    if ms.device_context.ascend.is_available():
        return ASCEND
    if wanted == "ascend":
        raise BadInputError(
            "device is ascend, but MindSpore finds no Ascend device here",
            fix="install the Ascend package of MindSpore with CANN, or set device to cpu or auto",
        )
    return CPU

"""Device and versions: with `graph.py` the only place that knows what MindSpore offers where.

Memory figures are labelled: MindSpore reports none on CPU (all zeros in 2.10), so there it is the
resident set of the process; on Ascend it is the device memory pool.
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import psutil

from tuner import __version__
from tuner.config.schema import MemoryConfig, PrecisionConfig, TrainConfig
from tuner.errors import BadInputError
from tuner.train.flash import attention_of
from tuner.train.graph import level_refusal, level_warning

CPU = "CPU"
ASCEND = "Ascend"

CACHE_VARIABLE = "MS_COMPILER_CACHE_ENABLE"
"""MindSpore's switch of its compile cache, read at every compile."""

ALLOCATOR_VARIABLE = "MS_ALLOC_CONF"
"""MindSpore's settings of its allocator, `key:value` with commas, read when the pool is opened."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of this process.

    Attributes:
        name: `CPU` or `Ascend`.
        memory_kind: What the memory figures are.
        notes: What to know about the settings it was opened with, a line each.
    """

    name: str
    memory_kind: str
    notes: tuple[str, ...] = ()


def open_device(config: TrainConfig, device_id: int = 0) -> Device:
    """Set the process up for the config's device, in graph mode. Call it once, first.

    MindSpore's own compile cache is switched off; `compile_cache` alone switches it on.

    Args:
        config: Device, graph, precision and memory.
        device_id: Of several Ascend devices the one to take; CPU has one.

    Raises:
        BadInputError: the config asks for a device, a jit_level, a dtype or an attention that is
            not to be had.
    """
    name = _choose(config.device)
    level = config.graph.jit_level
    check_fits(config, name)
    # It makes MindSpore take graphs from the disk by their place in the order of compiles, with
    # no look at what they are, and would have a trial measure no compile.
    os.environ.pop(CACHE_VARIABLE, None)
    warning = level_warning(level, ms.__version__)
    notes = [] if warning is None else [warning]
    if name == ASCEND:
        notes += _open_ascend(config, device_id)
    else:
        ms.set_device(name)
        if config.memory is not None:
            notes.append("memory has no effect on CPU: MindSpore has a memory pool on Ascend only")
    ms.set_context(mode=ms.GRAPH_MODE)
    return Device(
        name=name,
        memory_kind="device pool" if name == ASCEND else "resident set of the process",
        notes=tuple(notes),
    )


def check_fits(config: TrainConfig, device_name: str) -> None:
    """Refuse what a device, or this MindSpore on it, does not take.

    Args:
        config: Graph, precision and attention; rows and batches are looked at by the model.
        device_name: `CPU` or `Ascend`.

    Raises:
        BadInputError: a jit_level, a dtype or an attention that is not to be had.
    """
    graph = config.graph
    refusal = level_refusal(graph.jit_level, graph.mode, device_name, ms.__version__)
    if refusal is not None:
        raise BadInputError(refusal, fix="set graph.jit_level to O0 or O1")
    check_precision(config.precision, device_name)
    attention_of(config, device_name, max_length=1)


def _open_ascend(config: TrainConfig, device_id: int) -> list[str]:
    """From the documentation, not run: variable, then device, then pool, before any op."""
    memory = config.memory
    if memory is None:
        ms.set_device(ASCEND, device_id)
        return []
    before = os.environ.get(ALLOCATOR_VARIABLE, "")
    os.environ.update(allocator_variables(memory, before))
    ms.set_device(ASCEND, device_id)
    notes = memory_notes(config)
    arguments = pool_arguments(memory)
    if arguments and not set_pool_once(ms.runtime.set_memory, arguments):
        notes.append(
            "memory was set before in this process, which MindSpore allows once: these settings "
            "have no effect"
        )
    return notes


def pool_arguments(memory: MemoryConfig) -> dict[str, str]:
    """Arguments of `mindspore.runtime.set_memory`; empty if it need not be called.

    Sizes are texts of at most two decimals with GB behind, such as 2.5GB (MindSpore 2.10).
    """
    sizes = {
        "max_size": memory.max_size_gb,
        "init_size": memory.init_size_gb,
        "increase_size": memory.increase_size_gb,
    }
    arguments = {
        name: f"{size:.2f}".rstrip("0").rstrip(".") + "GB"
        for name, size in sizes.items()
        if size is not None
    }
    if memory.optimize_level is not None:
        arguments["optimize_level"] = memory.optimize_level
    return arguments


def allocator_variables(memory: MemoryConfig, before: str) -> dict[str, str]:
    """What the environment must hold before MindSpore opens the device.

    Args:
        memory: The section.
        before: MS_ALLOC_CONF as the user has set it; its other keys stay.
    """
    if memory.enable_vmm is None:
        return {}
    others = [part for part in before.split(",") if part.strip()]
    kept = [part for part in others if part.partition(":")[0].strip() != "enable_vmm"]
    return {ALLOCATOR_VARIABLE: ",".join([*kept, f"enable_vmm:{str(memory.enable_vmm).lower()}"])}


def memory_notes(config: TrainConfig) -> list[str]:
    """What to know about memory settings on Ascend, a line each."""
    memory = config.memory
    if memory is None or memory.optimize_level != "O1" or config.graph.mode != "dynamic":
        return []
    return [
        "memory.optimize_level O1 plans memory for shapes that are known when a graph is "
        "compiled: with graph.mode dynamic there are none"
    ]


def set_pool_once(set_memory: Callable[..., object], arguments: Mapping[str, str]) -> bool:
    """Set the pool's sizes; False if this process has done so before.

    Args:
        set_memory: `mindspore.runtime.set_memory`.
        arguments: Of `pool_arguments`.

    Raises:
        BadInputError: MindSpore does not take them; says what it says.
    """
    try:
        set_memory(**arguments)
    except RuntimeError as error:
        if "repeatedly" in str(error):
            return False
        raise
    except ValueError as error:
        given = ", ".join(f"{name} {value}" for name, value in arguments.items())
        raise BadInputError(
            f"MindSpore refuses the section memory ({given}): {error}", fix="mend the section"
        ) from None
    return True


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


def device_model(device_name: str, mindspore: Any = ms) -> str:
    """Model of the first device, for example Ascend910B2; empty where MindSpore does not say.

    Args:
        device_name: `CPU` or `Ascend`.
        mindspore: The package; `hal.get_device_name` came with 2.3. From the documentation, not
            run on Ascend.
    """
    ask: Any = getattr(getattr(mindspore, "hal", None), "get_device_name", None)
    if device_name != ASCEND or ask is None:
        return ""
    try:
        return str(ask(0) or "")
    except (RuntimeError, ValueError, TypeError):
        return ""


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


def has_ascend(mindspore: Any = ms) -> bool:
    """Whether MindSpore can compute on Ascend here: its package and a device.

    Args:
        mindspore: The package; `device_context` came with 2.6.
    """
    ascend: Any = getattr(getattr(mindspore, "device_context", None), "ascend", None)
    if not hasattr(ascend, "is_available"):
        return False
    try:
        if not ascend.is_available():
            return False
        return not hasattr(ascend, "device_count") or ascend.device_count() > 0
    except (RuntimeError, OSError, AttributeError):
        # A driver or a plugin that is there and does not load.
        return False


def _choose(wanted: str) -> str:
    if wanted == "cpu":
        return CPU
    if has_ascend():
        return ASCEND
    if wanted == "ascend":
        raise BadInputError(
            "device is ascend, but MindSpore finds no Ascend device here",
            fix="install the Ascend package of MindSpore with CANN, or set device to cpu or auto",
        )
    return CPU

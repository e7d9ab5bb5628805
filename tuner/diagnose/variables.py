"""Environment variables that change how MindSpore and HCCL run, and what they are set to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tuner.diagnose.finding import Finding
from tuner.simulate.warm_up_time import CONNECT, EXECUTE, LEAST_EXECUTE_S

SHORT_TIMEOUT_S = 300
"""Warm-up of some dozens of graphs takes longer than this on an NPU."""

ALLOC_KEYS = frozenset(
    {
        "enable_vmm",
        "vmm_align_size",
        "memory_tracker",
        "memory_tracker_path",
        "simple_tracker",
        "acl_allocator",
        "somas_whole_block",
    }
)
"""Keys of MS_ALLOC_CONF, MindSpore's list of environment variables, 2.4.10 to 2.10."""


def check_variables(environment: Mapping[str, str]) -> list[Finding]:
    """What is set and matters; all is well if nothing is.

    Args:
        environment: Of the process.
    """
    found = []
    for name, check in CHECKS.items():
        value = environment.get(name, "")
        finding = check(value) if value else None
        if finding is not None:
            found.append(finding)
    if not found:
        found.append(
            Finding(
                name="variables", severity="ok", what="no environment variable stands in the way"
            )
        )
    return found


def _compiler_cache(value: str) -> Finding | None:
    if value not in ("1", "true", "True"):
        return None
    return Finding(
        name="compiler-cache",
        severity="note",
        what=f"MS_COMPILER_CACHE_ENABLE={value}",
        why="MindSpore finds kept graphs by the order of compiles alone and may take a wrong one "
        "without a word; varseq-train and varseq-tune switch it off",
        fix="unset it, and set graph.compile_cache: true, which checks every kept graph",
    )


def _auto_dynamic(value: str) -> Finding | None:
    if value != "1":
        return None
    return Finding(
        name="auto-dynamic-shape",
        severity="warning",
        what="MS_AUTO_DYNAMIC_SHAPE_ENABLE=1",
        why="from the third shape on MindSpore makes one dynamic graph of static ones, and what "
        "was measured of these does not hold",
        fix="unset it; graph.mode chooses",
    )


def _alloc_conf(value: str) -> Finding | None:
    pairs = dict(part.split(":", 1) for part in value.split(",") if ":" in part)
    settings = {key.strip(): text.strip() for key, text in pairs.items()}
    unknown = sorted(set(settings) - ALLOC_KEYS)
    if unknown or len(settings) != len([part for part in value.split(",") if part.strip()]):
        return Finding(
            name="alloc-conf-unknown",
            severity="warning",
            what=f"MS_ALLOC_CONF={value} has parts that MindSpore does not know"
            + (f": {', '.join(unknown)}" if unknown else ""),
            why="they are passed over without a word",
            fix="write key:value,key:value with keys of " + ", ".join(sorted(ALLOC_KEYS)),
        )
    if settings.get("enable_vmm", "true").lower() == "false":
        return Finding(
            name="vmm-off",
            severity="warning",
            what="MS_ALLOC_CONF switches enable_vmm off",
            why="the memory pool then only grows in blocks, and many shapes fragment it until it "
            "runs out",
            fix="leave enable_vmm out, or true",
        )
    return None


def _connect_timeout(value: str) -> Finding | None:
    return _timeout(CONNECT, value, "a rank that still compiles is taken for a dead one")


def _execute_timeout(value: str) -> Finding | None:
    if value.strip() == "0":
        return Finding(
            name="hccl-exec-timeout",
            severity="warning",
            what=f"{EXECUTE}=0 does not switch the limit off: the default holds, "
            f"{LEAST_EXECUTE_S:,} s (1,800 s in older versions of CANN)",
            why="a rank that waits longer ends with EI0002",
            fix="give the seconds that you mean, for example 7200",
        )
    return _timeout(EXECUTE, value, "a rank that waits for a compile elsewhere ends with EI0002")


def _timeout(name: str, value: str, why: str) -> Finding | None:
    stable_name = name.lower().replace("_", "-")
    if not re.fullmatch(r"\s*\d+\s*", value):
        return Finding(
            name=stable_name,
            severity="warning",
            what=f"{name}={value} is no whole number of seconds",
            why="the default holds instead",
            fix=f"export {name}=3600",
        )
    if int(value) >= SHORT_TIMEOUT_S:
        return None
    return Finding(
        name=stable_name,
        severity="warning",
        what=f"{name}={int(value)} s",
        why=why,
        fix=f"export {name}=3600, or more than the warm-up of all shapes takes",
    )


def _saturation(value: str) -> Finding | None:
    if value != "SATURATION_MODE":
        return None
    return Finding(
        name="saturation-mode",
        severity="note",
        what="MS_ASCEND_CHECK_OVERFLOW_MODE=SATURATION_MODE",
        why="overflows become the largest number instead of inf, and gradients show none of them",
        fix="unset it on Atlas A2 and later; 910A has no other mode",
    )


def _simulation(value: str) -> Finding | None:
    return Finding(
        name="simulation-level",
        severity="error",
        what=f"MS_SIMULATION_LEVEL={value}: a dry run of MindSpore's",
        why="graphs are compiled but compute nothing",
        fix="unset it",
    )


def _blocking(name: str) -> Callable[[str], Finding | None]:
    def check(value: str) -> Finding | None:
        if value not in ("1", "true", "True"):
            return None
        return Finding(
            name="launch-blocking",
            severity="warning",
            what=f"{name}={value}",
            why="every operator is waited for: timings are those of debugging",
            fix="unset it",
        )

    return check


def _rank_table(value: str) -> Finding | None:
    return Finding(
        name="rank-table",
        severity="note",
        what=f"RANK_TABLE_FILE={value}",
        why="msrun needs none, and MindSpore drops its fused check of overflows with one",
        fix="unset it when starting with msrun",
    )


def _visible(value: str) -> Finding | None:
    return Finding(
        name="visible-devices",
        severity="note",
        what=f"ASCEND_RT_VISIBLE_DEVICES={value}",
        why="device numbers count within these",
    )


def _log_level(value: str) -> Finding | None:
    if value not in ("0", "1"):
        return None
    return Finding(
        name="verbose-log",
        severity="warning",
        what=f"GLOG_v={value}",
        why="MindSpore writes a line for nearly everything it does, which slows every step",
        fix="unset it, or 2 for warnings",
    )


CHECKS: Mapping[str, Callable[[str], Finding | None]] = {
    "MS_COMPILER_CACHE_ENABLE": _compiler_cache,
    "MS_AUTO_DYNAMIC_SHAPE_ENABLE": _auto_dynamic,
    "MS_ALLOC_CONF": _alloc_conf,
    CONNECT: _connect_timeout,
    EXECUTE: _execute_timeout,
    "MS_ASCEND_CHECK_OVERFLOW_MODE": _saturation,
    "MS_SIMULATION_LEVEL": _simulation,
    "ASCEND_LAUNCH_BLOCKING": _blocking("ASCEND_LAUNCH_BLOCKING"),
    "RANK_TABLE_FILE": _rank_table,
    "ASCEND_RT_VISIBLE_DEVICES": _visible,
    "GLOG_v": _log_level,
}

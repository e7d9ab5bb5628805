"""What is out of order in the sums of a profile: one rule, one function.

Shares are of the seconds of all ops in the profile. Rules for Ascend were tested on tables made
from the documented columns, not on a device.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby

from tuner.diagnose.finding import SEVERITIES, Finding, Severity
from tuner.diagnose.profile_totals import (
    AI_CPU,
    COMPUTE_CORES,
    MAX_SHAPES_PER_OP,
    NO_CORE,
    KernelTotals,
    OpKey,
    OpSum,
)
from tuner.diagnose.profile_work import work_of

Sums = Mapping[OpKey, OpSum]

LEAST_SHARE = 0.01
"""Of all time; below it an op is not worth a warning."""

SLOW_FACTOR = 5.0
"""Times the median at other shapes; sizes, formats and caches explain less."""

LEAST_OTHER_SHAPES = 2
"""One other shape does not say which of the two is out of line."""

SMALL_PAD_ELEMENTS = 1 << 20
SHOWN = 3
"""Shapes or ops that a line names."""

CURES = (
    "use an op that the device has a kernel for: another op, or another data type; or fix the "
    "shape of this one: take it out and compile it on its own, or train with graph.mode static "
    "and bucketed batches"
)
"""The two of the article that this project follows."""


def find_on_ascend(totals: KernelTotals) -> list[Finding]:
    """All rules for kernels of a device."""
    sums = totals.sums
    return [
        *find_ai_cpu_ops(sums),
        *find_slow_shapes(sums),
        *find_core_changes(sums),
        *find_op_states(sums),
        *_find_bounds(totals),
    ]


def find_ai_cpu_ops(sums: Sums) -> list[Finding]:
    """Ops on AI_CPU: each from LEAST_SHARE on, the rest together; small pads by themselves."""
    total_us = _us(sums)
    if all(key.core == NO_CORE for key in sums):
        return [_no_cores()]
    fallen = {key: found for key, found in sums.items() if key.core == AI_CPU}
    if not fallen:
        what = f"no op ran on AI_CPU: {len({key.op_type for key in sums})} op types"
        return [Finding(name="ai-cpu", severity="ok", what=what)]
    findings, rest = [], {}
    for op_type, ours in _by_op(fallen).items():
        share = _us(ours) / total_us if total_us else 0.0
        if _is_small_pad(op_type, ours):
            findings.append(_pad_finding(op_type, ours, share))
        elif share >= LEAST_SHARE:
            findings.append(_ai_cpu_finding(op_type, ours, share))
        else:
            rest.update(ours)
    if rest:
        share = _us(rest) / total_us if total_us else 0.0
        findings.append(
            Finding(
                name="ai-cpu-rest",
                severity=_severity(share),
                what=f"{len(_by_op(rest))} more op types on AI_CPU take {_percent(share)} of the "
                f"device time: {_listed(_longest(rest, total_us))}",
                why="none of them alone takes 1 %",
                fix=CURES if share >= LEAST_SHARE else "",
            )
        )
    return findings


def find_slow_shapes(sums: Sums) -> list[Finding]:
    """Shapes at which an op takes SLOW_FACTOR times what its other shapes lead to expect.

    Expected of a call: the median of time per work (`work_of`) at the type's other shapes, times
    the work; but no less than its fastest call at any other shape, since starting a kernel takes
    as long however little there is to do. Ops on AI_CPU have a finding already.
    """
    total_us = _us(sums)
    findings = []
    for op_type, ours in _by_op(sums).items():
        calls = _calls_by_shapes(op_type, ours)
        for key, (work, call_us) in calls.items():
            share = ours[key].total_us / total_us if total_us else 0.0
            if share < LEAST_SHARE or key.core == AI_CPU:
                continue
            shapes = key.input_shapes
            others = [call for other, call in calls.items() if other.input_shapes != shapes]
            if len(others) < LEAST_OTHER_SHAPES:
                continue
            rate = statistics.median(us / size for size, us in others)
            expected_us = max(rate * work, min(us for _, us in others))
            if expected_us > 0 and call_us > SLOW_FACTOR * expected_us:
                findings.append(_slow_finding(key, ours[key], expected_us, share))
    return findings


def find_core_changes(sums: Sums) -> list[Finding]:
    """Ops that ran on one core at some shapes and on another at others."""
    findings = []
    for op_type, ours in _by_op(sums).items():
        shapes: dict[str, set[str]] = defaultdict(set)
        for key in ours:
            if key.input_shapes and key.core in {AI_CPU, *COMPUTE_CORES}:
                shapes[key.core].add(key.input_shapes)
        # The same shapes on two cores differ by something else, such as the data type.
        if len(shapes) > 1 and set.intersection(*shapes.values()) != set.union(*shapes.values()):
            findings.append(_change_finding(op_type, ours, sorted(shapes)))
    return findings


def find_op_states(sums: Sums) -> list[Finding]:
    """Time in kernels compiled for any shape and for one, if the profiler says (CANN 8.0 on)."""
    us: dict[str, float] = defaultdict(float)
    for key, found in sums.items():
        us[key.state] += found.total_us
    told_us = us["dynamic"] + us["static"]
    if not told_us:
        return []
    share = us["dynamic"] / told_us
    return [
        Finding(
            name="op-states",
            severity="note",
            what=f"dynamic kernels take {_percent(share)}, static ones {_percent(1 - share)} of "
            "the device time of ops with a known state",
            why="a dynamic kernel serves any shape, a static one is compiled for its own",
        )
    ]


def find_on_host(totals: KernelTotals) -> list[Finding]:
    """Ops on the CPU of the host beside those of the device (from the profiler's source, not run).

    `ProfilerContext.device_target_set` of 2.10 always holds the CPU.
    """
    sums = totals.sums
    if not sums:
        return []
    return [
        Finding(
            name="host-ops",
            severity="note",
            what=f"{len(_by_op(sums))} op types ran on the CPU of the host, for "
            f"{seconds_of(sums):.3g} s: {_listed(_longest(sums, _us(sums)))}",
            why="each waits for data to come from the device and to go back",
            fix="have them computed when the data is prepared, or by ops of the device",
        )
    ]


def find_on_cpu(totals: KernelTotals) -> list[Finding]:
    """Of a profile of a CPU: where the time goes."""
    sums = totals.sums
    return [
        Finding(
            name="cpu-profile",
            severity="note",
            what=f"a profile of a CPU: of {seconds_of(sums):.3g} s in ops, "
            f"{_listed(_longest(sums, _us(sums)))}",
            why="a CPU has no AI_CPU and no fall-back, so none is looked for",
            fix="to look for fall-backs, profile on the NPU",
        ),
        *_find_bounds(totals),
    ]


def seconds_of(sums: Sums) -> float:
    """Seconds of all calls."""
    return _us(sums) * 1e-6


def largest_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The most severe first, else in their order."""
    return tuple(sorted(findings, key=lambda one: -SEVERITIES.index(one.severity)))


def _no_cores() -> Finding:
    return Finding(
        name="ai-cpu",
        severity="warning",
        what="the profile does not say on which cores ops ran",
        why="so a fall-back cannot be seen; profiles at Level0 hold no cores and no shapes",
        fix="profile with profiler_level Level1, as StepProfiler does",
    )


def _ai_cpu_finding(op_type: str, ours: Sums, share: float) -> Finding:
    return Finding(
        name="ai-cpu-op",
        severity="warning",
        what=f"{op_type} on AI_CPU takes {_percent(share)} of the device time: {_calls(ours)}",
        why="the device has no kernel for it at these shapes or data types, so it runs on the "
        "slow cores of the NPU, and others wait for it",
        fix=CURES,
    )


def _pad_finding(op_type: str, ours: Sums, share: float) -> Finding:
    return Finding(
        name="ai-cpu-pad",
        severity=_severity(share),
        what=f"{op_type} on AI_CPU takes {_percent(share)} of the device time: {_calls(ours)}",
        # github.com/vllm-project/vllm-ascend/pull/4630
        why="padding a small tensor falls back to AI_CPU and takes over 50 us there",
        fix="pad on the host, when the batch is made; or write into a tensor of zeros",
    )


def _slow_finding(key: OpKey, found: OpSum, expected_us: float, share: float) -> Finding:
    call_us = found.total_us / found.count
    return Finding(
        name="slow-shape",
        severity="warning",
        what=f"{key.op_type} on {key.core} at {_shown(key, found)} takes {call_us:.4g} us a call, "
        f"{call_us / expected_us:.3g} times what its other shapes lead to expect; "
        f"{_percent(share)} of the device time",
        why="a time out of line with its shape means a poor kernel for that shape, or a fall-back",
        fix=f"choose lengths without it (batching.boundaries, batching.align); else {CURES}",
    )


def _change_finding(op_type: str, ours: Sums, cores: list[str]) -> Finding:
    parts = []
    for core in cores:
        part = {key: found for key, found in ours.items() if key.core == core}
        parts.append(f"{core}: {_calls(part)}")
    if AI_CPU in cores:
        why, fix = "at some shapes only it falls back to AI_CPU", CURES
    elif "MIX_AIC" in cores and "matmul" in op_type.lower():
        why = (
            "documented: a MatMul whose inner axis is over 1000 and not aligned to 512 bytes "
            "becomes a MIX op"
        )
        fix = "compare both in time; a multiple of 256 in 16 bits, of 128 in 32, is aligned"
    else:
        why, fix = "kernels for different cores are of different speed", "compare both in time"
    return Finding(
        name="core-change",
        severity="warning" if AI_CPU in cores else "note",
        what=f"{op_type} changes its core with the shape; {'; '.join(parts)}",
        why=why,
        fix=fix,
    )


def _find_bounds(totals: KernelTotals) -> list[Finding]:
    names = totals.bounded_ops
    if not names:
        return []
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [
        Finding(
            name="many-shapes",
            severity="note",
            what=f"{', '.join(names[:SHOWN])}{more}: over {MAX_SHAPES_PER_OP} shapes of an op, or "
            "too many in all; those that came later are summed as one",
            why="totals by op are exact, but a slow shape among these is not seen",
            fix="profile fewer steps",
        )
    ]


def _calls_by_shapes(op_type: str, ours: Sums) -> dict[OpKey, tuple[float, float]]:
    """Work and mean microseconds of a call, where both are known."""
    calls = {}
    for key, found in ours.items():
        work = work_of(op_type, key.input_shapes, found.output_shapes)
        if work is not None:
            calls[key] = (work, found.total_us / found.count)
    return calls


def _is_small_pad(op_type: str, ours: Sums) -> bool:
    """Also without any shapes: the advice costs little."""
    name = op_type.lower()
    if "pad" not in name or "unpad" in name:
        return False
    works = (work_of(op_type, key.input_shapes, ours[key].output_shapes) for key in ours)
    return all(work is None or work <= SMALL_PAD_ELEMENTS for work in works)


def _severity(share: float) -> Severity:
    return "warning" if share >= LEAST_SHARE else "note"


def _by_op(sums: Sums) -> dict[str, dict[OpKey, OpSum]]:
    ordered = sorted(sums.items(), key=lambda item: item[0].op_type)
    return {name: dict(items) for name, items in groupby(ordered, lambda item: item[0].op_type)}


def _us(sums: Sums) -> float:
    return sum(found.total_us for found in sums.values())


def _longest(sums: Sums, total_us: float) -> list[str]:
    """Op types with their share of a total, the longest first."""
    by_us = sorted(((_us(ours), name) for name, ours in _by_op(sums).items()), reverse=True)
    return [f"{name} {_percent(us / total_us if total_us else 0.0)}" for us, name in by_us]


def _calls(ours: Sums) -> str:
    """Seconds, calls and the shapes that take most of it."""
    count = sum(found.count for found in ours.values())
    by_us = sorted(ours.items(), key=lambda item: -item[1].total_us)
    shapes = list(dict.fromkeys(_shown(key, found) for key, found in by_us))
    where = f" at {_listed(shapes)}" if any(key.input_shapes for key in ours) else ""
    call_us = _us(ours) / count
    return f"{seconds_of(ours):.3g} s in {count} calls of {call_us:.4g} us{where}"


def _shown(key: OpKey, found: OpSum) -> str:
    return " ".join(filter(None, (key.input_shapes or "shapes not told", found.data_types)))


def _listed(texts: list[str]) -> str:
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"

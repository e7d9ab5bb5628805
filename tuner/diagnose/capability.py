"""What works here, found by doing it: a small step of each kind in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.config.override import override_config
from tuner.config.schema import DataConfig, ModelConfig, TrainConfig
from tuner.diagnose.finding import Finding
from tuner.trial.folder import TrialFolder
from tuner.trial.record import TrialResult, TrialSpec
from tuner.trial.runner import TrialRunner

WORKER_COMMAND = (sys.executable, "-m", "tuner.diagnose.capability_worker")

SHAPE = (2, 32)
TIMED_STEPS = 3
TIME_LIMIT_S = 40.0
MEMORY_LIMIT_BYTES = 4 * 10**9


@dataclass(frozen=True, kw_only=True)
class Capability:
    """One kind of step.

    Attributes:
        name: As it is printed and as machines know it.
        changes: Of the small config, by dotted names.
        is_needed: Whether nothing runs without it; others are choices.
    """

    name: str
    changes: dict[str, object]
    is_needed: bool = False


@dataclass(frozen=True, kw_only=True)
class CapabilityResult:
    """What came of one.

    Attributes:
        capability: What was tried.
        result: As of a trial: status, reason, seconds, memory.
    """

    capability: Capability
    result: TrialResult

    @property
    def works(self) -> bool:
        """Whether the step ran and gave a number."""
        return self.result.status == "ok"


CAPABILITIES = (
    Capability(name="static graph, O0, fp32", changes={}, is_needed=True),
    Capability(name="dynamic graph, O0, fp32", changes={"graph.mode": "dynamic"}),
    Capability(name="static graph, O1, fp32", changes={"graph.jit_level": "O1"}),
    Capability(name="static graph, O2, fp32", changes={"graph.jit_level": "O2"}),
    Capability(name="fp16", changes={"precision.compute_dtype": "fp16"}),
    Capability(name="bf16", changes={"precision.compute_dtype": "bf16"}),
    Capability(
        name="flash attention, fp16",
        changes={"graph.attention": "flash", "precision.compute_dtype": "fp16"},
    ),
)


def small_config(device: str) -> TrainConfig:
    """A decoder of one layer and width 32 that needs no data.

    Args:
        device: `auto`, `cpu` or `ascend`, as a config has it.
    """
    model = ModelConfig(
        vocab_size=64, width=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_width=64
    )
    config = TrainConfig(data=DataConfig(path=""), model=model)
    return override_config(config, {"device": device})


def try_capabilities(
    runner: TrialRunner,
    folder: Path,
    device: str,
    on_result: Callable[[CapabilityResult], None],
    capabilities: Sequence[Capability] = CAPABILITIES,
) -> list[CapabilityResult]:
    """Try each in turn, so that none disturbs another's seconds.

    Args:
        runner: Runs `capability_worker`.
        folder: For what the processes write; one folder each.
        device: As a config has it.
        on_result: Told each at once.
        capabilities: To try.
    """
    results = []
    for number, capability in enumerate(capabilities):
        spec = TrialSpec(
            config=override_config(small_config(device), capability.changes),
            lengths_file="",
            shapes=(SHAPE,),
            timed_steps=TIMED_STEPS,
            time_limit_s=TIME_LIMIT_S,
            memory_limit_bytes=MEMORY_LIMIT_BYTES,
        )
        result = runner.run(spec, TrialFolder(folder / f"{number:02d}"))
        results.append(CapabilityResult(capability=capability, result=result))
        on_result(results[-1])
    return results


def describe_capability(tried: CapabilityResult) -> Finding:
    """What one means for who trains here."""
    name = tried.capability.name
    if tried.works:
        return Finding(name=_id(name), severity="ok", what=f"{name}: works, {_figures(tried)}")
    if tried.result.status == "refused":
        return Finding(
            name=_id(name),
            severity="note",
            what=f"{name}: not here",
            why=tried.result.reason,
        )
    is_needed = tried.capability.is_needed
    return Finding(
        name=_id(name),
        severity="error" if is_needed else "warning",
        what=f"{name}: {tried.result.status}: {tried.result.reason}",
        why="no training can run" if is_needed else "a config that chooses it will not run here",
        fix="look at the versions above and at the text of the failed process; "
        "python -c 'import mindspore; mindspore.run_check()' tells whether MindSpore itself works",
    )


def _figures(tried: CapabilityResult) -> str:
    result = tried.result
    shape = result.shapes[0]
    return (
        f"first call {shape.first_call_s:.1f} s, step {1e3 * shape.step_s:.1f} ms, "
        f"{result.peak_bytes / 1e6:,.0f} MB ({result.memory_kind}), {result.wall_s:.0f} s in all"
    )


def _id(name: str) -> str:
    return "works-" + name.replace(",", "").replace(" ", "-").lower()

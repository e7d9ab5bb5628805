"""A few training steps under MindSpore's own profiler.

What it writes is read by `tuner.diagnose.fallback`. The first steps are left out: they are not
like the others. Whatever goes wrong with the profiler is told, and training goes on.

On CPU the tables are written when the profiler stops. On Ascend the collected data is analysed
then, which takes minutes and stops training for so long (from the documentation, not run).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms

from tuner.train.device import ASCEND, Device

SKIPPED_STEPS = 2
"""The first steps of a process take memory and fill caches."""


class StepProfiler:
    """Profiles num_steps steps in a row, once.

    Call `before_step` and `after_step` around every step, and leave the context at the end of the
    run: what was collected of an unfinished profile is written then.

    Example:
        >>> with StepProfiler(folder, 5, device, print) as profiler:  # doctest: +SKIP
        ...     for batch in batches:
        ...         profiler.before_step()
        ...         engine.run_step(batch)
        ...         profiler.after_step()
    """

    def __init__(
        self, folder: Path, num_steps: int, device: Device, on_notice: Callable[[str], None]
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            folder: Where the profile goes, in a folder of its own; made when it starts.
            num_steps: How many steps to profile, >= 1, after SKIPPED_STEPS others.
            device: Of this process. On Ascend the level is Level1, without which there are
                neither shapes nor cores.
            on_notice: Told where the profile is, or why there is none.
        """
        self._folder = folder
        self._num_steps = num_steps
        self._device = device
        self._on_notice = on_notice
        self._begun_steps = 0
        self._done_steps = 0
        self._profile: Any = None
        """None before the context is entered, and when all is done or has failed."""
        self._tables_before: frozenset[Path] = frozenset()

    def __enter__(self) -> StepProfiler:
        # MindSpore's documentation has the object made before training begins.
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._tables_before = self._tables()
            self._profile = _new_profile(self._folder, self._device)
        # A profile is an extra: nothing of it may end a training run.
        except Exception as error:
            self._fail(error)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._profile is not None and self._begun_steps > SKIPPED_STEPS:
            self._finish()
        elif self._profile is not None:
            self._profile = None
            self._on_notice(
                f"no profile: it starts after {SKIPPED_STEPS} steps, and the run had no more"
            )

    def before_step(self) -> None:
        """Start if it is time to."""
        self._begun_steps += 1
        if self._profile is None or self._begun_steps != SKIPPED_STEPS + 1:
            return
        try:
            self._profile.start()
        except Exception as error:
            self._fail(error)

    def after_step(self) -> None:
        """Stop if enough steps are done."""
        if self._profile is None or self._begun_steps <= SKIPPED_STEPS:
            return
        self._done_steps += 1
        if self._done_steps >= self._num_steps:
            self._finish()

    def _finish(self) -> None:
        profile, self._profile = self._profile, None
        try:
            profile.stop()
            written = self._tables() - self._tables_before
        except Exception as error:
            self._fail(error)
            return
        # MindSpore logs what goes wrong in its profiler, and raises nothing.
        if not written:
            self._on_notice(f"no profile: MindSpore's profiler wrote no table to {self._folder}")
            return
        plural = "s" * (self._done_steps != 1)
        self._on_notice(f"profile of {self._done_steps} step{plural}: {self._folder}")

    def _tables(self) -> frozenset[Path]:
        return frozenset(path for path in self._folder.rglob("*.csv") if path.stat().st_size)

    def _fail(self, error: Exception) -> None:
        self._profile = None
        self._on_notice(f"no profile: {type(error).__name__}: {' '.join(str(error).split())}")


def _new_profile(folder: Path, device: Device) -> Any:
    """Not yet started. Names and arguments are those of MindSpore 2.7 to 2.10."""
    profiler = ms.profiler
    is_ascend = device.name == ASCEND
    activities = [profiler.ProfilerActivity.CPU]
    level: dict[str, Any] = {}
    if is_ascend:
        activities.append(profiler.ProfilerActivity.NPU)
        level["experimental_config"] = profiler._ExperimentalConfig(
            profiler_level=profiler.ProfilerLevel.Level1,
            # The one that Level1 takes by default; without it 2.10 warns.
            aic_metrics=profiler.AicoreMetrics.PipeUtilization,
        )
    return profiler.profile(
        activities=activities,
        start_profile=False,
        # On CPU an analysis would add a timeline only, and forks beside running threads.
        on_trace_ready=profiler.tensorboard_trace_handler(
            str(folder.resolve()), analyse_flag=is_ascend
        ),
        **level,
    )

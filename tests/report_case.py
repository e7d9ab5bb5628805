"""Contents of a report as a study of thirty trials would give them; every figure is made up."""

from __future__ import annotations

import numpy as np

from tuner.report.contents import (
    Absent,
    BestConfig,
    ComparedConfig,
    Comparison,
    FailedTrial,
    Headline,
    KeyFigure,
    NamedValue,
    PrecisionTry,
    ReportContents,
    RunFacts,
    Sensitivity,
    SeveralDevices,
    SpeedRatio,
)
from tuner.report.points import (
    LengthFigure,
    PredictionFigure,
    RunTimeFigure,
    RunTimePoint,
    ShapePrediction,
    TimedRun,
    TrialPoint,
    WasteFigure,
    WastePoint,
)
from tuner.simulate.stragglers import StragglerCost

BOUNDARIES = (64, 128, 192, 256, 352, 480, 640, 896, 1312, 2048)
REAL_TOKENS = 31_200_000
HOSTILE = (
    "<script>alert('x')</script> \"quoted\" & 'single' \x00\x1b[31m \ud800 </td></table> "
    "内存不足 - ошибка памяти $x^2$ --> ]]>\n"
)
"""What a reason must not be able to do to the page."""
LONG_REASON = HOSTILE + "RuntimeError: out of memory " * 200

YAML_TEXT = """\
data:
  path: chat.mindrecord
  max_length: 2048
batching:
  strategy: bucketed
  boundaries: [64, 128, 192, 256, 352, 480, 640, 896, 1312, 2048]
  align: 32
  tokens_per_batch: 16384
graph:
  mode: static
  jit_level: O0
train:
  epochs: 3
  tokens_per_update: 16384
"""


def step_s(length: int) -> float:
    """Seconds of a step of 16,384 padded tokens on a device that is not there."""
    return 0.02 + 1.3e-4 * 16384 + 2.8e-7 * 16384 * length


def lengths_figure() -> LengthFigure:
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(5.4, 0.9, 60_000), 4, 2048).astype(int)
    edges = tuple(range(0, 2049, 64))
    rows, _ = np.histogram(tokens, edges)
    return LengthFigure(bin_edges=edges, num_rows=tuple(map(int, rows)), boundaries=BOUNDARIES)


def waste_figure() -> WasteFigure:
    points = [
        WastePoint(num_shapes=k, padding_fraction=0.02 + 0.8 / k**1.25) for k in range(1, 33)
    ]
    return WasteFigure(points=tuple(points), chosen_num_shapes=10)


def run_time_figure() -> RunTimeFigure:
    points = []
    for k in range(1, 33):
        steady_s = REAL_TOKENS / (1 - (0.02 + 0.8 / k**1.25)) / 16384 * step_s(400)
        points.append(
            RunTimePoint(
                num_shapes=k,
                estimated_run_s=steady_s + 42.0 * k,
                low_s=steady_s * 0.93 + 42.0 * k,
                high_s=steady_s * 1.07 + 42.0 * k,
                compile_s=42.0 * k,
            )
        )
    best = min(points, key=lambda point: point.estimated_run_s)
    timed = [
        TimedRun(trial=i, num_shapes=k, run_s=points[k - 1].estimated_run_s * (1 + error))
        for i, (k, error) in enumerate(
            [(1, 0.02), (4, 0.06), (6, 0.11), (8, 0.01), (10, -0.03), (12, 0.04), (16, 0.02)]
        )
    ]
    return RunTimeFigure(
        points=tuple(points),
        timed_runs=(*timed, TimedRun(trial=11, num_shapes=118, run_s=9200.0)),
        optimum_num_shapes=best.num_shapes,
        epochs=3,
        break_even_steps=312,
        cost_source="fitted to 26 trials of this study",
    )


def trial_points() -> tuple[TrialPoint, ...]:
    rng = np.random.default_rng(1)
    points: list[TrialPoint] = []
    best, minutes = None, 0.0
    statuses = {5: "oom", 9: "crashed", 14: "timeout", 21: "pruned"}
    for number in range(30):
        minutes += float(rng.uniform(0.6, 2.5))
        status = statuses.get(number, "ok")
        speed = None
        if status == "ok":
            speed = float(2300 + 3700 * (1 - np.exp(-number / 6)) - abs(rng.normal(0, 500)))
            best = max(best or 0.0, speed)
        points.append(
            TrialPoint(
                number=number,
                minutes=minutes,
                real_tokens_per_s=speed,
                status=status,
                is_baseline=number < 4,
                best_so_far=best,
            )
        )
    return tuple(points)


def prediction_figure() -> PredictionFigure:
    rng = np.random.default_rng(2)
    shapes = []
    for length in BOUNDARIES:
        predicted = step_s(length)
        measured = predicted * (1 + 0.03 * float(rng.standard_normal()))
        shapes.append(
            ShapePrediction(
                batch_size=16384 // length,
                padded_length=length,
                predicted_step_s=predicted,
                low_s=predicted * 0.94,
                high_s=predicted * 1.06,
                measured_step_s=measured,
                relative_error=predicted / measured - 1,
            )
        )
    errors = sorted(abs(shape.relative_error) for shape in shapes)
    return PredictionFigure(
        shapes=tuple(shapes),
        median_relative_error=(errors[4] + errors[5]) / 2,
        max_relative_error=errors[-1],
        source="the cost model, fitted without the trial that it predicts",
    )


def _row(name: str, config: str, speed: float, low: float, high: float) -> ComparedConfig:
    best = 5620.0
    return ComparedConfig(
        name=name,
        config=config,
        run_s=REAL_TOKENS / speed,
        real_tokens_per_s=speed,
        ratio_to_winner=SpeedRatio(value=speed / best, low=low, high=high),
        is_significant=high < 1,
        num_rounds=5,
    )


def comparison() -> Comparison:
    budget = "16384 tokens a batch"
    return Comparison(
        rows=(
            ComparedConfig(
                name="winner",
                config=f"bucketed 10, align 32, {budget}, static graph, O0",
                run_s=REAL_TOKENS / 5620.0,
                real_tokens_per_s=5620.0,
                num_rounds=5,
                is_winner=True,
            ),
            _row("your config", f"bucketed 8, align 64, {budget}, static, O0", 5540, 0.971, 1.004),
            _row("ten quantile buckets", f"bucketed 10, align 32, {budget}", 4890, 0.858, 0.883),
            _row("packed", f"packed, 2048 tokens a row, {budget}, static", 4710, 0.821, 0.856),
            _row(
                "random batches on one dynamic graph",
                f"dynamic, align 8, {budget}, dynamic graph, O0",
                2950,
                0.507,
                0.544,
            ),
            _row(
                "pad to the longest", f"fixed, align 8, {budget}, static, O0", 2430, 0.424, 0.441
            ),
            ComparedConfig(
                name="no alignment",
                config=f"bucketed 10, align 1, {budget}, dynamic graph, O1",
                run_s=None,
                real_tokens_per_s=None,
                num_rounds=0,
                status="oom",
                reason="9.10 GB, over the limit of 8.00 GB (--memory-limit)",
            ),
        ),
        verdict=(
            "The winner trains 2.31 times the real tokens a second of padding to the longest "
            "(95 % interval 2.27 to 2.36); your own config is not slower beyond noise."
        ),
    )


def sensitivity() -> Sensitivity:
    tries = [
        ("fp16", "softmax", 2.1e-4, 1.9e-3, 0, False),
        ("fp16", "norms", 8.4e-3, 6.1e-2, 0, True),
        ("fp16", "logits", 3.0e-4, 4.0e-3, 0, False),
        ("fp16", "loss", float("inf"), float("nan"), 37, True),
        ("bf16", "residual", 1.2e-3, 9.5e-3, 0, False),
    ]
    return Sensitivity(
        tries=tuple(
            PrecisionTry(
                dtype=dtype,
                group=group,
                loss_deviation=loss,
                gradient_deviation=gradient,
                num_non_finite=non_finite,
                is_sensitive=sensitive,
            )
            for dtype, group, loss, gradient, non_finite, sensitive in tries
        ),
        note=(
            "On this CPU fp32 is the fastest precision; that does not carry over to an NPU, where "
            "lower precision is what it computes fastest in."
        ),
    )


def several_devices() -> SeveralDevices:
    slowest_s = {8: 5.1, 64: 6.9, 512: 7.6}
    return SeveralDevices(
        lines=tuple(
            StragglerCost(
                world_size=world_size,
                num_batches=102_400,
                mean_step_s=2.95,
                slowest_step_s=step_s,
                same_shape_num_steps=102_400 // world_size + 5,
                same_shape_step_s=2.95,
                filler_fraction=world_size / 40_000,
            )
            for world_size, step_s in slowest_s.items()
        ),
        verdict=(
            "On 512 devices that take other shapes, 61.2 % of the time would be lost to waiting "
            "for the slowest."
        ),
        note="Simulated from the cost model; communication is left out.",
    )


def failures() -> tuple[FailedTrial, ...]:
    config = "bucketed 24, align 8, 32768 tokens a batch, static graph, O1"
    reasons = {
        5: ("oom", "9.10 GB, over the limit of 8.00 GB"),
        9: ("crashed", LONG_REASON),
        14: ("timeout", "no step within 900 s (--trial-timeout)"),
        21: ("pruned", "estimated to be 2.4 times as slow as the best after 3 of 24 shapes"),
    }
    return tuple(
        FailedTrial(number=number, config=config, status=status, reason=reason)
        for number, (status, reason) in reasons.items()
    )


def _headline() -> Headline:
    return Headline(
        answer="faster",
        verdict=(
            "Yes: ten buckets train 2.31 times the real tokens a second of padding every row to "
            "the longest, compile time included."
        ),
        trust=(
            "Winner and baselines were measured again in five interleaved rounds, each in a fresh "
            "process, and the gain is far beyond the spread between rounds. The cost model "
            "foretold the steps of ten shapes within 2.1 % (median)."
        ),
        key_figures=(
            KeyFigure(
                label="speed, padding to the longest = 1",
                value="2.31 x",
                detail="95 % interval 2.27 to 2.36, 5 rounds",
                basis="measured",
            ),
            KeyFigure(
                label="run of 3 epochs",
                value="93 min",
                detail="padding to the longest: 214 min",
                basis="estimated",
            ),
            KeyFigure(
                label="padding tokens",
                value="6.5 %",
                detail="padding to the longest: 82 %",
                basis="exact",
            ),
            KeyFigure(
                label="ahead from step",
                value="312",
                detail="of 5,934; until then compiling costs more than it gains",
                basis="estimated",
            ),
        ),
    )


def _facts() -> RunFacts:
    return RunFacts(
        data_path="data/chat.mindrecord",
        num_rows=60_000,
        longest_tokens=2048,
        device="CPU",
        versions=(
            NamedValue(name="varseq-tuner", value="0.1.0"),
            NamedValue(name="MindSpore", value="2.10.0"),
            NamedValue(name="NumPy", value="1.26.4"),
        ),
        commands=(
            NamedValue(name="train it", value="varseq-train --config results/best.yaml"),
            NamedValue(
                name="search longer",
                value="varseq-tune --data data/chat.mindrecord --trials 60 --out results",
            ),
        ),
    )


def _best() -> BestConfig:
    return BestConfig(
        path="results/best.yaml",
        trial=23,
        settings=(
            NamedValue(name="strategy", value="bucketed, 10 buckets"),
            NamedValue(name="boundaries (tokens)", value=", ".join(map(str, BOUNDARIES))),
            NamedValue(name="alignment (tokens)", value="32"),
            NamedValue(name="token budget of a batch", value="16,384"),
            NamedValue(name="graph", value="static, jit_level O0"),
            NamedValue(name="padding tokens, exact", value="6.5 %"),
            NamedValue(name="steps an epoch", value="1,978"),
            NamedValue(name="peak memory, measured", value="5.31 GB"),
        ),
        yaml_text=YAML_TEXT,
    )


def full_contents() -> ReportContents:
    """All sections are there."""
    return ReportContents(
        facts=_facts(),
        headline=_headline(),
        comparison=comparison(),
        prediction=prediction_figure(),
        trials=trial_points(),
        lengths=lengths_figure(),
        waste=waste_figure(),
        run_time=run_time_figure(),
        devices=several_devices(),
        sensitivity=sensitivity(),
        failures=failures(),
        best=_best(),
        environment=(
            NamedValue(name="processor", value="a made-up CPU, 2 cores"),
            NamedValue(name="memory", value="8.0 GB"),
            NamedValue(name="Python", value="3.11.9"),
            NamedValue(name="MindSpore", value="2.10.0"),
        ),
        notes=(
            "Every trial runs in a process of its own, which compiles the shapes of its plan and "
            "times real steps at each.",
            "jit_level O2 was not tried: it needs an Ascend device.",
            "No --config was given: the trials used a small decoder.",
        ),
    )


def empty_contents() -> ReportContents:
    """A study of which nothing could be measured."""
    return ReportContents(
        facts=RunFacts(
            data_path="data/chat.mindrecord", num_rows=60_000, longest_tokens=2048, device="CPU"
        ),
        headline=Headline(
            answer="unknown",
            verdict="Not known: no trial of 0 could be measured.",
            trust="There is no figure to believe yet.",
        ),
        comparison=Absent(reason="No confirmation was run: --confirm 0."),
    )

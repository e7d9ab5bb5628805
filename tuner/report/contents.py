"""What the report page says, as plain values: no study, no config, no trial is needed to show it.

Every section is either there or `Absent` with the reason; a list that may be empty is a tuple.
The sections that are drawn are in `points`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tuner.report.points import (
    Basis,
    LengthFigure,
    PredictionFigure,
    RunTimeFigure,
    TrialPoint,
    WasteFigure,
)
from tuner.simulate.stragglers import StragglerCost

Answer = Literal["faster", "no_difference", "unknown"]
"""Whether the best config is beyond noise faster than padding everything to the longest."""


@dataclass(frozen=True, kw_only=True)
class Absent:
    """Stands for a section that is not there.

    Attributes:
        reason: Why, in one sentence; empty: the page's own sentence for that section.
    """

    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class NamedValue:
    """A line of a list of settings, versions or commands.

    Attributes:
        name: What it is, its unit included.
        value: As it is to be read.
    """

    name: str
    value: str


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What was tuned, on what, and by which commands.

    Attributes:
        data_path: As in the config.
        num_rows: Rows of the data.
        longest_tokens: Tokens of the longest row after truncation.
        device: That the trials ran on.
        versions: Of MindSpore and whatever else decides figures.
        commands: What the command does and the command line: train it, search longer.
    """

    data_path: str
    num_rows: int
    longest_tokens: int
    device: str
    versions: tuple[NamedValue, ...] = ()
    commands: tuple[NamedValue, ...] = ()


@dataclass(frozen=True, kw_only=True)
class KeyFigure:
    """A number that stands large at the head of the page.

    Attributes:
        label: What it is: "speed-up over padding to the longest".
        value: The number with its unit: "2.31 x".
        detail: What belongs beside it: "95 % interval 2.24 to 2.38, 5 rounds"; may be empty.
        basis: How it is known.
    """

    label: str
    value: str
    detail: str = ""
    basis: Basis


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The two answers that the page is opened for.

    Attributes:
        answer: Colours the headline.
        verdict: Is the config really faster, in one sentence.
        trust: Can the figures be believed, in a sentence or two.
        key_figures: About four.
    """

    answer: Answer
    verdict: str
    trust: str
    key_figures: tuple[KeyFigure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SpeedRatio:
    """Real tokens per second by those of the winner.

    Attributes:
        value: Below 1: slower than the winner.
        low: Lower end of its 95 % interval; None if nothing is known about noise.
        high: Upper end of the same.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class ComparedConfig:
    """A line of the comparison.

    Attributes:
        name: "winner", "pad to the longest", "your config".
        config: The tuned part of the config in a few words.
        run_s: Seconds of the planned run, compile time included; None if it failed.
        real_tokens_per_s: Over these seconds; None if it failed.
        ratio_to_winner: None for the winner itself and for what failed.
        is_significant: Whether the interval of the ratio leaves out 1; None without a ratio.
        num_rounds: Rounds in which it was measured again, each in a fresh process; 0: none.
        is_winner: At most one line is.
        status: As of a trial.
        reason: Why it failed; empty if it did not.
    """

    name: str
    config: str
    run_s: float | None
    real_tokens_per_s: float | None
    ratio_to_winner: SpeedRatio | None = None
    is_significant: bool | None = None
    num_rounds: int
    is_winner: bool = False
    status: str = "ok"
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The winner against the baselines, measured again.

    Attributes:
        rows: In the order to show; the winner first.
        verdict: What follows, in one sentence.
        basis: Of run_s: measured on whole runs, or estimated from measured compiles and steps.
    """

    rows: tuple[ComparedConfig, ...]
    verdict: str
    basis: Basis = "estimated"


@dataclass(frozen=True, kw_only=True)
class PrecisionTry:
    """A group of operations computed in a lower precision, against fp32 on the same batches.

    Attributes:
        dtype: fp16 or bf16.
        group: Op group that ran in it, or all.
        loss_deviation: Largest relative deviation of the loss, >= 0; may be nan or inf.
        gradient_deviation: Largest relative deviation of the gradient norm, >= 0; as above.
        num_non_finite: Values of loss or gradient that were not finite.
        is_sensitive: Whether the group is to stay in fp32.
    """

    dtype: str
    group: str
    loss_deviation: float
    gradient_deviation: float
    num_non_finite: int
    is_sensitive: bool


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Which op groups need fp32.

    Attributes:
        tries: In the order to show.
        note: What the table does and does not say: that fp32 is the faster one on a CPU, for one.
    """

    tries: tuple[PrecisionTry, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class SeveralDevices:
    """What training on several devices would be, simulated.

    Attributes:
        lines: One for each number of ranks, rising.
        verdict: What follows, in a sentence or two.
        note: What it rests on and what it leaves out.
    """

    lines: tuple[StragglerCost, ...]
    verdict: str
    note: str


@dataclass(frozen=True, kw_only=True)
class FailedTrial:
    """A trial without a figure.

    Attributes:
        number: Of the trial.
        config: The tuned part of its config in a few words.
        status: oom, timeout, crashed, diverged, refused or pruned.
        reason: Of any length, any characters.
    """

    number: int
    config: str
    status: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class BestConfig:
    """What was found.

    Attributes:
        path: Of best.yaml.
        trial: Number of the trial that measured it.
        settings: The settings that matter and the figures of its plan.
        yaml_text: The whole file.
    """

    path: str
    trial: int
    settings: tuple[NamedValue, ...]
    yaml_text: str


@dataclass(frozen=True, kw_only=True)
class ReportContents:
    """The whole page.

    Attributes:
        facts: What was tuned, on what.
        headline: The two answers.
        comparison: The winner against the baselines.
        prediction: Predicted against measured step seconds.
        trials: In the order of the search; empty if none has ended.
        lengths: Histogram of the rows and boundaries of the best.
        waste: Padding against the number of shapes.
        run_time: Estimated run seconds against the number of shapes.
        devices: The best config on several devices.
        sensitivity: Which op groups need fp32.
        failures: Trials without a figure, by number.
        best: The best config.
        environment: Machine and software: names and values.
        notes: Assumptions and what was left out, one sentence each.
    """

    facts: RunFacts
    headline: Headline
    comparison: Comparison | Absent = Absent()
    prediction: PredictionFigure | Absent = Absent()
    trials: tuple[TrialPoint, ...] = ()
    lengths: LengthFigure | Absent = Absent()
    waste: WasteFigure | Absent = Absent()
    run_time: RunTimeFigure | Absent = Absent()
    devices: SeveralDevices | Absent = Absent()
    sensitivity: Sensitivity | Absent = Absent()
    failures: tuple[FailedTrial, ...] = ()
    best: BestConfig | Absent = Absent()
    environment: tuple[NamedValue, ...] = ()
    notes: tuple[str, ...] = ()

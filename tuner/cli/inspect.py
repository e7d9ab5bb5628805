"""`varseq-data inspect`: lengths, waste, and what to do about them."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.entry import end_at_once
from tuner.errors import BadInputError

if TYPE_CHECKING:
    from tuner.cli.entry import OneLineParser
    from tuner.data.length_sample import LengthSample
    from tuner.data.mindrecord import MindRecordSet
    from tuner.simulate.advice import Verdict
    from tuner.simulate.cost import CostModel
    from tuner.simulate.histogram import LengthHistogram
    from tuner.simulate.sampling import SampledPadding
    from tuner.simulate.suggest import Suggestion
    from tuner.simulate.waste import LengthProfile

FIGURE_NAME = "waste.png"
DEFAULT_LONGEST_ROWS = 8
"""Token budget as rows of the longest: the largest of the default search space."""


def add_inspect(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Add the command with its options."""
    parser = commands.add_parser(
        "inspect",
        help="lengths, waste, and whether variable length is worth it",
        description="Show how long the rows are, what padding them would waste, whether variable "
        "length is worth it, and how many buckets of which alignment are suggested. Writes a "
        f"figure of it, {FIGURE_NAME}.",
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="MindRecord files, or a folder of them")
    add("--column", default="input_ids", metavar="NAME", help="default: input_ids")
    add(
        "--batch-size",
        type=int,
        default=16,
        metavar="ROWS",
        help="of the random batches in the table (default: 16)",
    )
    add(
        "--tokens-per-batch",
        type=int,
        metavar="N",
        help="padded tokens of a batch at most (default: 8 times the longest row)",
    )
    add("--epochs", type=int, default=3, metavar="N", help="of the planned run (default: 3)")
    add(
        "--rows-per-slab",
        type=int,
        metavar="N",
        help="rows planned at a time at most; of more, what slabs cost is said (default: that of "
        "batching.rows_per_slab)",
    )
    add(
        "--study",
        type=Path,
        metavar="DIR",
        help="folder of an earlier varseq-tune, whose measured costs replace the default ones",
    )
    add(
        "--sample",
        type=int,
        metavar="N",
        help="look at N random rows only, for enormous sets; the longest row stays exact",
    )
    add(
        "--out",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help=f"folder of {FIGURE_NAME} and of lengths kept for the next time (default: results)",
    )
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_inspect)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What is known of the lengths.

    Attributes:
        rows_by_length: Of the whole set; in proportion where only a sample was looked at.
        sample: The sample; None if every row is known.
        source: How they were found, for people.
    """

    rows_by_length: LengthHistogram
    sample: LengthSample | None
    source: str


def _inspect(arguments: argparse.Namespace) -> int:
    from tuner.data.mindrecord import open_mindrecord
    from tuner.report.figures import draw_waste
    from tuner.simulate.advice import judge_lengths
    from tuner.simulate.suggest import ROWS_PER_SLAB, RunSetting, suggest_buckets
    from tuner.simulate.waste import profile_lengths

    _check_numbers(arguments)
    cost = _cost_model(arguments.study)
    with end_at_once("varseq-data"):
        dataset = open_mindrecord(arguments.files)
        found = _find_lengths(dataset, arguments)
    if found.rows_by_length.total_tokens == 0:
        raise BadInputError(
            f"every row of {dataset.path} has no tokens in {arguments.column}",
            fix="name another --column",
        )
    longest = found.rows_by_length.longest
    setting = RunSetting(
        tokens_per_batch=_budget(arguments.tokens_per_batch, longest),
        epochs=arguments.epochs,
        cost=cost,
        rows_per_slab=arguments.rows_per_slab or ROWS_PER_SLAB,
    )
    profile = profile_lengths(found.rows_by_length, arguments.batch_size)
    verdict = judge_lengths(profile)
    suggestion = suggest_buckets(found.rows_by_length, setting)
    figure = arguments.out / FIGURE_NAME
    if arguments.json:
        _print_json(profile, verdict, suggestion, found, figure)
    else:
        _print_text(dataset, profile, verdict, suggestion, found)
    draw_waste(suggestion, figure)
    if not arguments.json:
        print(f"\nfigure: {figure}")
    return 0


def _check_numbers(arguments: argparse.Namespace) -> None:
    least = {"batch_size": 1, "epochs": 1, "tokens_per_batch": 1, "sample": 2, "rows_per_slab": 1}
    for name, low in least.items():
        value = getattr(arguments, name)
        if value is not None and value < low:
            option = "--" + name.replace("_", "-")
            raise BadInputError(f"{option} must be at least {low} (got {value})", fix="raise it")


def _cost_model(study: Path | None) -> CostModel:
    from tuner.simulate.cost import default_cost_model
    from tuner.simulate.cost_file import read_static_model
    from tuner.trial.folder import StudyFolder

    return default_cost_model() if study is None else read_static_model(StudyFolder(study).costs)


def _budget(asked: int | None, longest: int) -> int:
    from tuner.batching.align import align_length
    from tuner.simulate.suggest import ALIGNMENTS

    least = align_length(longest, ALIGNMENTS[0])
    if asked is None:
        return DEFAULT_LONGEST_ROWS * least
    if asked < least:
        raise BadInputError(
            "--tokens-per-batch must be at least the longest padded row "
            f"(got {asked}, the longest is {least} tokens)",
            fix=f"raise it to {least}",
        )
    return asked


def _find_lengths(dataset: MindRecordSet, arguments: argparse.Namespace) -> _Found:
    from tuner.data.length_sample import sample_lengths
    from tuner.data.lengths import scan_lengths
    from tuner.simulate.histogram import LengthHistogram

    if arguments.sample is not None and arguments.sample < dataset.num_samples:
        sample = sample_lengths(dataset, arguments.column, arguments.sample)
        of_sample = LengthHistogram.from_tokens(sample.tokens)
        return _Found(
            rows_by_length=of_sample.scaled_to(sample.num_rows_in_set, sample.longest),
            sample=sample,
            source=sample.source_text,
        )
    lengths = scan_lengths(dataset, arguments.column, cache=arguments.out)
    return _Found(
        rows_by_length=LengthHistogram.from_tokens(lengths.tokens),
        sample=None,
        source=lengths.source_text,
    )


def _sampling(
    sample: LengthSample, suggestion: Suggestion
) -> tuple[SampledPadding, SampledPadding]:
    from tuner.simulate.sampling import estimate_padding

    fixed, best = (
        estimate_padding(sample.tokens, ends, sample.num_rows_in_set)
        for ends in ((sample.longest,), suggestion.best.boundaries)
    )
    return fixed, best


def _print_json(
    profile: LengthProfile,
    verdict: Verdict,
    suggestion: Suggestion,
    found: _Found,
    figure: Path,
) -> None:
    import json

    from tuner.report.advice import sampling_values, suggestion_values
    from tuner.report.lengths import profile_values

    values = {
        **profile_values(profile),
        "lengths": found.source,
        "verdict": {"decision": verdict.decision, "reason": verdict.reason},
        "suggestion": suggestion_values(suggestion),
        "figure": str(figure),
    }
    if found.sample is not None:
        values["sampled_rows"] = found.sample.num_rows
        values["sampling"] = sampling_values(*_sampling(found.sample, suggestion))
    print(json.dumps(values))


def _print_text(
    dataset: MindRecordSet,
    profile: LengthProfile,
    verdict: Verdict,
    suggestion: Suggestion,
    found: _Found,
) -> None:
    from tuner.report.advice import describe_sampling, format_advice
    from tuner.report.lengths import format_profile

    title = _describe_set(dataset, found)
    print(format_profile(title, found.rows_by_length, profile, _bar_character()))
    if found.sample is not None:
        fixed, best = _sampling(found.sample, suggestion)
        text = describe_sampling(fixed, best, found.sample.num_rows, dataset.num_samples)
        print(f"\n{text}")
    print(f"\n{format_advice(verdict, suggestion)}")


def _describe_set(dataset: MindRecordSet, found: _Found) -> list[tuple[str, str]]:
    noted = dataset.description
    about = "" if found.sample is None else "about "
    lines = [
        ("file", dataset.path),
        ("rows", f"{dataset.num_samples:,} in {len(dataset.files)} file(s)"),
        ("tokens", f"{about}{found.rows_by_length.total_tokens:,}"),
        ("columns", ", ".join(f"{name} ({kind})" for name, kind in dataset.columns.items())),
        ("lengths", found.source),
    ]
    if "tokenizer" in noted and "vocab_size" in noted:
        lines.append(("tokenizer", f"{noted['tokenizer']}, {noted['vocab_size']:,} ids"))
    return lines


def _bar_character() -> str:
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#"
    return "█"

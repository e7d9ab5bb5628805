"""`varseq-tune --dry-run`: the space ranked by the cost model alone, without a device."""

from __future__ import annotations

from collections.abc import Iterable

from tabulate import tabulate

from tuner.config.codec import format_config, write_text
from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError
from tuner.report.study import describe_config
from tuner.simulate.cost_book import CostBook
from tuner.study.guide import Guide, Point, precisions_without_trials
from tuner.study.propose import as_planned
from tuner.study.setup import StudySetup

SHOWN = 10
WHAT_IT_IS = (
    "A dry run: nothing was measured here. Seconds are estimated from the cost model, with their "
    "95 % interval."
)


def dry_run(setup: StudySetup) -> int:
    """Rank, print the best, and write the first as dry_run.yaml; returns the exit code.

    Raises:
        BadInputError: no point of the space can be planned.
    """
    guide = Guide(setup)
    book = CostBook(models=setup.models)
    # Which op groups may leave fp32 only trials can tell, so below it all of them stay.
    sets = precisions_without_trials(setup.space.compute_dtype)
    points = _different(
        (point for point in guide.rank(book, guide.candidates(book, sets)) if point.fits),
        setup.data.longest,
    )
    if not points:
        raise BadInputError(
            "no point of the space can be planned for this data", fix="widen it (--space)"
        )
    path = setup.folder.path / "dry_run.yaml"
    header = f"{WHAT_IT_IS}\nTrain it with: varseq-train --config {path}"
    write_text(path, format_config(points[0].config, header=header))
    print(_table(points[:SHOWN]))
    print(f"\n{WHAT_IT_IS}")
    source = book.known(guide.key(points[0].config)).model.source
    print(f"costs: {source}")
    print(f"train the first: varseq-train --config {path}")
    return 0


def _different(points: Iterable[Point], longest: int) -> list[Point]:
    """Of points that plan the same batches the first."""
    found: list[Point] = []
    seen: list[TrainConfig] = []
    for point in points:
        planned = as_planned(point.config, longest)
        if planned not in seen:
            seen.append(planned)
            found.append(point)
    return found


def _table(points: list[Point]) -> str:
    rows = [
        (
            describe_config(point.config),
            point.num_shapes,
            f"{point.estimate.estimated_compile_s:.0f}",
            f"{point.estimate.estimated_run_s:,.0f}",
            f"{point.estimate.low_run_s:,.0f} to {point.estimate.high_run_s:,.0f}",
            f"{point.estimate.estimated_real_tokens_per_s:,.0f}",
        )
        for point in points
    ]
    headers = ["config", "shapes", "compile s", "run s", "95 %", "real tokens/s"]
    return tabulate(rows, headers=headers, disable_numparse=True)

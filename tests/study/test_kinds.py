"""Which points a search looks at where many cost nearly the same."""

from __future__ import annotations

import itertools

import pytest
from search_case import COST, proposals, search
from strategies import skewed_tokens
from study_case import make_setup, make_space

from tuner.study.guide import Guide
from tuner.study.kinds import kind_of, least_proposed_first
from tuner.trial.fake import FakeRunner

SPACE = make_space(
    strategy=["bucketed", "fixed", "packed", "dynamic"],
    num_buckets={"low": 2, "high": 9},
    align=[8, 32],
    longest_rows_per_batch=[2, 4, 8],
    graph_mode=["static", "dynamic"],
)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    """The proposals of a short search, its best speed, and all points by their lower ends."""
    setup = make_setup(
        tmp_path_factory.mktemp("kinds"),
        skewed_tokens(500, seed=0, longest=800),
        SPACE,
        base={"train.epochs": 40},
        trials=6,
        memory_limit_bytes=10**12,
    )
    result = search(setup, FakeRunner(COST, noise=0.05))
    guide = Guide(setup)
    choices = guide.candidates(result.book, [("fp32", ())])
    points = guide.rank(result.book, choices, at_lower_end=True)
    speeds = [item.outcome.real_tokens_per_s or 0.0 for item in result.outcomes]
    return [item.outcome.config for item in proposals(result)], max(speeds), points


def can_reach(point, speed):
    """By hand: all real tokens within the lower end of the seconds."""
    real_tokens = point.estimate.estimated_real_tokens_per_s * point.estimate.estimated_run_s
    return real_tokens / point.estimate.low_run_s >= speed


def test_of_those_that_may_win_every_kind_has_its_turn(ranked):
    """Each time the first is proposed: in as many turns as there are kinds all are seen."""
    _, _, points = ranked
    kinds = {kind_of(point.config) for point in points}
    assert len(kinds) == 8
    proposed = []
    for _ in kinds:
        proposed.append(least_proposed_first(points, proposed, 0.0)[0].config)
    assert {kind_of(config) for config in proposed} == kinds
    # By rank alone one kind fills the places.
    assert len({kind_of(point.config) for point in points[: len(kinds)]}) < len(kinds)


def test_what_cannot_reach_the_best_comes_after_all_that_may(ranked):
    proposed, speed, points = ranked
    found = least_proposed_first(points, proposed, speed)
    reach = [can_reach(point, speed) for point in found]
    assert reach == sorted(reach, reverse=True)
    assert 0 < sum(reach) < len(reach)
    numbers = {id(point): number for number, point in enumerate(points)}
    for hopes, kind in itertools.product((True, False), {kind_of(p.config) for p in points}):
        of_kind = [
            numbers[id(point)]
            for point, hope in zip(found, reach, strict=True)
            if (hope, kind_of(point.config)) == (hopes, kind)
        ]
        assert of_kind == sorted(of_kind)

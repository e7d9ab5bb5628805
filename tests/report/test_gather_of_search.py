"""The report of a study that was searched, on a made-up device."""

from __future__ import annotations

import numpy as np
import pytest
from result_case import context_of
from study_case import Seen, make_setup
from test_html import Page

from tuner.report.contents import Absent
from tuner.report.gather import gather_contents
from tuner.report.html import format_html
from tuner.report.study import summary_text, trials_csv
from tuner.study.optuna_study import OptunaStudy
from tuner.study.search import Search
from tuner.study.space import fit_to_device, load_space
from tuner.trial.fake import FakeRunner, HiddenCost


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Twelve proposals on chat-like rows; timings with 2 % of noise and a term of their own."""
    drawn = np.random.default_rng(0).normal(4.6, 0.9, 3000)
    tokens = np.clip(np.exp(drawn), 4, 512).astype(int).tolist()
    space, _ = fit_to_device(load_space("default"), "CPU")
    setup = make_setup(
        tmp_path_factory.mktemp("study"), tokens, space, base={"train.epochs": 3}, trials=12
    )
    np.save(setup.folder.lengths, setup.data.lengths.tokens)
    optuna_study = OptunaStudy(setup.folder.storage, setup.study_name, setup.space, setup.seed)
    runner = FakeRunner(HiddenCost(row_s=2e-4, token_bytes=1000), noise=0.02)
    result = Search(setup, runner, Seen().watch, optuna_study).run()
    return setup, result


@pytest.mark.slow
def test_every_section_that_a_search_can_fill_is_there(study):
    setup, result = study
    contents = gather_contents(result, setup, context_of(setup))
    filled = (
        contents.comparison, contents.prediction, contents.lengths, contents.waste,
        contents.run_time, contents.best,
    )  # fmt: skip
    assert not [section for section in filled if isinstance(section, Absent)]
    assert len(contents.trials) == len(result.outcomes) >= 16
    minutes = [point.minutes for point in contents.trials]
    assert minutes == sorted(minutes) and minutes[0] >= 0.0
    # The fit lacks the cost of a row and the steps have noise; it is near all the same.
    assert contents.prediction.max_relative_error < 0.2
    num_ok = sum(item.outcome.estimate is not None for item in result.outcomes)
    assert len(contents.failures) == len(result.outcomes) - num_ok


@pytest.mark.slow
def test_the_page_and_the_texts_are_whole(study):
    setup, result = study
    context = context_of(setup)
    page = Page(format_html(gather_contents(result, setup, context)))
    assert page.tags.count("figure") == 6
    assert "Not confirmed: by the estimates training with" in summary_text(result, context)
    assert len(trials_csv(result.outcomes).splitlines()) == len(result.outcomes) + 1

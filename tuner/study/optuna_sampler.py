"""The sampler of a study that several processes share.

- The random state of a proposal comes from the seed and the trial number: two processes never
  draw the same numbers, and a resumed study proposes what an uninterrupted one would have.
- Baselines have no parameters. The sampler does not see them: one among the best trials would
  take a place of the few that it learns from and leave nothing there.
- Trials that run count as bad ones for as long as they do, so that another process looks
  elsewhere (Optuna's constant liar).
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

BASELINE_KEY = "baseline"
STARTUP_TRIALS = 8
SEED_STRIDE = 1_000_003


class PointSampler(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """TPE over the points of the space, seeded for each trial."""

    def __init__(self, seed: int) -> None:
        """Make a sampler.

        Args:
            seed: Of the study.
        """
        self._seed = seed
        self._inner = _tpe(seed)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Start the random state of this trial."""
        self._inner = _tpe((self._seed * SEED_STRIDE + trial.number) % 2**32)
        self._inner.before_trial(study, trial)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Parameters that are drawn together."""
        return self._inner.infer_relative_search_space(_Points(study), trial)  # type: ignore[no-any-return]

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw them."""
        return self._inner.sample_relative(_Points(study), trial, search_space)  # type: ignore[no-any-return]

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Draw a parameter that no finished trial has yet."""
        return self._inner.sample_independent(
            _Points(study), trial, param_name, param_distribution
        )


class _Points:
    """A study as the sampler sees it: without baselines."""

    def __init__(self, study: optuna.Study) -> None:
        self._whole = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def _get_trials(
        self,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
        use_cache: bool = False,
    ) -> list[FrozenTrial]:
        trials = self._whole._get_trials(deepcopy=deepcopy, states=states, use_cache=use_cache)
        return [trial for trial in trials if BASELINE_KEY not in trial.user_attrs]


def _tpe(seed: int) -> optuna.samplers.TPESampler:
    return optuna.samplers.TPESampler(
        seed=seed,
        multivariate=True,
        group=True,
        constant_liar=True,
        n_startup_trials=STARTUP_TRIALS,
    )

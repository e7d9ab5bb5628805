"""The search: baselines, Optuna's proposals, the choice of the winner."""

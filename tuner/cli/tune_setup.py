"""From the options of varseq-tune to a study that can run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from tuner.batching.rows import admit_rows
from tuner.cli.entry import end_at_once
from tuner.config.codec import load_config
from tuner.config.override import override_config, parse_assignments
from tuner.config.schema import TrainConfig
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import MindRecordSet, open_mindrecord, require_columns
from tuner.errors import BadInputError
from tuner.study.base import TunedData, check_base, describe_fitted, fitted_base
from tuner.study.search import StudySetup
from tuner.study.space import fit_to_device, load_space
from tuner.trial.folder import StudyFolder
from tuner.trial.limits import parse_memory_limit
from tuner.trial.runner import TrialRunner

Notice = Callable[[str], None]


def set_up_study(
    options: argparse.Namespace, folder: StudyFolder, runner: TrialRunner, notice: Notice
) -> StudySetup:
    """Check everything that can be checked before the first trial.

    Args:
        options: Of the command line.
        folder: Held by this process.
        runner: Says what trials will run on.
        notice: Told what was assumed and what is left out.

    Raises:
        BadInputError: an option, the config, the space or the data is wrong.
    """
    space = load_space(options.space)
    memory_limit_bytes = parse_memory_limit(options.memory_limit)
    with end_at_once("varseq-tune"):
        base, dataset = _open_base(options, notice)
        check_base(dataset, base)
        data = _tuned_data(dataset, base, folder)
    installation = runner.probe(base.device)
    notice(f"trials run on {installation.device}")
    fitted_space, left_out = fit_to_device(space, installation.device)
    for sentence in left_out:
        notice(sentence)
    return StudySetup(
        base=base,
        data=data,
        space=fitted_space,
        folder=folder,
        installation=installation,
        trials=options.trials,
        time_limit_s=options.trial_timeout,
        memory_limit_bytes=memory_limit_bytes,
        seed=options.seed,
    )


def _open_base(options: argparse.Namespace, notice: Notice) -> tuple[TrainConfig, MindRecordSet]:
    """The config to start from, with the data's absolute path, and the data."""
    overrides = parse_assignments(options.assignments)
    if options.config is None:
        if options.data is None:
            raise BadInputError("--data is missing", fix="give a MindRecord file")
        path = os.path.abspath(options.data)
        dataset = open_mindrecord(path)
        base = fitted_base(dataset, path, overrides)
        notice(describe_fitted(base))
    else:
        base = override_config(load_config(options.config), overrides)
        # Absolute, so that best.yaml works from any folder.
        path = os.path.abspath(options.data or base.data.path)
        base = override_config(base, {"data.path": path, "provenance": None}, source="--data")
        dataset = open_mindrecord(path)
    if base.train.max_steps is not None:
        notice(
            f"train.max_steps is {base.train.max_steps}; candidates are compared over all "
            f"{base.train.epochs} epochs"
        )
    return base, dataset


def _tuned_data(dataset: MindRecordSet, base: TrainConfig, folder: StudyFolder) -> TunedData:
    columns = [base.data.input_column, base.data.label_column]
    require_columns(dataset, [column for column in columns if column is not None])
    lengths = scan_lengths(dataset, base.data.input_column, cache=folder.path)
    admitted = admit_rows(lengths.tokens, base.data, base.data.max_length)
    return TunedData(dataset=dataset, lengths=lengths, longest=int(admitted.tokens.max()))

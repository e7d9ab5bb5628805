"""From the options of varseq-tune to a study that can run."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

from tuner.batching.rows import admitted_tokens
from tuner.cli.entry import end_at_once
from tuner.cli.tune_updates import tell_of_other_updates, with_update_size
from tuner.config.codec import load_config
from tuner.config.override import override_config, parse_assignments
from tuner.config.positions import check_length
from tuner.config.schema import TrainConfig
from tuner.data.held_out import HELD_OUT, training_part
from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import MindRecordSet, open_mindrecord, require_columns
from tuner.errors import BadInputError
from tuner.report.study import StudyContext
from tuner.simulate.cost_file import CostFile, GivenModels, given_models, read_cost_file
from tuner.study.base import TunedData, check_base, describe_fitted, fitted_base
from tuner.study.setup import StudySetup, cost_identity
from tuner.study.space import (
    SearchSpace,
    fit_to_device,
    fit_to_model,
    fit_to_update,
    load_space,
)
from tuner.trial.folder import StudyFolder
from tuner.trial.limits import parse_memory_limit
from tuner.trial.record import Installation
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
    if options.new_study and options.storage:
        raise BadInputError(
            "--new-study starts over in the results folder, not in a shared --storage",
            fix="give another --study NAME",
        )
    whole_space = load_space(options.space)
    memory_limit_bytes = parse_memory_limit(options.memory_limit)
    deadline_s = None if options.timeout is None else time.monotonic() + options.timeout
    with end_at_once("varseq-tune"):
        base, dataset = _open_base(options, notice)
        check_base(dataset, base)
        data = _tuned_data(dataset, base, folder, notice)
        check_length(base.model, data.longest)
        base = with_update_size(base, data, notice)
    file = read_cost_file(options.cost_model) if options.cost_model else None
    models = _given_models(file, base, options.cost_model)
    if options.dry_run:
        installation = _assumed_installation(models, base)
        notice(f"a dry run: no trial is run, costs are those of {installation.device}")
    else:
        installation = runner.probe(base.device)
        notice(f"trials run on {installation.device}")
    _warn_of_shared_cores(options.jobs, installation, notice)
    space = _fitted(whole_space, base, data, installation.device, notice)
    if options.config is not None:
        tell_of_other_updates(base, data, space, notice)
    return StudySetup(
        base=base,
        has_own_config=options.config is not None,
        data=data,
        space=space,
        folder=folder,
        storage=options.storage,
        study_name=options.study,
        installation=installation,
        trials=options.trials,
        jobs=options.jobs,
        time_limit_s=options.trial_timeout,
        deadline_s=deadline_s,
        memory_limit_bytes=memory_limit_bytes,
        confirm_rounds=options.confirm,
        confirm_s=options.confirm_seconds,
        seed=options.seed,
        models=models,
    )


def _fitted(
    space: SearchSpace, base: TrainConfig, data: TunedData, device: str, notice: Notice
) -> SearchSpace:
    """The space without what model, device and update do not take; the reasons are told."""
    fitted, unfit = fit_to_model(space, base.model)
    fitted, left_out = fit_to_device(fitted, device)
    fitted, too_large = fit_to_update(fitted, base, data.longest)
    for sentence in (*unfit, *left_out, *too_large):
        notice(sentence)
    return fitted


def _warn_of_shared_cores(jobs: int, installation: Installation, notice: Notice) -> None:
    if jobs > 1 and installation.device == "CPU":
        notice(
            f"--jobs {jobs} on CPU: trials share its cores and disturb each other's "
            "timings; use it to try things, not for figures"
        )


def _given_models(file: CostFile | None, base: TrainConfig, path: str) -> GivenModels:
    """The fits of `--cost-model`, which must be of this model."""
    if file is None:
        return {}
    wanted = cost_identity(base)
    if file.model != wanted:
        raise BadInputError(
            f"--cost-model {path} belongs to another model or optimizer ({file.model}, now "
            f"{wanted})",
            fix="give the file of a study of this config, or leave it out",
        )
    return given_models(file)


def _assumed_installation(models: GivenModels, base: TrainConfig) -> Installation:
    """What a dry run plans for: the device of the cost model, else the config's own."""
    devices = sorted({key.device for key in models})
    wanted = {"cpu": "CPU", "ascend": "Ascend"}.get(base.device)
    device = wanted or (devices[0] if devices else "CPU")
    return Installation(device=device, versions={})


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
    if base.model.source is not None:
        there = {"model.source": os.path.abspath(base.model.source)}
        base = override_config(base, there, source="model.source")
    if base.evaluation is not None and base.evaluation.path is not None:
        beside = {"evaluation.path": os.path.abspath(base.evaluation.path)}
        base = override_config(base, beside, source="evaluation")
    if base.train.max_steps is not None:
        notice(
            f"train.max_steps is {base.train.max_steps}; candidates are compared over all "
            f"{base.train.epochs} epochs"
        )
    return base, dataset


def _tuned_data(
    dataset: MindRecordSet, base: TrainConfig, folder: StudyFolder, notice: Notice
) -> TunedData:
    columns = [base.data.input_column, base.data.label_column]
    require_columns(dataset, [column for column in columns if column is not None])
    every_row = scan_lengths(dataset, base.data.input_column, cache=folder.path)
    lengths = training_part(every_row, base.evaluation)
    tokens, _, dropped = admitted_tokens(lengths, base.data, base.data.max_length)
    if HELD_OUT in dropped:
        notice(f"{dropped[HELD_OUT]} rows are held out for evaluation and not tuned on")
    return TunedData(dataset=dataset, lengths=lengths, longest=int(tokens.max()))


def study_context(setup: StudySetup, notes: tuple[str, ...], command: str) -> StudyContext:
    """What the pages say besides the result.

    Args:
        setup: Of the study.
        notes: Assumptions and things left out.
        command: The command line that goes on with the study.
    """
    return StudyContext(
        data_path=setup.base.data.path,
        num_samples=setup.data.lengths.num_samples,
        longest=setup.data.longest,
        device=setup.installation.device,
        versions=setup.installation.versions,
        notes=notes,
        command=command,
        best_config_path=str(setup.folder.best_config),
        storage=setup.storage,
        num_cores=len(os.sched_getaffinity(0)),
    )

"""Whether a config will run here, and what differs from where it was tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tuner.config.schema import ProvenanceConfig, TrainConfig
from tuner.data.record_files import open_mindrecord, require_columns
from tuner.diagnose.capability import CapabilityResult
from tuner.diagnose.finding import Finding, finding_of_error
from tuner.diagnose.host import Host, check_host, read_host
from tuner.diagnose.row_check import check_rows
from tuner.errors import BadInputError


def check_config(
    config: TrainConfig,
    host: Host,
    device: str | None,
    versions: Mapping[str, str],
    tried: tuple[CapabilityResult, ...] = (),
) -> list[Finding]:
    """What stands between a config and a run of it on this machine.

    Args:
        config: As it was loaded.
        host: This machine.
        device: That MindSpore has here for the config's choice; None: it does not start.
        versions: Installed ones, by the names that provenance has.
        tried: What was found to work, or not, by doing it.
    """
    findings = [*_check_data(config, device), *_check_places(config)]
    findings += _check_graph(config, device, tried)
    findings += _check_memory(config, host)
    if config.provenance is None:
        findings.append(
            Finding(
                name="config-by-hand",
                severity="note",
                what="the config has no provenance: nothing says how it was chosen",
                why="whether it is the fastest for this data is not known",
                fix="varseq-tune --config FILE makes it the base of a study",
            )
        )
    else:
        findings += _compare_with_tuned(config.provenance, device, versions)
    return findings


def _check_data(config: TrainConfig, device: str | None) -> Iterator[Finding]:
    """The rows are there and whole, and they are those that were tuned on."""
    try:
        dataset = open_mindrecord(config.data.path)
        columns = [config.data.input_column, config.data.label_column]
        require_columns(dataset, [column for column in columns if column is not None])
    except BadInputError as error:
        why = "there is nothing to train on"
        yield finding_of_error(error, name="config-data", why=why, place="data.path")
        return
    yield Finding(
        name="config-data", severity="ok", what=f"{config.data.path}: {dataset.num_samples:,} rows"
    )
    tuned = config.provenance
    if tuned is not None and tuned.data_fingerprint != dataset.fingerprint:
        yield Finding(
            name="config-other-data",
            severity="error",
            what=f"not the data that was tuned on: {dataset.num_samples:,} rows, tuned on "
            f"{tuned.num_samples:,}, fingerprint {dataset.fingerprint[:12]} instead of "
            f"{tuned.data_fingerprint[:12]}",
            why="its shapes and predictions belong to other lengths; varseq-train refuses",
            fix="run varseq-tune on this data, or train with --accept-data",
        )
    if device is not None:
        yield from check_rows(dataset, config)


def _check_places(config: TrainConfig) -> Iterator[Finding]:
    """What the config names in the file system."""
    source = config.model.source
    if source is not None and not Path(source).is_dir():
        yield Finding(
            name="config-source",
            severity="error",
            what=f"model.source: no such folder: {source}",
            why="the first weights are read from there",
            fix="give the folder of the checkpoint, or set model.source to null",
        )
    for finding in check_host(read_host(Path(config.train.out))):
        if finding.name.startswith("disk"):
            yield finding


def _check_graph(
    config: TrainConfig, device: str | None, tried: tuple[CapabilityResult, ...]
) -> Iterator[Finding]:
    """Device, graph mode, level and dtype."""
    if device is None:
        yield Finding(
            name="config-device",
            severity="error",
            what=f"device {config.device}: MindSpore has no such device here, or does not start",
            why="the config cannot run",
            fix="see the findings on MindSpore above, or set device to cpu or auto",
        )
        return
    # The device that MindSpore has decides, so this needs it; without it we are not here.
    from tuner.train.device import check_fits
    from tuner.train.flash import attention_of

    try:
        check_fits(config, device)
        attention = attention_of(config, device, _longest(config))
    except BadInputError as error:
        why = "varseq-train refuses it here"
        yield finding_of_error(error, name="config-refused", why=why)
        return
    broken = [item for item in tried if not item.works and _is_of(item, config)]
    for item in broken:
        yield Finding(
            name="config-broken-kind",
            severity="error",
            what=f"{item.capability.name} does not work here: {item.result.reason}",
            why="the config asks for it",
            fix="mend what the finding above says, or tune on this machine",
        )
    if not broken:
        graph, dtype = config.graph, config.precision.compute_dtype
        yield Finding(
            name="config-graph",
            severity="ok",
            what=f"{graph.mode} graph, {graph.jit_level}, {dtype} on {device}; {attention}",
        )


def _longest(config: TrainConfig) -> int:
    """Padded tokens of the longest planned row, as far as the config says; else 1."""
    tuned = config.provenance
    planned = [length for _, length in tuned.shapes] if tuned else []
    return max([*planned, *config.batching.boundaries, config.data.max_length or 1])


def _is_of(item: CapabilityResult, config: TrainConfig) -> bool:
    """Whether a config is of the kind that was tried."""
    changes = item.capability.changes
    plain = {
        "graph.mode": config.graph.mode,
        "graph.jit_level": config.graph.jit_level,
        "precision.compute_dtype": config.precision.compute_dtype,
    }
    usual = {"graph.mode": "static", "graph.jit_level": "O0", "precision.compute_dtype": "fp32"}
    if not changes:
        return plain == usual
    return all(plain[name] == value for name, value in changes.items() if name in plain)


def _check_memory(config: TrainConfig, host: Host) -> Iterator[Finding]:
    """What the study saw of memory, against what is free."""
    tuned = config.provenance
    if tuned is None or tuned.device != "CPU":
        return
    needed = tuned.prediction.peak_bytes
    text = (
        f"the study saw {needed / 1e9:.1f} GB at its peak, {host.free_memory_bytes / 1e9:.1f} GB "
        "are free here"
    )
    if needed <= host.free_memory_bytes:
        yield Finding(name="config-memory", severity="ok", what=text)
        return
    yield Finding(
        name="config-memory",
        severity="warning",
        what=text,
        why="a process that runs out of memory is killed in its warm-up",
        fix="end other programs, or tune again here with --memory-limit",
    )


def _compare_with_tuned(
    tuned: ProvenanceConfig, device: str | None, versions: Mapping[str, str]
) -> Iterator[Finding]:
    """Device and versions, then and now."""
    if device is not None and tuned.device != device:
        yield Finding(
            name="config-other-device",
            severity="warning",
            what=f"tuned on {tuned.device}, here it would run on {device}",
            why="timings and winners do not carry over",
            fix="tune again on this device",
        )
    changed = [
        f"{name} {before}, here {versions[name]}"
        for name, before in tuned.versions.items()
        if name in versions and versions[name] != before
    ]
    if changed:
        yield Finding(
            name="config-other-versions",
            severity="note",
            what=f"tuned with {'; '.join(changed)}",
            why="compile and step seconds change between releases",
            fix="tune again if the end of a run shows other figures than predicted",
        )
    else:
        yield Finding(name="config-versions", severity="ok", what="the versions it was tuned with")

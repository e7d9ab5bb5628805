"""Changing a config by dotted names: the one mechanism behind `--set` and the tuner's choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.config.codec import parse_model, parse_yaml, to_plain
from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Turn `--set` arguments into overrides.

    Args:
        assignments: Each `a.b=value`; the value is read as YAML.

    Returns:
        Dotted name to value; the last of equal names wins.

    Raises:
        BadInputError: no `=`, no name, or a value that is not YAML.

    Example:
        >>> parse_assignments(["train.max_steps=50", "batching.boundaries=[64, 128]"])
        {'train.max_steps': 50, 'batching.boundaries': [64, 128]}
    """
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name.strip():
            raise BadInputError(
                f"--set needs name=value (got {assignment!r})",
                fix="write --set train.max_steps=50",
            )
        try:
            overrides[name.strip()] = parse_yaml(text)
        except ValueError:
            raise BadInputError(
                f"--set needs a YAML value (got {assignment!r})", fix="quote the value"
            ) from None
    return overrides


def override_config(
    config: TrainConfig, overrides: Mapping[str, Any], *, source: str = "--set"
) -> TrainConfig:
    """A new config with some values changed and the whole validated again.

    Args:
        config: The config to start from; stays as it is.
        overrides: Dotted name to new value, for example `{"batching.align": 32}`.
        source: Who asks; starts the error line.

    Raises:
        BadInputError: a name that does not exist or a value against the schema.
    """
    return parse_model(TrainConfig, override_plain(to_plain(config), overrides), source=source)


def override_plain(plain: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Plain nested data with some dotted names set; missing sections come into being."""
    result = dict(plain)
    for name, value in overrides.items():
        section, separator, rest = name.partition(".")
        if separator:
            inner = result.get(section)
            nested = inner if isinstance(inner, Mapping) else {}
            result[section] = override_plain(nested, {rest: value})
        else:
            result[section] = value
    return result

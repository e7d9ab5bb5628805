"""The only place that reads or writes YAML, and that turns schema errors into sentences."""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from tuner.config.hf_config import fill_model_section
from tuner.config.schema import TrainConfig
from tuner.errors import BadInputError

Model = TypeVar("Model", bound=BaseModel)


def load_config(path: str | Path) -> TrainConfig:
    """Read a config file.

    Args:
        path: YAML file with the sections of `TrainConfig`.

    Returns:
        The validated config.

    Raises:
        BadInputError: the file is missing, is not YAML, or breaks the schema.
    """
    return parse_model(TrainConfig, read_yaml(path), source=str(path))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping.

    Raises:
        BadInputError: the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInputError(f"no such file: {path}", fix="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read {path}: {error}", fix="give a YAML file") from None
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise BadInputError(f"{path} is not YAML: {error}", fix="mend that line") from None
    if not isinstance(content, dict):
        raise BadInputError(
            f"{path} must be a mapping of sections (got {type(content).__name__})",
            fix="start from a best.yaml or from the example in the README",
        )
    return content


def parse_yaml(text: str) -> Any:
    """Parse YAML text; `1e-3` is a number here and a repeated key is an error.

    Raises:
        ValueError: the text is not YAML or names a key twice; says where, in one line.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        # PyYAML lets a plain ValueError through for scalars such as 2024-13-45 or 0x_.
        raise ValueError(" ".join(str(error).split())) from None


def parse_model(model: type[Model], content: Mapping[str, Any], *, source: str) -> Model:
    """Validate plain data against a schema.

    Args:
        model: The schema.
        content: What the YAML held.
        source: File or option that it came from; starts the error line.

    Raises:
        BadInputError: a field is unknown, missing or out of its range; or the folder of
            model.source, which gives the sizes that a config leaves out, cannot be read.
    """
    try:
        if model is TrainConfig:
            content = fill_model_section(content)
        return model.model_validate(_tuples(content))
    except ValidationError as error:
        raise _sentence(model, error, source) from None
    except RecursionError:
        raise BadInputError(
            f"{source}: nested too deeply, or an alias holds itself", fix="write it out"
        ) from None


def to_plain(config: BaseModel) -> dict[str, Any]:
    """The config as plain data that YAML and JSON can hold; the inverse of `parse_model`."""
    plain = config.model_dump(mode="json")
    if not isinstance(plain, dict):
        raise TypeError(f"{type(config).__name__} is not a mapping")
    return plain


def format_config(config: BaseModel, *, header: str = "") -> str:
    """The config as YAML text, sections in schema order, after a comment.

    Args:
        config: Any schema value.
        header: Lines that stand as comments above it.
    """
    return format_plain(to_plain(config), header=header)


def format_plain(content: Mapping[str, Any], *, header: str = "") -> str:
    """Plain data as YAML text, in its own order, after a comment; the inverse of `parse_yaml`.

    Args:
        content: What YAML can hold.
        header: Lines that stand as comments above it.
    """
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    return comment + yaml.dump(
        content, Dumper=_FlowListDumper, sort_keys=False, width=96, allow_unicode=True
    )


def write_text(path: Path, text: str) -> None:
    """Write a file so that readers see the old content or the new, never half of either.

    Raises:
        BadInputError: the folder cannot be written or is full; the old file stays.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        reason = error.strerror or error
        raise BadInputError(
            f"cannot write {path}: {reason}", fix="choose a folder that can be written"
        ) from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that takes 1e-3 for a float (YAML 1.2) and refuses repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # PyYAML refuses it below, with its place.
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _FlowListDumper(yaml.SafeDumper):
    """Writes lists of numbers on one line, as people write boundaries."""


# The dumper needs it too: it must quote a text such as "1e-3", or a fingerprint such as "12e4".
for _side in (_StrictLoader, _FlowListDumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:[0-9]+|[0-9]*\.[0-9]+|[0-9]+\.[0-9]*)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    flow = all(not isinstance(value, dict) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flow)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # In any other style PyYAML folds line ends such as U+0085 and reads back another text.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_FlowListDumper.add_representer(list, _represent_list)
_FlowListDumper.add_representer(str, _represent_text)


def _tuples(value: Any) -> Any:
    """YAML's lists as the tuples that the frozen schema holds."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_tuples(item) for item in value)
    return value


def _sentence(model: type[BaseModel], error: ValidationError, source: str) -> BadInputError:
    """The first fault as field, rule, value, way out; unknown names first, they explain others."""
    # Of a union's members the one that got furthest into the value says most.
    fault = min(
        error.errors(),
        key=lambda fault: (fault["type"] != "extra_forbidden", -len(fault["loc"])),
    )
    # Members of unions appear in the location as type names: they are not fields.
    *parents, last = fault["loc"] or ("",)
    location = [part for part in parents if not _is_union_member(part)]
    if fault["type"] == "extra_forbidden":
        return _unknown_key(model, [*location, last], source)
    if not _is_union_member(last):
        location.append(last)
    field = _dotted(location)
    if fault["type"] == "missing":
        return BadInputError(f"{source}: {field} is missing", fix=f"add {field}")
    rule = fault["msg"].removeprefix("Value error, ")
    got = "" if isinstance(fault["input"], Mapping) else f" (got {fault['input']!r})"
    place = f"{field}: " if field else ""
    return BadInputError(f"{source}: {place}{rule}{got}", fix="mend that value")


def _dotted(location: list[Any]) -> str:
    """The field's name on one line, whatever the file has for keys."""
    return " ".join(".".join(str(part) for part in location).split())


def _is_union_member(part: object) -> bool:
    text = str(part)
    return text in {"int", "float", "str"} or text.startswith(
        ("tuple[", "constrained-", "function-")
    )


def _unknown_key(model: type[BaseModel], location: list[Any], source: str) -> BadInputError:
    allowed = _fields_at(model, location[:-1])
    name = str(location[-1])
    nearest = difflib.get_close_matches(name, allowed, n=3, cutoff=0.5)
    others = [field for field in allowed if field not in nearest]
    field = _dotted(location)
    meant = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    known = ", ".join(nearest + others)
    return BadInputError(f"{source}: unknown key {field}", fix=f"{meant}known here: {known}")


def _fields_at(model: type[BaseModel], location: list[Any]) -> list[str]:
    """Field names of the section at a location; walks through optional sections and tables."""
    section: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        section = _section_type(section.model_fields[str(part)].annotation)
    return list(section.model_fields)


def _section_type(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _section_type(argument)
        if found is not None:
            return found
    return None

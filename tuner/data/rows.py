"""From one JSON object to the text of a row, in parts that are trained on or not.

| keys | parts |
|---|---|
| messages | one per turn; turns of the assistant are trained on |
| prompt, completion | the completion is trained on |
| instruction, input, output | the output is trained on; an empty or missing input is left out |
| text | all of it is trained on |

How parts join: they follow each other as they are, with one line break between two parts where
neither side has white space at the seam. Nothing else is added: no role names, no template. The
tokens of a row are then the tokens of that plain text. A text that shall have role markers has to
contain them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TRAINED_ROLE = "assistant"
MAX_KEYS_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class TextRow:
    """One row before it is tokenised."""

    row_format: str
    """Which keys it was made from, for example `prompt+completion`."""
    text: str
    """All parts, joined."""
    part_ends: tuple[int, ...]
    """For each part, the character after its last; ascending, the last is len(text)."""
    part_is_trained: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class SkippedRow:
    """A row that cannot be used, and why."""

    reason: str


Part = tuple[str, bool]


def parse_row(value: object) -> TextRow | SkippedRow:
    """Find out which format a JSON value has and join its parts.

    Args:
        value: What a line of a .jsonl file holds.
    """
    if not isinstance(value, Mapping):
        return SkippedRow(reason="not an object but " + _json_type(value))
    for row_format, (required, read_parts) in _FORMATS.items():
        if all(key in value for key in required):
            parts = read_parts(value)
            return parts if isinstance(parts, SkippedRow) else _join(row_format, parts)
    keys = [str(key) for key in value][:MAX_KEYS_SHOWN]
    more = ", ..." if len(value) > MAX_KEYS_SHOWN else ""
    return SkippedRow(reason=f"unknown format, keys: {', '.join(keys) or 'none'}{more}")


def parse_text(text: str) -> TextRow | SkippedRow:
    """A row of plain text."""
    return _join("text", [(text, True)])


def _join(row_format: str, parts: Sequence[Part]) -> TextRow | SkippedRow:
    text = ""
    ends: list[int] = []
    trained: list[bool] = []
    for part, is_trained in parts:
        if not part:
            continue
        if text and not (text[-1].isspace() or part[0].isspace()):
            # It ends the earlier part: not trained on after a prompt, trained on after an answer.
            text += "\n"
            ends[-1] = len(text)
        text += _replace_surrogates(part)
        ends.append(len(text))
        trained.append(is_trained)
    if not text.strip():
        return SkippedRow(reason="no text")
    return TextRow(
        row_format=row_format, text=text, part_ends=tuple(ends), part_is_trained=tuple(trained)
    )


def _replace_surrogates(text: str) -> str:
    r"""JSON can spell half a character (`\ud83d`), which no tokenizer can take."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_messages(value: Mapping[str, Any]) -> list[Part] | SkippedRow:
    messages = value["messages"]
    if not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
        return SkippedRow(reason="messages is not a list of objects")
    parts: list[Part] = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            return SkippedRow(reason="the content of a message is not text")
        parts.append((content, message.get("role") == TRAINED_ROLE))
    return parts


def _read_pair(value: Mapping[str, Any]) -> list[Part] | SkippedRow:
    return _read_fields(value, ("prompt", "completion"))


def _read_instruction(value: Mapping[str, Any]) -> list[Part] | SkippedRow:
    return _read_fields(value, ("instruction", "input", "output"))


def _read_text(value: Mapping[str, Any]) -> list[Part] | SkippedRow:
    return _read_fields(value, ("text",))


def _read_fields(value: Mapping[str, Any], keys: tuple[str, ...]) -> list[Part] | SkippedRow:
    """The last of the keys is what is trained on; null and a missing optional key are empty."""
    texts = [value.get(key) or "" for key in keys]
    for key, text in zip(keys, texts, strict=True):
        if not isinstance(text, str):
            return SkippedRow(reason=f"{key} is not text but {_json_type(text)}")
    return [(text, key == keys[-1]) for key, text in zip(keys, texts, strict=True)]


def _json_type(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", str: "a string", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, Mapping) else "a number")


# The first whose keys are all there: a row with messages may carry a text of its own as well.
_FORMATS: Mapping[
    str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], list[Part] | SkippedRow]]
] = {
    "messages": (("messages",), _read_messages),
    "prompt+completion": (("prompt", "completion"), _read_pair),
    "instruction+input+output": (("instruction", "output"), _read_instruction),
    "text": (("text",), _read_text),
}

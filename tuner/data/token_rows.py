"""From the text of a row to token ids and labels.

`labels[i]` is `input_ids[i]` where that token is trained on and -100 where not. They are NOT
shifted: the trainer predicts token i + 1 from the tokens up to i and shifts by itself. A token
belongs to the part of the row that its last character is in; the end token to the last part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.data.content import IGNORED_LABEL
from tuner.data.rows import TextRow
from tuner.data.tokenizer import EncodedText, Ids, TextTokenizer

ROWS_PER_CHUNK = 1000
CHARACTERS_PER_CHUNK = 2 << 20


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One row as it will be written."""

    input_ids: Ids
    """int32 [length]."""
    labels: Ids
    """int32 [length], IGNORED_LABEL where not trained on."""
    is_truncated: bool
    """Tokens of the text were cut off."""


@dataclass(frozen=True, kw_only=True)
class LabelPolicy:
    """How rows become tokens."""

    max_length: int | None
    """Tokens that a row may have, inclusive; None for no limit."""
    train_on_prompt: bool = False
    """Every token is trained on, not only answers."""


def tokenise_rows(
    rows: Iterable[TextRow], tokenizer: TextTokenizer, policy: LabelPolicy
) -> Iterator[TokenRow]:
    """Tokenise rows chunk by chunk; each gives exactly one, which may be without tokens."""
    for chunk in _chunks(rows):
        encoded = tokenizer.encode([row.text for row in chunk], policy.max_length)
        for row, text in zip(chunk, encoded, strict=True):
            yield _label(row, text, tokenizer.end_id, policy)


def _chunks(rows: Iterable[TextRow]) -> Iterator[Sequence[TextRow]]:
    chunk: list[TextRow] = []
    num_characters = 0
    for row in rows:
        chunk.append(row)
        num_characters += len(row.text)
        if len(chunk) == ROWS_PER_CHUNK or num_characters > CHARACTERS_PER_CHUNK:
            yield chunk
            chunk, num_characters = [], 0
    if chunk:
        yield chunk


def _label(row: TextRow, text: EncodedText, end_id: int | None, policy: LabelPolicy) -> TokenRow:
    ids = text.ids
    trained = _find_trained(row, text, policy)
    fits = policy.max_length is None or text.num_tokens < policy.max_length
    if end_id is not None and len(ids) and fits and ids[-1] != end_id:
        last_is_trained = row.part_is_trained[-1] or policy.train_on_prompt
        ids = np.append(ids, np.int32(end_id))
        trained = np.append(trained, last_is_trained)
    return TokenRow(
        input_ids=ids,
        labels=np.where(trained, ids, np.int32(IGNORED_LABEL)),
        is_truncated=text.num_tokens > len(text.ids),
    )


def _find_trained(row: TextRow, text: EncodedText, policy: LabelPolicy) -> npt.NDArray[np.bool_]:
    if policy.train_on_prompt or all(row.part_is_trained):
        return np.ones(len(text.ids), np.bool_)
    part = np.searchsorted(row.part_ends, text.find_ends(), side="left")
    flags: npt.NDArray[np.bool_] = np.array(row.part_is_trained)[part]
    return flags

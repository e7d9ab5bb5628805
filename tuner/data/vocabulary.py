"""Fewer token ids than the tokenizer has: rare ones fold into one unknown id.

A small vocabulary makes small logits, which is what a benchmark on a CPU needs; lengths stay as
they are. The most frequent ids of the input are kept and numbered by rank, most frequent first
(ties: the smaller id first); every other id becomes the last one, `limit - 1`. The end token is
always kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.data.tokenizer import Ids

MIN_VOCAB_LIMIT = 3  # an end token, one id to tell from it, the unknown id
POLICY = "the most frequent ids of the input by rank, all others are the last id"


@dataclass(frozen=True, kw_only=True)
class FoldedVocabulary:
    """A map from the tokenizer's ids to fewer."""

    new_ids: Ids
    """int32 [vocabulary size of the tokenizer]."""
    kept_ids: Ids
    """int32 [at most limit - 1]: the tokenizer's id of each new id, for decoding."""
    num_folded_tokens: int
    """Tokens of the counted input that became the unknown id."""

    @property
    def unknown_id(self) -> int:
        """The id of everything that was not kept."""
        return len(self.kept_ids)

    @property
    def vocab_size(self) -> int:
        """Ids after folding."""
        return len(self.kept_ids) + 1


def fold_vocabulary(
    counts: npt.NDArray[np.int64], limit: int, end_id: int | None
) -> FoldedVocabulary:
    """Choose the ids to keep.

    Args:
        counts: int64 [vocabulary size of the tokenizer], occurrences in the input.
        limit: Ids to have afterwards, the unknown id included.
        end_id: Kept whatever its count is.
    """
    rank = np.argsort(-counts, kind="stable")
    kept = rank[counts[rank] > 0][: limit - 1]
    if end_id is not None and end_id not in kept:
        kept = np.append(kept[: limit - 2], end_id)
    new_ids = np.full(len(counts), len(kept), np.int32)
    new_ids[kept] = np.arange(len(kept), dtype=np.int32)
    return FoldedVocabulary(
        new_ids=new_ids,
        kept_ids=kept.astype(np.int32),
        num_folded_tokens=int(counts.sum() - counts[kept].sum()),
    )

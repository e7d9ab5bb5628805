"""Cumulative lengths of packed rows, as flash attention takes them in layout TND; NumPy alone.

From the documentation, not run. The rows of a batch lie one behind the other. Each ends its own
sequences: its samples, then the padding behind the last of them. So no sequence crosses a row, and
every token is of a sequence and sees at least itself.

A static graph takes lengths of one size, but batches hold more or fewer sequences. So they are
filled up with the number of tokens: by sequences that have neither queries nor keys.

- CANN, whose kernel computes them, allows it: actualSeqQLen takes lengths of 0 where there is no
  bias, [2, 2, 0, 2, 2] given as [2, 4, 4, 6, 8]; what it refuses is queries without keys (pages of
  aclnnFlashAttentionVarLenScore up to V5). The backward as well, with 1 to 2K entries (page of
  aclnnFlashAttentionUnpaddingScoreGrad). The source of the kernel's tiling says the same: it
  refuses that pair alone, and looks for the last sequence that is not empty
  (FlashAttentionScoreTilingBase).
- MindSpore's kernel passes them on: it refuses lengths that fall or do not end with the number of
  tokens (CheckSeqList in flash_attention_score_aclnn_kernel.h); equal neighbours pass.
- MindFormers trains static graphs that way: its column actual_seq_len holds the ends of samples,
  filled up with the length of the row to eod_pad_length entries, by default 128 (gpt_dataset.py,
  _get_eod_attention_mask), and goes in as both lengths with sparse mode 3 (transformer_config.py).
- Against it stands a sentence on `ops.flash_attention_score` in MindSpore 2.7.0 to 2.10: "0 should
  not exist in list_seq_k". It is taken for CANN's rule, which is about keys that queries lack.

Lengths come with the batch, as an input of the step, and are not computed in the graph: CANN takes
them from the host (aclIntArray), and MindSpore reads their values before every launch. Those of an
input are on the host when the step starts; computed ones would have to come back from the device
first. They are a Tensor, since a list is a constant, with a compile for every new one. MindSpore
turns it into a tuple inside the graph, once for both lengths (2.10, looked at on CPU as far as the
choice of kernels).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.batching.packed_bounds import PackedBounds
from tuner.errors import BadInputError
from tuner.train.flash_arguments import MAX_SEQUENCES, MAX_TOKENS

SIZE_MULTIPLE = 128
"""As in MindFormers; and so a few samples more in the data change no graph."""


def layout_refusal(bounds: PackedBounds) -> str | None:
    """Why packed rows cannot attend in layout TND, as half a sentence; None if they can.

    Args:
        bounds: Of all batches of the run.
    """
    if bounds.sequences > MAX_SEQUENCES:
        return f"a batch may hold {bounds.sequences} sequences (layout TND takes {MAX_SEQUENCES})"
    if bounds.tokens > MAX_TOKENS:
        return f"a batch may hold {bounds.tokens} tokens (layout TND takes {MAX_TOKENS})"
    return None


def num_lengths(sequences: int) -> int:
    """Entries that hold so many sequences: the next multiple of 128.

    Args:
        sequences: >= 1.
    """
    return -(-sequences // SIZE_MULTIPLE) * SIZE_MULTIPLE


def cumulative_lengths(segment_ids_BT: NDArray[Any], size: int) -> NDArray[np.int64]:
    """Where the sequences of a batch end, int64 [size], never falling, the last B * T.

    A batch that holds more than that, which none of the plan does, gets more entries: it compiles
    a graph of its own, which is told, and loses nothing.

    Args:
        segment_ids_BT: [B, T]; 1, 2, ... for the samples of a row, 0 for padding.
        size: Entries, as `num_lengths` gives it.

    Raises:
        BadInputError: there are more sequences than the op takes.
    """
    is_end = np.ones(segment_ids_BT.shape, dtype=bool)
    is_end[:, :-1] = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    ends = np.flatnonzero(is_end) + 1
    if len(ends) > MAX_SEQUENCES:
        raise BadInputError(
            f"a batch holds {len(ends)} sequences, flash attention takes {MAX_SEQUENCES}",
            fix="set graph.attention to math, or take smaller batches",
        )
    lengths = np.full(max(size, num_lengths(len(ends))), segment_ids_BT.size, dtype=np.int64)
    lengths[: len(ends)] = ends
    return lengths

"""A tiny model and tiny batches; each compiled shape costs seconds, so graphs are shared."""

from __future__ import annotations

import numpy as np

from tuner.train.loader import Batch

TINY_MODEL = {
    "model.vocab_size": 23,
    "model.width": 16,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_width": 24,
    # Large enough that logits differ visibly between tokens.
    "model.init_std": 0.3,
}


def random_batch(shape, lengths, seed=0, vocab_size=23, ignored_before=0):
    """A batch of random rows of the given lengths; the first labels of each may be ignored."""
    rng = np.random.default_rng(seed)
    input_ids = np.zeros(shape, np.int32)
    targets = np.full(shape, -100, np.int32)
    for row, length in enumerate(lengths):
        input_ids[row, :length] = rng.integers(0, vocab_size, length)
        labelled = np.arange(ignored_before, length - 1)
        targets[row, labelled] = input_ids[row, labelled + 1]
    return Batch(
        input_ids_BT=input_ids,
        targets_BT=targets,
        real_tokens=int(sum(lengths)),
        label_tokens=int((targets != -100).sum()),
    )

"""A user's Cell that computes otherwise while it is trained."""

from __future__ import annotations

from mindspore import nn

WIDTH = 16


class Dropping(nn.Cell):
    """Embedding, dropout of half of it, logits; no attention, so rows are bags of tokens."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, WIDTH)
        self.dropout = nn.Dropout(p=0.5)
        self.out = nn.Dense(WIDTH, vocab_size)

    def construct(self, input_ids_BT, segment_ids_BT, position_ids_BT):
        return self.out(self.dropout(self.table(input_ids_BT)))


def dropping(config, max_length):
    return Dropping(config.model.vocab_size)

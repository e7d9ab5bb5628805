"""The lengths that comparisons run on: two drawn sets, and two real ones if at hand."""

from __future__ import annotations

import csv
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tuner.data.lengths import scan_lengths
from tuner.data.mindrecord import open_mindrecord
from tuner.data.prepare import PrepareOptions, prepare

IntArray = NDArray[np.int64]

LONGEST_DRAWN_TOKENS = 4096
MIX_PARTS = ("chat", "pairs", "instructions", "documents")
MIX_LONGEST_TOKENS = 512


def lognormal_tokens(num_rows: int) -> IntArray:
    """Median 300, sigma 1, from 1 to 4096 tokens: many short rows, few long ones."""
    drawn = np.random.default_rng(0).lognormal(np.log(300), 1.0, num_rows)
    return np.clip(drawn, 1, LONGEST_DRAWN_TOKENS).astype(np.int64)


def uniform_tokens(num_rows: int) -> IntArray:
    """Any length from 1 to 4096 tokens as often as any other."""
    return np.random.default_rng(0).integers(1, LONGEST_DRAWN_TOKENS + 1, num_rows)


@cache
def azure_tokens() -> IntArray:
    """Prompt and answer of every request of a conversation service, in tokens of its model."""
    with (shared_data() / "lengths" / "azure_2023_conv.csv").open(newline="") as lines:
        requests = list(csv.DictReader(lines))
    return np.array([int(r["ContextTokens"]) + int(r["GeneratedTokens"]) for r in requests])


@cache
def mix_tokens(max_length: int = MIX_LONGEST_TOKENS) -> IntArray:
    """10,162 rows of chat, pairs, instructions and documents, cut to so many GPT-2 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        file = write_mix(Path(folder) / "mix.mindrecord", max_length)
        return scan_lengths(open_mindrecord(str(file))).tokens.astype(np.int64)


def write_mix(file: Path, max_length: int, vocab_limit: int | None = None) -> Path:
    """Those rows in GPT-2 tokens as a MindRecord file, if it is not there yet."""
    if not file.exists():
        data = shared_data()
        options = PrepareOptions(
            inputs=tuple(str(data / f"{part}.jsonl.gz") for part in MIX_PARTS),
            out=file,
            tokenizer=str(data / "tokenizers" / "gpt2-bpe" / "tokenizer.json"),
            max_length=max_length,
            vocab_limit=vocab_limit,
        )
        prepare(options, lambda *_: None)
    return file


def shared_data() -> Path:
    folder = Path(__file__).resolve().parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared text and lengths are not beside this checkout")
    return folder

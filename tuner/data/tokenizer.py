"""Tokenizers behind one small interface: from a file, bytes, or trained on the input.

The end token (`<|endoftext|>`, `</s>`, `[SEP]`, ...) closes every row whose text fits, so that a
model learns to stop. What a tokenizer.json itself puts around a text (`[CLS]`, `<s>`) stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tuner.data.sentencepiece import read_tokenizer
from tuner.errors import BadInputError

Ids = npt.NDArray[np.int32]

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
PAD_TOKENS = ("<|pad|>", "<pad>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>")
AUTOMATIC, NO_END_TOKEN = "auto", "none"
NUM_BYTES = 256
MIN_TRAINED_VOCAB = NUM_BYTES + 2


@dataclass(frozen=True, kw_only=True)
class EncodedText:
    """The tokens of one text."""

    ids: Ids
    """int32 [min(num_tokens, limit)]."""
    num_tokens: int
    """Tokens before the limit cut them off."""
    find_ends: Callable[[], Ids]
    """For each token, the character after its last: int32, as long as ids, never falling."""


class TextTokenizer(Protocol):
    """Turns texts into token ids."""

    name: str
    sha256: str
    """Of the tokenizer's file; identifies the tokenizer whatever it is called."""
    vocab_size: int
    """Every id is below it."""
    pad_id: int
    """For filling up batches later; the end token where there is no token for it."""
    end_id: int | None

    def encode(self, texts: Sequence[str], limit: int | None) -> list[EncodedText]:
        """Tokenise texts and keep the first `limit` tokens of each."""
        ...


class LibraryTokenizer:
    """A tokenizer of Hugging Face's `tokenizers` library.

    Args:
        tokenizer: The library's object.
        name: To show.
        content: What its sha256 is taken of.
        end_token: A token of the vocabulary, `none`, or `auto` for the first of END_TOKENS there.
    """

    def __init__(self, tokenizer: Any, *, name: str, content: bytes, end_token: str) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise BadInputError(f"the tokenizer {name} has no tokens", fix="name another file")
        self.name = name
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_id = _find_end_id(vocabulary, end_token, name)
        pads = (vocabulary[token] for token in PAD_TOKENS if token in vocabulary)
        self.pad_id = next(pads, 0 if self.end_id is None else self.end_id)

    def encode(self, texts: Sequence[str], limit: int | None) -> list[EncodedText]:
        """Tokenise texts in parallel."""
        return [self._cut(encoding, limit) for encoding in self._tokenizer.encode_batch(texts)]

    def to_json(self) -> str:
        """The content of a tokenizer.json file."""
        return str(self._tokenizer.to_str(pretty=True))

    def _cut(self, encoding: Any, limit: int | None) -> EncodedText:
        num_tokens = len(encoding)
        if limit is not None and num_tokens > limit:
            encoding.truncate(limit)

        def find_ends() -> Ids:
            # Tokens that the tokenizer adds have no place in the text: take the neighbour's.
            ends = np.fromiter((end for _, end in encoding.offsets), np.int32, len(encoding))
            return np.maximum.accumulate(ends)

        return EncodedText(
            ids=np.array(encoding.ids, np.int32), num_tokens=num_tokens, find_ends=find_ends
        )


class ByteTokenizer:
    """One token per UTF-8 byte: ids 0 to 255, then the end token and the padding.

    Args:
        end_token: `auto` or `none`.
    """

    name = "bytes"
    sha256 = hashlib.sha256(b"bytes, end 256, pad 257").hexdigest()
    vocab_size = NUM_BYTES + 2
    pad_id = NUM_BYTES + 1

    def __init__(self, end_token: str = AUTOMATIC) -> None:
        if end_token not in (AUTOMATIC, NO_END_TOKEN):
            raise BadInputError(
                f"the byte tokenizer has no token '{end_token}'",
                fix="use --end-token auto or none",
            )
        self.end_id = NUM_BYTES if end_token == AUTOMATIC else None

    def encode(self, texts: Sequence[str], limit: int | None) -> list[EncodedText]:
        """Turn texts into their bytes."""
        return [self._encode_one(text, limit) for text in texts]

    def _encode_one(self, text: str, limit: int | None) -> EncodedText:
        data = np.frombuffer(text.encode("utf-8"), np.uint8)
        ids = data[:limit].astype(np.int32)

        def find_ends() -> Ids:
            starts_character = (data & 0xC0) != 0x80
            return np.cumsum(starts_character, dtype=np.int32)[: len(ids)]

        return EncodedText(ids=ids, num_tokens=len(data), find_ends=find_ends)


def load_tokenizer(path: str, end_token: str = AUTOMATIC) -> LibraryTokenizer:
    """Read a tokenizer.json or a SentencePiece model; a folder stands for the one in it.

    Raises:
        BadInputError: If it is missing or not a tokenizer, or the end token is not in it.
    """
    file = _find_tokenizer_file(Path(path))
    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadInputError(
            f"cannot read the tokenizer {file}: {error.strerror}",
            fix="name a tokenizer.json, a SentencePiece .model, `bytes` or `train:8000`",
        ) from error
    tokenizer = (
        _parse_json(content, file)
        if content.lstrip()[:1] == b"{"
        else read_tokenizer(content, str(file))
    )
    return LibraryTokenizer(tokenizer, name=_name_of(file), content=content, end_token=end_token)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, end_token: str = AUTOMATIC
) -> LibraryTokenizer:
    """Train a byte-level BPE; the same texts give the same tokenizer.

    Args:
        texts: What it learns from.
        vocab_size: Most ids it may have, at least MIN_TRAINED_VOCAB.
        end_token: See `LibraryTokenizer`.

    Raises:
        BadInputError: If vocab_size is too small.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_TRAINED_VOCAB:
        raise BadInputError(
            f"a trained tokenizer needs at least {MIN_TRAINED_VOCAB} ids (got {vocab_size})",
            fix=f"use train:{MIN_TRAINED_VOCAB} or more",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKENS[0], PAD_TOKENS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    content = tokenizer.to_str(pretty=True).encode()
    name = f"byte-level BPE of {vocab_size} trained on the input"
    return LibraryTokenizer(tokenizer, name=name, content=content, end_token=end_token)


def _find_tokenizer_file(path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer.model") if path.is_dir() else ():
        if (path / name).exists():
            return path / name
    return path


def _name_of(file: Path) -> str:
    """Most tokenizers are called tokenizer.json; their folder says which one it is."""
    parent = file.absolute().parent.name
    return f"{parent}/{file.name}" if parent else file.name


def _parse_json(content: bytes, file: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise BadInputError(
            f"{file} is not a tokenizer.json of Hugging Face: {str(error).splitlines()[0]}",
            fix="name the tokenizer's own file",
        ) from error


def _find_end_id(vocabulary: dict[str, int], end_token: str, name: str) -> int | None:
    if end_token == NO_END_TOKEN:
        return None
    if end_token == AUTOMATIC:
        return next((vocabulary[token] for token in END_TOKENS if token in vocabulary), None)
    if end_token not in vocabulary:
        raise BadInputError(
            f"the tokenizer {name} has no token '{end_token}'",
            fix="name another --end-token, or use auto or none",
        )
    return vocabulary[end_token]

"""A SentencePiece `.model` file as a tokenizer of the `tokenizers` library.

The file is a protobuf message; the few fields needed are read here, so that neither protobuf nor
the sentencepiece package is required. The tokenizer is put together as Hugging Face's converters
do it (transformers, convert_slow_tokenizer.py: SpmConverter and LlamaConverter):

- BPE: every way to put a piece together from two others is a merge, ranked by the piece's score.
- Unigram: pieces with their scores.
- Normalising: the model's own character map, white space squeezed where the model says so, a
  leading and every other space turned into `▁`; no pre-tokenizer, as SentencePiece has none.

Control pieces such as `</s>` have an id and are never found in text, as in SentencePiece.
Source of the field numbers: sentencepiece_model.proto, SentencePiece 0.2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.errors import BadInputError

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
HOPELESS_SCORE = -1e6
WIRE_VARINT, WIRE_FIXED64, WIRE_BYTES, WIRE_FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """The part of a model file that decides how text is split."""

    pieces: tuple[tuple[str, float, int], ...]
    """(piece, score, kind); the position is the id."""
    model_type: int
    character_map: bytes
    add_leading_space: bool
    squeeze_spaces: bool


def parse_model(data: bytes) -> SentencePieceModel:
    """Read the protobuf message of a `.model` file.

    Raises:
        ValueError: If it is not such a message or of a kind that cannot be converted.
    """
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _read_fields(data):
        if number == 1:
            fields = dict(_read_fields(value))
            score = struct.unpack("<f", fields.get(2, bytes(4)))[0]
            pieces.append((fields[1].decode("utf-8"), score, fields.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_read_fields(value))
        elif number == 3:
            normalizer = dict(_read_fields(value))
    model_type = trainer.get(3, UNIGRAM)
    if not pieces:
        raise ValueError("no pieces")
    if model_type not in (UNIGRAM, BPE):
        raise ValueError("only BPE and Unigram models can be read, not word or character models")
    if trainer.get(24, 0):
        raise ValueError("models that treat white space as a suffix cannot be read")
    return SentencePieceModel(
        pieces=tuple(pieces),
        model_type=model_type,
        character_map=bytes(normalizer.get(2, b"")),
        add_leading_space=bool(normalizer.get(3, 1)),
        squeeze_spaces=bool(normalizer.get(4, 1)),
    )


def build_tokenizer(model: SentencePieceModel) -> Any:
    """Make a `tokenizers.Tokenizer` that splits text as SentencePiece does."""
    from tokenizers import AddedToken, Tokenizer, decoders

    tokenizer = Tokenizer(_build_bpe(model) if model.model_type == BPE else _build_unigram(model))
    normalizer = _build_normalizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", int(model.add_leading_space), 0),
        ]
    )
    own = [piece for piece, _, kind in model.pieces if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in own])
    return tokenizer


def read_tokenizer(data: bytes, name: str) -> Any:
    """Parse a `.model` file and build its tokenizer.

    Raises:
        BadInputError: If it is not a SentencePiece model or of an unsupported kind.
    """
    try:
        return build_tokenizer(parse_model(data))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise BadInputError(
            f"{name} is neither a tokenizer.json nor a SentencePiece model that can be read "
            f"({error})",
            fix="name the tokenizer's own file",
        ) from error


def _build_bpe(model: SentencePieceModel) -> Any:
    from tokenizers.models import BPE as BpeModel

    vocabulary = {piece: i for i, (piece, _, _) in enumerate(model.pieces)}
    return BpeModel(
        vocabulary,
        _find_merges(model.pieces),
        unk_token=_unknown_piece(model)[1],
        fuse_unk=True,
        byte_fallback=_has_bytes(model),
    )


def _build_unigram(model: SentencePieceModel) -> Any:
    from tokenizers.models import Unigram

    # Only normal pieces may be found in text; a text that spells out `<0x0A>` or `</s>` is split
    # into its letters. Unigram models have no other way to say so than a hopeless score.
    pieces = [
        (piece, score if kind in (NORMAL, USER_DEFINED) else HOPELESS_SCORE)
        for piece, score, kind in model.pieces
    ]
    return Unigram(pieces, _unknown_piece(model)[0], _has_bytes(model))


def _unknown_piece(model: SentencePieceModel) -> tuple[int, str]:
    for i, (piece, _, kind) in enumerate(model.pieces):
        if kind == UNKNOWN:
            return i, piece
    raise ValueError("no unknown piece")


def _has_bytes(model: SentencePieceModel) -> bool:
    return any(kind == BYTE for _, _, kind in model.pieces)


def _find_merges(pieces: Sequence[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """The merges behind the pieces: best score first, for one piece the longest left part."""
    ids = {piece: i for i, (piece, _, kind) in enumerate(pieces) if kind in (NORMAL, USER_DEFINED)}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece in ids:
        score = pieces[ids[piece]][1]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                merges.append((-score, -len(left), ids[piece], left, right))
    merges.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in merges]


def _build_normalizer(model: SentencePieceModel) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if model.character_map:
        steps.append(normalizers.Precompiled(model.character_map))
    if model.squeeze_spaces:
        steps.append(normalizers.Strip())
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.add_leading_space:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _read_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of one protobuf message; numbers for varints, else bytes."""
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == WIRE_VARINT:
            value, position = _read_varint(data, position)
            yield number, value
            continue
        size = {WIRE_FIXED64: 8, WIRE_FIXED32: 4}.get(wire)
        if wire == WIRE_BYTES:
            size, position = _read_varint(data, position)
        if size is None or number == 0 or position + size > len(data):
            raise ValueError("not a protobuf message")
        yield number, data[position : position + size]
        position += size


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7

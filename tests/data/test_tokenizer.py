from __future__ import annotations

import struct

import numpy as np
import pytest

from tuner.data.rows import parse_row
from tuner.data.token_rows import LabelPolicy, tokenise_rows
from tuner.data.tokenizer import ByteTokenizer, load_tokenizer, train_tokenizer
from tuner.data.vocabulary import fold_vocabulary
from tuner.errors import BadInputError

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "ünïcode, 数据 and 🙂"] * 5
PAIR = {"prompt": "What? ü", "completion": "That 数据"}


def tokenise(value, tokenizer, **policy):
    policy = {"max_length": None, **policy}
    (row,) = tokenise_rows([parse_row(value)], tokenizer, LabelPolicy(**policy))
    return row.input_ids.tolist(), row.labels.tolist(), row.is_truncated


class TestBytes:
    def test_ids_are_the_bytes_and_an_end(self):
        ids, labels, _ = tokenise({"text": "aü"}, ByteTokenizer())
        assert ids == labels == [*"aü".encode(), 256]

    def test_the_prompt_is_not_trained_on(self):
        prompt, answer = "What? ü\n".encode(), "That 数据".encode()
        ids, labels, _ = tokenise(PAIR, ByteTokenizer())
        assert ids == [*prompt, *answer, 256]
        assert labels == [-100] * len(prompt) + [*answer, 256]

    def test_everything_is_trained_on_when_asked(self):
        ids, labels, _ = tokenise(PAIR, ByteTokenizer(), train_on_prompt=True)
        assert ids == labels

    def test_long_rows_are_cut_without_an_end(self):
        assert tokenise({"text": "abcd"}, ByteTokenizer(), max_length=3)[0] == [97, 98, 99]
        assert tokenise({"text": "abcd"}, ByteTokenizer(), max_length=3)[2]
        assert tokenise({"text": "abc"}, ByteTokenizer(), max_length=3)[0] == [97, 98, 99]
        assert not tokenise({"text": "abc"}, ByteTokenizer(), max_length=3)[2]
        assert tokenise({"text": "ab"}, ByteTokenizer(), max_length=3)[0] == [97, 98, 256]

    def test_no_end_when_asked(self):
        assert tokenise({"text": "ab"}, ByteTokenizer("none"))[0] == [97, 98]

    def test_turns_of_the_assistant_are_trained_on(self):
        turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
        value = {"messages": [{"role": role, "content": text} for role, text in turns]}
        ids, labels, _ = tokenise(value, ByteTokenizer())
        assert bytes(ids[:-1]) == b"a\nb\nc"
        assert labels == [-100, -100, ord("b"), ord("\n"), -100, -100]


class TestTrained:
    def test_the_same_text_gives_the_same_tokenizer(self):
        first, second = (train_tokenizer(TEXTS, 300) for _ in range(2))
        assert first.to_json() == second.to_json()
        assert first.sha256 == second.sha256
        assert first.vocab_size <= 300

    def test_any_text_comes_back(self, tmp_path):
        from tokenizers import Tokenizer

        tokenizer = train_tokenizer(TEXTS, 300)
        (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        loaded = load_tokenizer(str(tmp_path))
        assert (loaded.vocab_size, loaded.end_id) == (tokenizer.vocab_size, tokenizer.end_id)
        text = "never seen: \t ✓ é\r\n"
        ids, _, _ = tokenise({"text": text}, loaded)
        decoded = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(
            ids, skip_special_tokens=False
        )
        assert decoded == text + "<|endoftext|>"

    def test_a_token_belongs_to_the_part_of_its_last_character(self):
        # Trained so that "b c" holds one token " c"; the prompt ends before its letter.
        tokenizer = train_tokenizer(["b c"] * 20, 300)
        value = {"prompt": "b ", "completion": "c"}
        ids, labels, _ = tokenise(value, tokenizer)
        assert len(ids) == 3  # "b", " c", the end
        assert labels == [-100, ids[1], ids[2]]

    def test_too_few_ids_are_refused(self):
        with pytest.raises(BadInputError, match="at least 258 ids"):
            train_tokenizer(TEXTS, 100)


class TestFiles:
    def test_special_tokens_of_the_tokenizer_stay(self, shared_data):
        tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "bert-uncased"))
        ids, labels, _ = tokenise(PAIR, tokenizer)
        assert (ids[0], ids[-1]) == (101, 102)  # [CLS] and [SEP] of BERT
        assert ids.count(102) == 1
        assert labels[0] == -100
        assert labels[-1] == 102
        assert tokenizer.vocab_size == 30522
        assert tokenizer.pad_id == 0

    def test_gpt2_tokens_are_those_of_the_plain_joined_text(self, shared_data):
        from tokenizers import Tokenizer

        file = shared_data / "tokenizers" / "gpt2-bpe" / "tokenizer.json"
        tokenizer = load_tokenizer(str(file))
        ids, labels, _ = tokenise(PAIR, tokenizer)
        reference = Tokenizer.from_file(str(file)).encode("What? ü\nThat 数据")
        assert ids == [*reference.ids, 50256]
        # Where the offsets end at or before the line break, it is the prompt.
        trained = [end > len("What? ü\n") for _, end in reference.offsets]
        assert labels == [i if t else -100 for i, t in zip(ids, [*trained, True], strict=True)]

    @pytest.mark.parametrize("end", ["none", "!"])
    def test_the_end_token_can_be_chosen(self, shared_data, end):
        file = str(shared_data / "tokenizers" / "gpt2-bpe" / "tokenizer.json")
        assert load_tokenizer(file, end).end_id == {"none": None, "!": 0}[end]
        with pytest.raises(BadInputError, match="no token 'nope'"):
            load_tokenizer(file, "nope")

    @pytest.mark.parametrize(
        "content", [b"", b"{}", b'{"model": 1}', b"text", b"\x0a\xff\xff", bytes(100)]
    )
    def test_files_that_are_no_tokenizer(self, tmp_path, content):
        (tmp_path / "t.json").write_bytes(content)
        with pytest.raises(BadInputError, match="tokenizer") as caught:
            load_tokenizer(str(tmp_path / "t.json"))
        assert "\n" not in str(caught.value)

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(BadInputError, match=r"cannot read the tokenizer .*No such file"):
            load_tokenizer(str(tmp_path / "t.json"))


def field(number: int, payload: bytes) -> bytes:
    assert len(payload) < 128
    return bytes([number << 3 | 2, len(payload)]) + payload


def varint(number: int, value: int) -> bytes:
    assert number < 16 and value < 128
    return bytes([number << 3, value])


def piece(text: str, score: float, kind: int = 1) -> bytes:
    body = field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + varint(3, kind)
    return field(1, body)


def write_model(folder, pieces, *, model_type, normalizer=b""):
    data = b"".join(piece(*one) for one in pieces) + field(2, varint(3, model_type)) + normalizer
    (folder / "tokenizer.model").write_bytes(data)
    return load_tokenizer(str(folder))


SPECIAL = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]


class TestSentencePiece:
    def test_bpe_pieces_merge_by_score(self, tmp_path):
        pieces = [*SPECIAL, ("ab", -1.0), ("bc", 0.0), ("a", -5.0), ("b", -6.0), ("c", -7.0)]
        pieces += [("▁", -8.0)]
        tokenizer = write_model(tmp_path, pieces, model_type=2)
        # By hand: ▁abc -> "bc" has the better score, so ▁ a bc, then the end token.
        assert tokenise({"text": "abc"}, tokenizer)[0] == [8, 5, 4, 2]
        assert tokenise({"text": "ab c"}, tokenizer)[0] == [8, 3, 8, 7, 2]

    def test_unigram_takes_the_best_sum_of_scores(self, tmp_path):
        pieces = [*SPECIAL, ("▁a", -1.0), ("b", -1.0), ("▁ab", -3.0), ("▁", -4.0), ("a", -4.0)]
        tokenizer = write_model(tmp_path, pieces, model_type=1)
        assert tokenise({"text": "ab"}, tokenizer)[0] == [3, 4, 2]  # -2 beats -3

    def test_unknown_letters_become_bytes_and_control_pieces_are_not_found(self, tmp_path):
        pieces = [*SPECIAL, *((f"<0x{i:02X}>", 0.0, 6) for i in range(256)), ("▁", -1.0)]
        pieces += [("<", -2.0), ("/", -2.0), ("s", -2.0), (">", -2.0)]
        for model_type in (1, 2):
            tokenizer = write_model(tmp_path, pieces, model_type=model_type)
            ids, labels, _ = tokenise({"text": "ü</s>"}, tokenizer)
            assert ids == [259, 3 + 0xC3, 3 + 0xBC, 260, 261, 262, 263, 2]
            assert ids == labels

    def test_word_models_are_refused(self, tmp_path):
        with pytest.raises(BadInputError, match="only BPE and Unigram"):
            write_model(tmp_path, SPECIAL, model_type=3)

    def test_mistral_splits_real_text_as_sentencepiece_does(self, shared_data):
        tokenizer = load_tokenizer(
            str(shared_data / "tokenizers" / "mistral-v1-spm" / "tokenizer.model.v1"), "none"
        )
        # Ids of SentencePiece 0.2.3 itself, SentencePieceProcessor(model_file=...).encode(text).
        for text, ids in SENTENCEPIECE_IDS.items():
            assert tokenise({"text": text}, tokenizer)[0] == ids
        assert tokenizer.vocab_size == 32000


SENTENCEPIECE_IDS = {
    "Hello world": [22557, 1526],
    "def f(x):\n               return x  # 15 spaces": [
        801,
        285,
        28732,
        28744,
        1329,
        13,
        1417,
        604,
        1318,
        28705,
        422,
        28705,
        28740,
        28782,
        10599,
    ],
    " lead and  two  ": [28705, 1736, 304, 28705, 989, 259],
    "数据 ünï 🙂\t<s></s> <0x0A>": [
        28705,
        21642,
        4675,
        28711,
        28920,
        28705,
        29340,
        12,
        28789,
        28713,
        3176,
        28713,
        28767,
        523,
        28734,
        28744,
        28734,
        28741,
        28767,
    ],
    "\n\nNatalia sold 48/2 = <<48/2=24>>24 clips": [
        28705,
        13,
        13,
        28759,
        3196,
        515,
        3910,
        28705,
        28781,
        28783,
        28748,
        28750,
        327,
        2087,
        28781,
        28783,
        28748,
        28750,
        28746,
        28750,
        28781,
        4060,
        28750,
        28781,
        533,
        2430,
    ],
}


class TestFolding:
    def test_the_most_frequent_ids_are_kept_by_rank(self):
        counts = np.array([5, 0, 9, 5, 1, 2])
        fold = fold_vocabulary(counts, 4, end_id=None)
        assert fold.kept_ids.tolist() == [2, 0, 3]  # 9, then 5 and 5 by id
        assert fold.new_ids.tolist() == [1, 3, 0, 2, 3, 3]
        assert (fold.unknown_id, fold.vocab_size, fold.num_folded_tokens) == (3, 4, 3)

    def test_the_end_token_is_kept_however_rare(self):
        fold = fold_vocabulary(np.array([5, 0, 9, 5, 1, 2]), 3, end_id=4)
        assert fold.kept_ids.tolist() == [2, 4]
        assert fold.num_folded_tokens == 5 + 5 + 2

    def test_ids_that_never_occur_take_no_place(self):
        fold = fold_vocabulary(np.array([5, 0, 0, 0, 1]), 4, end_id=0)
        assert fold.vocab_size == 3

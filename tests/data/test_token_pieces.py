"""A text encoded in pieces has the tokens of the whole text, for any tokenizer.

A text whose tokenizer does not allow cuts is encoded whole.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from espalier.data import passages, token_pieces
from espalier.data.files.file_text import FileText
from espalier.data.samples import evaluation_samples
from espalier.data.token_pieces import TokenPieces, special_ending

GENERATOR = random.Random(5)
WORDS = [
    "the",
    "pruning",
    "of",
    "a",
    "model's",
    "weights",
    "42",
    "2024",
    "Ümlaut",
    "naïve",
    "x_1",
    "--",
    "...",
    "\u00a0",
    "\u3000",
]
LLAMA_3 = (
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def passage() -> str:
    """Return lines with indentation, punctuation and trailing blanks; the end is not blank."""
    lines = []
    for _ in range(GENERATOR.randint(1, 6)):
        line = " ".join(GENERATOR.choices(WORDS, k=GENERATOR.randint(1, 12)))
        lines.append(
            GENERATOR.choice(["", "", "  ", "\t"])
            + line
            + GENERATOR.choice(["", ".", ":", ")", " ", "  "])
        )
    return ("\n".join(lines)).rstrip() + GENERATOR.choice(["", ".", "}", "!"]) or "."


PASSAGES = [passage() for _ in range(400)]
WHOLE = "\n\n".join(PASSAGES)


def tokenizer(kind: str) -> Tokenizer:
    """Return a tokenizer like those of published models.

    It joins words across blanks and newlines as far as its kind allows.
    """
    made = Tokenizer(models.BPE(byte_fallback=kind == "llama-2"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind in ("gpt-2", "roberta"):
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "llama-3":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), byte_level]
        )
    elif kind == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        alphabet = []
    elif kind == "words":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["<s>", "</s>", "<unk>"], show_progress=False
        )
        made.train_from_iterator([WHOLE], trainer)
        made.post_processor = processors.TemplateProcessing(
            "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        return made
    # Like SentencePiece models: a text is one word, and no token joins across a newline.
    else:
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        alphabet = []
    texts = WHOLE.split("\n") if kind in ("llama-2", "metaspace") else [WHOLE]
    special = (
        ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        if kind == "llama-2"
        else ["<s>", "</s>"]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    pieces = (
        piece
        for text in texts
        for piece in (
            [text[i : i + 60] for i in range(0, len(text), 60)] if kind == "llama-2" else [text]
        )
    )
    made.train_from_iterator(pieces, trainer)
    made.decoder = decoders.ByteLevel()
    start = made.token_to_id("<s>")
    end = made.token_to_id("</s>")
    template = "<s> $A </s>" if kind == "roberta" else "<s> $A"
    if kind != "gpt-2":
        made.post_processor = processors.TemplateProcessing(
            template, special_tokens=[("<s>", start), ("</s>", end)]
        )
    return made


@pytest.mark.parametrize("kind", ["gpt-2", "roberta", "llama-3", "llama-2", "metaspace", "words"])
def test_pieces_have_the_tokens_of_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = tokenizer(kind)
    longest = [0]

    def encode(text: str) -> list[int]:
        longest[0] = max(longest[0], len(text))
        ids: list[int] = made.encode(text).ids
        return ids

    expected = encode(WHOLE)
    longest[0] = 0
    monkeypatch.setattr(token_pieces, "PIECE_CHARACTERS", 1500)
    found = TokenPieces(PASSAGES, encode)
    assert len(found) == len(expected)
    assert found.all().tolist() == expected
    starts = GENERATOR.sample(range(len(expected) - 50), 60)
    assert found.spans(starts, 50).tolist() == [expected[start : start + 50] for start in starts]
    # The text was cut into pieces.
    assert longest[0] < 4000 < len(WHOLE) / 5

    monkeypatch.setattr(passages, "LONGEST_PASSAGE", 300)
    (tmp_path / "a.txt").write_text(WHOLE)
    longest[0] = 0
    samples = evaluation_samples(
        FileText(str(tmp_path / "a.txt"), "evaluation.texts"), encode, 50, 0, "a.txt"
    )
    assert samples.flatten().tolist() == expected[: samples.numel()]
    assert samples.numel() > len(expected) - 50
    assert longest[0] < 4000


@pytest.mark.parametrize("size", [1, 7, 100])
def test_small_pieces_by_character(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_pieces, "PIECE_CHARACTERS", size)
    monkeypatch.setattr(token_pieces, "CONTEXT_CHARACTERS", 3)
    passages = ["a", "bc", "", "d" * 300, "e"]
    assert TokenPieces(passages, lambda text: list(map(ord, text))).all().tolist() == list(
        map(ord, "\n\n".join(passages))
    )


def by_length(text: str) -> list[int]:
    """Return tokens that each depend on the length of the whole text."""
    return [ord(character) + len(text) for character in text]


def joins_newlines(text: str) -> list[int]:
    """Return tokens that join the characters on both sides of a blank line."""
    return [
        sum(map(ord, text[:40])),
        *(hash_of(text[place - 5 : place + 5]) for place in range(len(text))),
    ]


def hash_of(text: str) -> int:
    return sum((place + 1) * ord(character) for place, character in enumerate(text))


@pytest.mark.parametrize("encode", [by_length, joins_newlines])
def test_text_that_cannot_be_cut_is_encoded_whole(
    encode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_pieces, "PIECE_CHARACTERS", 200)
    passages = PASSAGES[:30]
    assert TokenPieces(passages, encode).all().tolist() == encode("\n\n".join(passages))


def test_what_a_tokenizer_adds_behind_a_text() -> None:
    def adding(before: Sequence[int], behind: Sequence[int]) -> Any:
        return lambda text: [*before, *map(ord, text), *behind]

    assert special_ending(adding([], [])) == ()
    assert special_ending(adding([1], [])) == ()
    assert special_ending(adding([1], [2])) == (2,)
    assert special_ending(adding([], [2, 3])) == (2, 3)
    assert special_ending(by_length) == ()
    assert special_ending(lambda text: []) is None


class Remembers(list[str]):
    """Passages that store numbers of tokens."""

    def __init__(self, passages: list[str]) -> None:
        super().__init__(passages)
        self.kept: dict[str, Any] = {}

    def load(self, name: str) -> Any:
        return self.kept.get(name)

    def keep(self, name: str, value: Any) -> None:
        self.kept[name] = value


class Model:
    """Tokenizer with a hash, which counts the characters that it encodes."""

    def __init__(self, name: str) -> None:
        self.tokenizer_sha256 = name
        self.characters = 0

    def encode(self, text: str) -> list[int]:
        self.characters += len(text)
        return list(map(ord, text))


def test_only_requested_pieces_are_encoded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_pieces, "PIECE_CHARACTERS", 1000)
    passages = Remembers(PASSAGES)
    first = Model("a")
    second = Model("a")
    other = Model("b")
    assert len(TokenPieces(passages, first.encode)) == len(WHOLE)
    assert first.characters >= len(WHOLE)
    again = TokenPieces(passages, second.encode)
    assert len(again) == len(WHOLE)
    assert again.spans([5000], 20).tolist() == [list(map(ord, WHOLE[5000:5020]))]
    assert 0 < second.characters < 5000
    TokenPieces(passages, other.encode)
    assert other.characters >= len(WHOLE)

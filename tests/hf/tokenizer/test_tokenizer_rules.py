"""Parts that a downloaded tokenizer may have."""

import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from espalier.errors import EspalierError
from espalier.hf.tokenizer.rules import (
    KNOWN_PATTERNS,
    alternatives,
    is_known_pattern,
    require_known_parts,
)
from tests.tiny_model import save_tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
CLIP = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)
EVIL = [
    r"(a+)+$",
    r"(x+x+)+y|\s+",
    r"\p{L}+\p{L}+\p{L}+!",
    ".*",
    r"(?:a|aa)*b",
    r"\s+(?!\S)|(?=(.+)+$)",
    "a{1,1000}{1,1000}",
    "x||y*",
]


def built(**parts: Any) -> dict[str, Any]:
    """Return the file of a tokenizer with these parts, as the library writes it."""
    tokenizer = Tokenizer(models.BPE())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("a|b", ["a", "b"]),
        (r"(a|b)|c", ["(a|b)", "c"]),
        (r"[|]|[^|]", ["[|]", "[^|]"]),
        (r"[]|]|[^]|]", ["[]|]", "[^]|]"]),
        (r"\||\[|\(", [r"\|", r"\[", r"\("]),
        (r"[\]|]|x", [r"[\]|]", "x"]),
        ("", [""]),
        ("|", ["", ""]),
    ],
)
def test_pattern_is_split_at_its_alternatives(pattern: str, parts: list[str]) -> None:
    assert list(alternatives(pattern)) == parts


@pytest.mark.parametrize(
    "pattern", [GPT2, LLAMA3, QWEN2, CLIP, r" {2,}", r"\A +| +\z", r"a\|b|c\ d|ü", "▁"]
)
def test_published_tokenizer_patterns_are_known(pattern: str) -> None:
    Regex(pattern)
    assert is_known_pattern(pattern)


@pytest.mark.parametrize("pattern", EVIL)
def test_other_patterns_are_not(pattern: str) -> None:
    assert not is_known_pattern(pattern)
    for where in (
        {"normalizer": normalizers.Replace(Regex(pattern), "x")},
        {
            "pre_tokenizer": pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(pattern), "isolated")]
            )
        },
        {"decoder": decoders.Replace(Regex(pattern), "x")},
    ):
        with pytest.raises(
            EspalierError, match="a regular expression is not that of a published tokenizer"
        ):
            require_known_parts(built(**where), "tokenizer.json")


def test_every_known_alternative_matches_fast() -> None:
    """Each pattern stays fast on texts that make other patterns backtrack for a long time.

    The texts are repetitions, some with an end that does not match.
    """
    texts = [
        body * 2000 + end
        for body in ("a", " ", "1", "\n", "é", "!", "▁", "'", "一")
        for end in ("", "!", "x")
    ]
    for pattern in {part for known in KNOWN_PATTERNS for part in alternatives(known)}:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        for text in texts:
            assert "".join(word for word, _ in split.pre_tokenize_str(text)) == text


def test_the_parts_of_known_models_are_allowed(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    require_known_parts(json.loads((tmp_path / "tokenizer.json").read_text()), "tokenizer.json")
    llama2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    require_known_parts(
        built(
            normalizer=llama2, decoder=decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        ),
        "",
    )
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    llama3 = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    require_known_parts(built(pre_tokenizer=llama3, post_processor=processors.ByteLevel()), "")
    require_known_parts(built() | {"normalizer": sequence(table(18), replacing("  ", " "))}, "")
    for model in (
        models.WordLevel({"a": 0}, "a"),
        models.Unigram([("a", 0.0)], 0),
        models.WordPiece({"a": 0}, unk_token="a"),
    ):
        require_known_parts(json.loads(Tokenizer(model).to_str()), "")


def sequence(*inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(inner)}


def replacing(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def table(longest: int) -> dict[str, Any]:
    """Return SentencePiece's normalizer with an empty trie and strings up to this length."""
    strings = "ab\0" + "ة" * longest + "\0"
    data = (4).to_bytes(4, "little") + bytes(4) + strings.encode()
    return {"type": "Precompiled", "precompiled_charsmap": b64encode(data).decode()}


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "type": (
        lambda file: file.update(normalizer={"type": "Shell"}),
        "normalizer: type 'Shell' is not one of",
    ),
    "nested type": (
        lambda file: file.update(normalizer=sequence(sequence({"type": "Shell"}))),
        "type 'Shell'",
    ),
    "long sequence": (
        lambda file: file.update(normalizer=sequence(*[{"type": "NFC"}] * 65)),
        "a sequence has 65 parts",
    ),
    "growth": (
        lambda file: file.update(normalizer=replacing("a", "a" * 17)),
        "makes 17 characters of one",
    ),
    "growth of several": (
        lambda file: file.update(normalizer=sequence(*[replacing("a", "aa")] * 5)),
        "makes 32 characters",
    ),
    "growth of a pattern": (
        lambda file: file.update(
            normalizer={"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": "x" * 17}
        ),
        "makes 17",
    ),
    "growth of a prefix": (
        lambda file: file.update(normalizer=sequence(*[{"type": "Prepend", "prepend": "aaa"}] * 3)),
        "makes 64 characters of one",
    ),
    "growth of bytes": (
        lambda file: file.update(normalizer=sequence(*[{"type": "ByteLevel"}] * 2)),
        "normalizer: has the type 'ByteLevel' 2 times",
    ),
    "growth of tables": (
        lambda file: file.update(normalizer=sequence(table(18), sequence(table(18)))),
        "normalizer: has the type 'Precompiled' 2 times",
    ),
    "long strings of a table": (
        lambda file: file.update(normalizer=table(33)),
        "precompiled_charsmap has a string of 33 characters",
    ),
    "long content": (
        lambda file: file.update(normalizer=replacing("a" * 200, "a" * 300)),
        "content has more than",
    ),
    "long prefix": (
        lambda file: file.update(normalizer={"type": "Prepend", "prepend": "a" * 300}),
        "prepend has more",
    ),
    "table": (
        lambda file: file.update(
            normalizer={"type": "Precompiled", "precompiled_charsmap": "A" * (1 << 22)}
        ),
        "precompiled_charsmap has more",
    ),
    "drawn": (lambda file: file["model"].update(dropout=0.5), "tokens would be drawn at random"),
    "long words": (
        lambda file: file["model"].update(max_input_chars_per_word=10**9),
        "max_input_chars_per_word",
    ),
    "template": (
        lambda file: file.update(
            post_processor={"type": "TemplateProcessing", "single": [{}] * 65, "special_tokens": {}}
        ),
        "a template has more than 64 parts",
    ),
    "template's token": (
        lambda file: file.update(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{}],
                "special_tokens": {"a": {"ids": [0] * 10**6}},
            }
        ),
        "a template has more than 64 parts or tokens",
    ),
    "added": (
        lambda file: file.update(added_tokens=[{"content": "a"}] * 70_000),
        "added_tokens: more than 65536",
    ),
    "long added": (
        lambda file: file.update(added_tokens=[{"content": "a" * 5000}]),
        "of more than 4096 characters",
    ),
    "padding": (
        lambda file: file.update(padding={"strategy": {"Fixed": 1 << 30}}),
        "padding: to more than",
    ),
    "multiple": (
        lambda file: file.update(
            padding={"strategy": "BatchLongest", "pad_to_multiple_of": 1 << 30}
        ),
        "padding",
    ),
    "no part": (
        lambda file: file.update(normalizer=[1]),
        "is not a file of the tokenizers library",
    ),
    "no type": (
        lambda file: file.update(decoder={"a": 1}),
        "is not a file of the tokenizers library",
    ),
    "no numbers": (
        lambda file: file.update(padding={"strategy": {"Fixed": "x"}}),
        "is not a file of the tokenizers library",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_allowed_is_named(name: str) -> None:
    breaks, words = BROKEN[name]
    file = built()
    breaks(file)
    with pytest.raises(EspalierError, match=words):
        require_known_parts(file, "tokenizer.json")


@pytest.mark.parametrize(
    "document", [None, [], 1, "x", {"model": 1}, {"normalizer": "NFC"}, {"added_tokens": 5}]
)
def test_what_is_no_tokenizer_is_refused(document: Any) -> None:
    with pytest.raises(EspalierError, match="is not a file of the tokenizers library"):
        require_known_parts(document, "tokenizer.json")

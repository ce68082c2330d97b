"""Passages, and their split into calibration and held-out text."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.data.passages import HELD_OUT_PERCENT, digest, is_held_out, passages, split

WORDS = st.text(st.sampled_from("ab c\n\t\r"), max_size=60)


def number(words: str) -> int:
    """Return the first eight bytes of the hash of single-spaced words as a number."""
    return int(hashlib.sha256(words.encode()).hexdigest()[:16], 16)


def words_of(texts: list[str]) -> list[str]:
    return [" ".join(text.split()) for text in texts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one", ["one"]),
        ("one\ntwo\n\nthree", ["one\ntwo", "three"]),
        ("one\r\ntwo\r\n\r\nthree\r\n", ["one\ntwo", "three"]),
        ("one\n \t\ntwo", ["one", "two"]),
        ("one\n\n \n\ntwo", ["one", "two"]),
        ("\n\n\none\n\n\n\ntwo\n\n", ["one", "two"]),
        ("head\n    indented  \n\n    code\n", ["head\n    indented", "    code"]),
        ("", []),
        (" \n\n \t\n", []),
    ],
)
def test_passages_are_separated_by_blank_lines(text: str, expected: list[str]) -> None:
    assert list(passages(text)) == expected


@pytest.mark.parametrize("text", ["one\n \n \ntwo", " \none\n\ntwo"])
def test_whitespace_lines_count_as_blank(text: str) -> None:
    assert list(passages(text)) == ["one", "two"]


@settings(max_examples=80, deadline=None)
@given(WORDS)
def test_no_word_is_lost(text: str) -> None:
    assert " ".join(passages(text)).split() == text.split()


def test_the_digest_is_of_the_words_alone() -> None:
    expected = hashlib.sha256(b"two words").digest()
    assert digest("two words") == digest("  two\n\twords ") == expected
    assert digest("two  words") != digest("twowords")


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_held_out_is_decided_by_word_hash(text: str) -> None:
    assert is_held_out(text) == (number(" ".join(text.split())) % 100 < HELD_OUT_PERCENT)


def test_about_a_tenth_is_held_out() -> None:
    """10% of 2000 hashes are 200, with a standard deviation of 13."""
    assert 130 < sum(is_held_out(f"passage {index}") for index in range(2000)) < 270


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, max_size=6))
def test_the_split_is_disjoint_and_complete(texts: list[str]) -> None:
    calibration, held_out = (words_of(part) for part in split(texts))
    everything = {" ".join(passage.split()) for text in texts for passage in passages(text)}
    assert not set(calibration) & set(held_out)
    assert set(calibration) | set(held_out) == everything
    assert len(calibration) + len(held_out) == len(everything)


def test_passage_stays_on_one_side_of_the_split() -> None:
    texts = [f"passage {index}" for index in range(100)]
    calibration, held_out = split(texts)
    assert split(reversed(texts)) == (calibration[::-1], held_out[::-1])
    assert split(["\n\n".join(texts)]) == (calibration, held_out)
    assert split([text.replace(" ", "\n   ") for text in texts])[1] == [
        text.replace(" ", "\n   ") for text in held_out
    ]


def test_duplicate_passage_counts_once() -> None:
    calibration, held_out = split(["b\n\na\n\nb", "a\n\nc"])
    assert sorted(calibration + held_out) == ["a", "b", "c"]
    assert [passage for passage in ["b", "a", "c"] if passage in calibration] == calibration

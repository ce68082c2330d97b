from collections import Counter

import pytest

from espalier.hf.tokenizer import encoded_texts
from espalier.hf.tokenizer.encoded_texts import EncodedTexts


@pytest.fixture
def calls() -> Counter[str]:
    return Counter()


@pytest.fixture
def texts(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> EncodedTexts:
    def encode(text: str) -> list[int]:
        calls[text] += 1
        return [int(word) for word in text.split()]

    monkeypatch.setattr(encoded_texts, "MAX_REMEMBERED", 5)
    return EncodedTexts(encode)


def test_text_is_encoded_once(texts: EncodedTexts, calls: Counter[str]) -> None:
    assert [texts("1 2"), texts("3"), texts("1 2")] == [[1, 2], [3], [1, 2]]
    assert calls == {"1 2": 1, "3": 1}


def test_oldest_are_dropped_beyond_the_limit(texts: EncodedTexts, calls: Counter[str]) -> None:
    for text in ("1 1", "2 2", "3 3", "2 2", "3 3"):
        texts(text)
    assert calls == {"1 1": 1, "2 2": 1, "3 3": 1}
    assert texts("1 1") == [1, 1]
    assert calls["1 1"] == 2


def test_text_over_the_limit(texts: EncodedTexts, calls: Counter[str]) -> None:
    for _ in range(2):
        assert texts("1 2 3 4 5 6") == [1, 2, 3, 4, 5, 6]
        assert texts("7") == [7]
    assert calls == {"1 2 3 4 5 6": 2, "7": 2}


def test_caller_may_change_what_it_got(texts: EncodedTexts) -> None:
    texts("1 2").append(3)
    assert texts("1 2") == [1, 2]

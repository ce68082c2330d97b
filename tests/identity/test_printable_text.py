"""Text from another party as one short printable line: by hand, and for any text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.identity.names import printable, without_control


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain words, and äöü 漢字 ±", "plain words, and äöü 漢字 ±"),
        ("", ""),
        ("\n\n", ""),
        ("wrong:\n  data-path = 'x'\n  threads = -1", "wrong: data-path = 'x'; threads = -1"),
        ("one\r\ntwo\x0bthree\u2028four\x85five", "one; two; three; four; five"),
        ("\x1b[2J\x1b]0;title\x07", "?[2J?]0;title?"),
        ("user\u202etxt.exe\u2066\u200b\ufeff", "user?txt.exe???"),
        ("tab\there", "tab?here"),
        ("e\u0301", "é"),
        ("a" + "\u0334" * 6, "a" + "\u0334" * 2 + "?" * 4),
    ],
)
def test_by_hand(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_what_is_too_long_is_cut_and_says_so() -> None:
    assert printable("x" * 30, most=10) == "xxxxxxxxxx... (30 characters)"
    assert printable("x" * 10, most=10) == "x" * 10


def test_only_the_start_of_a_megabyte_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def count(text: str, keep: str) -> str:
        looked.append(len(text))
        return text

    monkeypatch.setattr("espalier.identity.names.without_control", count)
    assert len(printable("\n x" * 1_000_000)) < 700
    assert sum(looked) < 5000


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(), max_size=200))
def test_any_text_is_one_printable_line(text: str) -> None:
    shown = printable(text, most=50)
    assert shown.isprintable()
    assert len(shown) < 80
    kept = without_control(text)
    assert all(character.isprintable() or character == "\n" for character in kept)
    assert without_control(kept) == kept

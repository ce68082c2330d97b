"""Token ids and the start of the answer, with tokenizers that can be followed by hand."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.data.tasks.catalogue import task_named
from espalier.data.tasks.encoding import Encoded, encode_pair
from espalier.data.tasks.item import Item
from espalier.data.tasks.scored_items import cut, scored_items
from espalier.errors import EspalierError

BEGIN = 1
CHOICE = task_named("piqa")


def by_character(text: str) -> list[int]:
    return [ord(character) for character in text]


def by_word(text: str) -> list[int]:
    """Return a start token, then each word's length, with the blank before the word."""
    return [BEGIN, *(len(word) for word in re.findall(r"\s?\S+|\s", text))]


def test_the_answer_begins_where_the_context_ends() -> None:
    assert encode_pair(by_word, "what grows", " moss") == Encoded((BEGIN, 4, 6, 5), 1)
    assert encode_pair(by_word, "what", " green moss") == Encoded((BEGIN, 4, 6, 5), 2)


def test_trailing_whitespace_moves_to_answer() -> None:
    """The text "what " has two tokens, but the second token of "what moss" includes the blank."""
    assert encode_pair(by_word, "what ", "moss") == Encoded((BEGIN, 4, 5), 1)
    assert encode_pair(by_character, "ab \n", "c") == Encoded((97, 98, 32, 10, 99), 3)


def test_merged_last_token_belongs_to_answer() -> None:
    assert encode_pair(by_word, "what moss", "es") == Encoded((BEGIN, 4, 7), 1)


def test_a_single_token_is_a_mistake() -> None:
    with pytest.raises(EspalierError, match="has 1 token, but a prediction needs at least 2"):
        encode_pair(lambda text: [7], "a", "b")


@given(
    st.text("ab ", min_size=1, max_size=12),
    st.text("cd ", min_size=1, max_size=12),
    st.integers(2, 30),
)
def test_only_the_beginning_of_the_prompt_is_lost(
    context: str, answer: str, max_tokens: int
) -> None:
    item = Item((context,), (answer,), 0, "")
    whole = context + answer
    length = min(len(whole) - len(context.rstrip()), len(whole) - 1)
    if length >= max_tokens:
        with pytest.raises(
            EspalierError, match=f"an answer has {length} tokens, but only {max_tokens - 1} fit"
        ):
            scored_items(CHOICE, [item], by_character, max_tokens)
        return
    found = scored_items(CHOICE, [item], by_character, max_tokens)
    (one,) = found.requests
    assert "".join(map(chr, one.token_ids)) == whole[-max_tokens:]
    assert one.answer_tokens == length
    assert found.cut == ((0,) if len(whole) > max_tokens else ())


def test_each_option_follows_its_own_context() -> None:
    items = [Item(("ab", "xy"), ("p", "qr"), 1), Item(("z",), ("s", "t"), 0)]
    found = scored_items(CHOICE, items, by_character, 9)
    assert ["".join(map(chr, one.token_ids)) for one in found.requests] == [
        "ab p",
        "xy qr",
        "z s",
        "z t",
    ]
    assert [one.answer_tokens for one in found.requests] == [2, 3, 2, 2]
    assert (found.num_options, found.answers, found.characters) == ((2, 2), (1, 0), (1, 2, 1, 1))


def test_prompt_is_truncated_on_the_left() -> None:
    whole = encode_pair(by_character, "xy", " q")
    assert cut(whole, 4, CHOICE) == whole == Encoded((120, 121, 32, 113), 2)
    assert cut(whole, 3, CHOICE) == Encoded((121, 32, 113), 2)
    with pytest.raises(
        EspalierError,
        match=r"here: an answer has 2 tokens, but only 1 fit .* raise task.max-tokens",
    ):
        cut(whole, 2, CHOICE, "here")

"""Token ids and where the answer begins, with tokenizers that can be followed by hand."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.corpora.tasks.encoding import Encoded, encode_item, encode_items, encode_pair
from espalier.corpora.tasks.item import Item
from espalier.settings.mistakes import Mistake

BEGIN = 1


def by_character(text: str) -> list[int]:
    return [ord(character) for character in text]


def by_word(text: str) -> list[int]:
    """A token for the beginning, and one per word with the blank before it, numbered by its length."""
    return [BEGIN, *(len(word) for word in re.findall(r"\s?\S+|\s", text))]


def test_the_answer_begins_where_the_context_ends() -> None:
    assert encode_pair(by_word, "what grows", " moss") == Encoded((BEGIN, 4, 6, 5), 1)
    assert encode_pair(by_word, "what", " green moss").answer_mask == (False, False, True, True)


def test_blank_space_at_the_end_of_the_context_goes_to_the_answer() -> None:
    """ "what " alone would be two tokens, but "what moss" has the blank within its second one."""
    assert encode_pair(by_word, "what ", "moss") == Encoded((BEGIN, 4, 5), 1)
    assert encode_pair(by_character, "ab \n", "c") == Encoded((97, 98, 32, 10, 99), 3)


def test_a_context_that_joins_its_answer_leaves_it_the_last_token() -> None:
    assert encode_pair(by_word, "what moss", "es") == Encoded((BEGIN, 4, 7), 1)


def test_a_single_token_is_a_mistake() -> None:
    with pytest.raises(Mistake, match="give 1 tokens, at least 2 are needed"):
        encode_pair(lambda text: [7], "a", "b")


@given(st.text("ab ", min_size=1, max_size=12), st.text("cd ", min_size=1, max_size=12), st.integers(2, 30))
def test_only_the_beginning_of_the_prompt_is_lost(context: str, answer: str, max_tokens: int) -> None:
    item, whole = Item((context,), (answer,), 0, ""), context + answer
    length = min(len(whole) - len(context.rstrip()), len(whole) - 1)
    if length >= max_tokens:
        with pytest.raises(Mistake, match=f"an answer has {length} tokens, and {max_tokens - 1} fit"):
            encode_item(item, by_character, max_tokens)
        return
    found = encode_item(item, by_character, max_tokens)
    assert "".join(map(chr, found.token_ids)) == whole[-max_tokens:]
    assert found.answer_tokens == length
    assert len(found.answer_mask) == len(found.token_ids)


def test_the_right_option_is_trained_on_and_a_token_for_the_end_belongs_to_it() -> None:
    item = Item(("ab", "xy"), ("p", "q"), 1)
    assert encode_items([item], by_character, 9, end_token=0) == [Encoded((120, 121, 32, 113, 0), 3)]
    assert encode_item(item, by_character, 4) == Encoded((120, 121, 32, 113), 2)

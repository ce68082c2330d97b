"""JSON from other parties is limited in size and depth before it is parsed."""

import json
from random import Random
from typing import Any

import pytest

from espalier.environment import bounded_json
from espalier.environment.bounded_json import (
    MAX_DEPTH,
    UnboundedJsonError,
    read_json,
    require_flat,
)


def nested(depth: int, opening: str, closing: str) -> str:
    return opening * depth + "1" + closing * depth


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"\\"]": ', "}]")])
def test_exactly_the_allowed_depth_is_read(opening: str, closing: str) -> None:
    levels = opening.count("[") + opening.count("{")
    text = nested(MAX_DEPTH // levels, opening, closing)
    assert read_json(text) == json.loads(text)
    assert read_json(text.encode()) == json.loads(text)
    for deeper in (
        nested(MAX_DEPTH // levels + 1, opening, closing),
        nested(200_000, opening, closing),
        opening * 200_000,
    ):
        with pytest.raises(UnboundedJsonError, match="nested more than 64 levels deep"):
            read_json(deeper)


def test_only_nested_brackets_count_as_levels() -> None:
    document = {"[" * 500: ["{[" * 500, '\\"[' * 100, [[1]] * 500], "b": {"\\": "\\\\["}}
    assert read_json(json.dumps(document)) == document


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        '"',
        '"[',
        '\\"[[',
        "]" * 100 + "[" * 64,
        '["\\',
        "\ufeff[]",
        "[" * 64,
        "{" * 64,
        "nul",
    ],
)
def test_what_is_no_json_is_the_parsers_to_say(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        read_json(text)
    assert type(caught.value) is not UnboundedJsonError or "deep" in str(caught.value)


def test_a_text_may_not_be_longer_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_json, "MAX_CHARACTERS", 6)
    assert read_json("[1, 2]") == [1, 2]
    for text in ("[1, 2] ", b"[1, 2] "):
        with pytest.raises(UnboundedJsonError, match="7 characters; at most 6"):
            read_json(text)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_bytes_are_decoded_before_counting(encoding: str) -> None:
    """Bytes of letters in UTF-16 can look like quotes and brackets."""
    text = json.dumps({"a": "\u5b22\u225b" * 40}, ensure_ascii=False)
    assert read_json(text.encode(encoding)) == json.loads(text)
    with pytest.raises(UnboundedJsonError):
        read_json(("[" * 100).encode(encoding))


def depth_of(document: Any) -> int:
    children = (
        document.values()
        if isinstance(document, dict)
        else document
        if isinstance(document, list)
        else None
    )
    return 0 if children is None else 1 + max(map(depth_of, children), default=0)


def test_the_depth_is_that_of_the_parsed_document() -> None:
    """Random documents; the reference measures the depth after the standard library parsed them."""
    random = Random(0)
    refused = 0
    for _ in range(300):
        document: Any = 1
        for _ in range(random.randrange(2 * MAX_DEPTH)):
            document = random.choice(
                ([document, "]"], {'a"[': document}, [[], document], {"{": 1, "b": document})
            )
        if depth_of(document) <= MAX_DEPTH:
            require_flat(json.dumps(document))
        else:
            refused += 1
            with pytest.raises(UnboundedJsonError):
                require_flat(json.dumps(document))
    assert 50 < refused < 250

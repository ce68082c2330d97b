"""A sealed document is read exactly as it was written, or refused."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.storage.atomic import Damaged, read_sealed, sealed

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
DOCUMENT = {
    "version": 2,
    "round": 3,
    "clients": {"a": 0, "b": 1},
    "state": {"clients": [1, 2.5, None, True, "x"]},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sealed") / "document.json"


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, types included; in Python ``1 == 1.0 == True``."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@settings(max_examples=50)
@given(
    entries=st.dictionaries(
        st.text(max_size=6).filter(lambda key: key not in ("version", "sha256")), VALUES, max_size=4
    )
)
def test_what_was_written_is_read(file: Path, entries: dict[str, Any]) -> None:
    file.write_bytes(sealed({"version": 2, **entries}))
    assert same(read_sealed(file, 2), {"version": 2, **entries})


def test_checksum_is_of_shortest_json(file: Path) -> None:
    file.write_bytes(sealed({"version": 2, "b": [1, 2], "a": "ä"}))
    shortest = b'{"a":"\\u00e4","b":[1,2],"version":2}'
    assert json.loads(file.read_text())["sha256"] == hashlib.sha256(shortest).hexdigest()


def test_non_string_keys_are_sealed_as_strings(file: Path) -> None:
    file.write_bytes(sealed({"version": 2, "clients": {10: 1, 9: 2}}))
    assert read_sealed(file, 2)["clients"] == {"10": 1, "9": 2}


@settings(max_examples=300)
@given(data=st.data())
def test_other_bytes_are_equal_or_refused(file: Path, data: st.DataObject) -> None:
    whole = sealed(DOCUMENT)
    place = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(st.binary(min_size=1, max_size=6))
    file.write_bytes(
        data.draw(
            st.sampled_from(
                [whole[:place], whole[:place] + other + whole[place + 1 :], whole + whole[:place]]
            )
        )
    )
    try:
        found = read_sealed(file, 2)
    except EspalierError:
        return
    assert same(found, DOCUMENT)


def changes(document: Any) -> st.SearchStrategy[Any]:
    """Return a strategy of documents in which one value, at any depth, is replaced or removed."""
    if isinstance(document, dict) and document:
        keys = st.sampled_from(sorted(document))
        inside = keys.flatmap(
            lambda key: changes(document[key]).map(lambda value: {**document, key: value})
        )
        gone = keys.map(
            lambda key: {name: value for name, value in document.items() if name != key}
        )
        return inside | gone | VALUES
    if isinstance(document, list) and document:
        places = st.integers(0, len(document) - 1)
        inside = places.flatmap(
            lambda i: changes(document[i]).map(
                lambda value: [*document[:i], value, *document[i + 1 :]]
            )
        )
        return inside | st.just(document[:-1]) | VALUES
    return VALUES


@settings(max_examples=300)
@given(changed=changes(json.loads(sealed(DOCUMENT))))
def test_edited_values_are_refused(file: Path, changed: Any) -> None:
    file.write_text(json.dumps(changed))
    if same(changed, json.loads(sealed(DOCUMENT))):
        assert same(read_sealed(file, 2), DOCUMENT)
    else:
        with pytest.raises(EspalierError, match=r"document\.json: "):
            read_sealed(file, 2)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[" * 100_000, b"9" * 10_000, b"[]", b'"x"', b"null", b"{}"]
)
def test_what_is_no_document_is_damaged(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(Damaged, match=r"document\.json: is damaged: it"):
        read_sealed(file, 2)


def test_another_version_is_told_from_damage(file: Path) -> None:
    file.write_bytes(sealed({"version": 3}))
    with pytest.raises(
        EspalierError,
        match="version 3, but this program reads version 2; resume with the release that wrote it",
    ) as caught:
        read_sealed(file, 2)
    assert not isinstance(caught.value, Damaged)


def test_a_file_that_cannot_be_read_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(EspalierError, match="cannot be read: Is a directory"):
        read_sealed(tmp_path, 2)

"""Blobs are named by the SHA-256 of their bytes."""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.storage.blobs import BlobStore, sha256


def test_the_hash_of_abc() -> None:
    """The example of FIPS 180-2."""
    assert sha256(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@settings(max_examples=20, deadline=None)
@given(data=st.binary(max_size=200))
def test_what_is_put_can_be_got_by_its_hash(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    store = BlobStore(tmp_path_factory.mktemp("blobs"))
    assert store.put(data) == hashlib.sha256(data).hexdigest()
    assert store.get(hashlib.sha256(data).hexdigest()) == data


def test_existing_blob_is_not_written_again(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    file = tmp_path / f"{store.put(b'x')}.blob"
    before = file.stat().st_ino
    store.put(b"x")
    assert file.stat().st_ino == before
    assert os.listdir(tmp_path) == [file.name]


def test_a_blob_that_is_damaged_is_written_again(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    key = store.put(b"x")
    (tmp_path / f"{key}.blob").write_bytes(b"y")
    assert not store.is_whole(key)
    assert store.put(b"x") == key
    assert store.get(key) == b"x"
    assert store.is_whole(key)


def test_the_store_s_remedy_is_told(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, remedy="ask the owner")
    with pytest.raises(EspalierError, match="blob 000000000000 is missing; ask the owner"):
        store.get("0" * 64)
    store.path(store.put(b"x")).write_bytes(b"y")
    with pytest.raises(EspalierError, match="is damaged; ask the owner"):
        store.get(sha256(b"x"))


def test_blobs_survive_the_store(tmp_path: Path) -> None:
    key = BlobStore(tmp_path).put(b"x")
    assert BlobStore(tmp_path).get(key) == b"x"


def test_blobs_have_the_stores_mode(tmp_path: Path) -> None:
    key = BlobStore(tmp_path, 0o600).put(b"x")
    assert (tmp_path / f"{key}.blob").stat().st_mode & 0o777 == 0o600


def test_missing_blob_is_named(tmp_path: Path) -> None:
    with pytest.raises(EspalierError, match="blob ba7816bf8f01 is missing"):
        BlobStore(tmp_path).get(hashlib.sha256(b"abc").hexdigest())


@pytest.mark.parametrize("damage", [b"", b"secret diagnosis", b"secret diagnosiS!"])
def test_damaged_blob_is_refused_unquoted(tmp_path: Path, damage: bytes) -> None:
    store = BlobStore(tmp_path)
    key = store.put(b"secret diagnosis!")
    (tmp_path / f"{key}.blob").write_bytes(damage)
    with pytest.raises(EspalierError, match="damaged") as caught:
        store.get(key)
    assert "diagnosis" not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "../outside",
        "/etc/passwd",
        pytest.param("a\0b"),
        pytest.param("a" * 5000),
        pytest.param("../existing"),
    ],
)
def test_a_key_that_is_no_hash_names_no_blob(tmp_path: Path, key: str) -> None:
    """Keys come from the server.

    They must neither lead out of the store nor reveal whether a file exists.
    """
    (tmp_path / "existing.blob").write_bytes(b"another client's")
    store = BlobStore(tmp_path / "store")
    store.put(b"its own")
    with pytest.raises(EspalierError, match="is missing; send the round"):
        store.get(key)


def test_a_full_disk_leaves_no_half_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(EspalierError, match="No space left"):
        BlobStore(tmp_path).put(b"x")
    assert os.listdir(tmp_path) == []


def test_a_blob_in_pieces_is_the_blob_as_a_whole(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 0o600)
    key = store.put_pieces([b"ab", memoryview(b"cd"), b""])
    assert key == sha256(b"abcd")
    assert store.get(key) == b"abcd"
    with store.opened(key) as file:
        assert file.read() == b"abcd"
    assert [path.name for path in tmp_path.iterdir()] == [f"{key}.blob"]


def test_a_damaged_or_missing_blob_is_not_opened(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    key = store.put(b"abcd")
    (tmp_path / f"{key}.blob").write_bytes(b"abce")
    with pytest.raises(EspalierError, match="damaged"), store.opened(key):
        pass
    with pytest.raises(EspalierError, match=f"blob {'0' * 12} is missing"), store.opened("0" * 64):
        pass

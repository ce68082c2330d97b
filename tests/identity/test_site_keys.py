"""Key files: the accepted ones, and the error texts of the refused ones."""

import os
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.identity.site_keys import fingerprint, private_key, public_keys
from espalier.settings.run import parse

Pair = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def public(key: Pair) -> bytes:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def private(key: Pair) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def locked(key: Pair) -> bytes:
    """Return a private key as ``ssh-keygen`` writes it with a passphrase.

    Its content cannot be read.
    """
    fields = [b"aes256-ctr", b"bcrypt", b"\0\0\0\x10" + bytes(16) + b"\0\0\0\x10"]
    of_key = b64decode(public(key).split()[1])
    parts = [*map(_string, fields), b"\0\0\0\1", _string(of_key), _string(bytes(160))]
    text = b64encode(b"openssh-key-v1\0" + b"".join(parts))
    return (
        b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + text + b"\n-----END OPENSSH PRIVATE KEY-----\n"
    )


def _string(data: bytes) -> bytes:
    return len(data).to_bytes(4) + data


KEY = ec.derive_private_key(3, ec.SECP384R1())
OTHER = ec.derive_private_key(4, ec.SECP256R1())
ED25519 = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))


def case(value: object) -> str | None:
    """Return the part of a test's name that stands for a value.

    OpenSSH private keys contain random bytes, and all processes need the same names.
    """
    return "data" if isinstance(value, bytes) else None


def write(file: Path, data: bytes, mode: int = 0o600) -> str:
    file.write_bytes(data)
    file.chmod(mode)
    return str(file)


# ----- the private key of a site ------------------------------------------------------------------


def test_a_private_key_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.key", private(KEY))
    assert private_key(path).public_key() == KEY.public_key()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert private_key("~/a.key").public_key() == KEY.public_key()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not a private key in OpenSSH format; make one with espalier keys"),
        (b"secret", "is not a private key in OpenSSH format"),
        (public(KEY), "is a public key; name the private key"),
        (
            KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            "is not a private key in OpenSSH format",
        ),
        (locked(KEY), "the key has a passphrase, which a node cannot enter"),
        (private(ED25519), "is not an ECDSA key on a curve that a SuperNode accepts"),
        (private(KEY)[:-200], "is not a private key"),
    ],
    ids=case,
)
def test_what_is_none_is_refused_and_not_quoted(tmp_path: Path, data: bytes, words: str) -> None:
    path = write(tmp_path / "a.key", data)
    with pytest.raises(EspalierError, match=words) as caught:
        private_key(path)
    assert str(caught.value).startswith(f"site-key = {path!r}: ")
    assert "secret" not in str(caught.value)


def test_a_public_key_is_named_as_such(tmp_path: Path) -> None:
    """Its permissions would otherwise be called wrong first."""
    path = tmp_path / "a.key.pub"
    path.write_bytes(public(KEY))
    path.chmod(0o644)
    with pytest.raises(EspalierError, match="is a public key; name the private key of the pair"):
        private_key(str(path))
    with pytest.raises(EspalierError, match=r"^--key \S+: is a public key"):
        private_key(str(path), "--key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_one_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(
        EspalierError, match="other users of this machine can read it; run: chmod 600"
    ):
        private_key(write(tmp_path / "a.key", private(KEY), mode))


def test_key_of_another_account_may_be_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a secret that a container mounts; ssh has the same rule."""
    path = write(tmp_path / "a.key", private(KEY), 0o644)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert private_key(path).public_key() == KEY.public_key()


@given(st.integers(0, 600), st.binary(max_size=8))
def test_damaged_key_is_only_a_mistake(
    tmp_path_factory: pytest.TempPathFactory, at: int, instead: bytes
) -> None:
    data = private(KEY)
    path = write(
        tmp_path_factory.getbasetemp() / "damaged.key",
        data[:at] + instead + data[at + len(instead) :],
    )
    with suppress(EspalierError):
        private_key(path)


# ----- public keys at the server ------------------------------------------------------------------


def test_a_directory_says_who_has_which_key(tmp_path: Path) -> None:
    """Hidden files are skipped, except the key of a site whose name begins with a dot."""
    write(tmp_path / "b.key.pub", public(KEY) + b" a comment\n")
    write(tmp_path / "a.key.key.pub", public(OTHER))
    write(tmp_path / ".new-1", b"half")
    write(tmp_path / ".c.key.pub", public(ec.derive_private_key(5, ec.SECP521R1())))
    assert list(public_keys(str(tmp_path))) == [".c", "a.key", "b"]
    assert public_keys(str(tmp_path))["b"] == KEY.public_key()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        (
            "c.key.pub",
            b"",
            "c.key.pub: is not a public key in OpenSSH format; ask the site for its c.key.pub",
        ),
        ("c.key.pub", private(KEY), "c.key.pub: is not a public key"),
        (
            "c.key.pub",
            public(ED25519),
            "c.key.pub: is not an ECDSA key on a curve that a SuperLink accepts",
        ),
        (
            "c.pub",
            public(KEY),
            "c.pub: is not named NAME.key.pub after a site; rename or remove it",
        ),
        ("c d.key.pub", public(KEY), "c d.key.pub: is not named NAME.key.pub after a site"),
        ("...key.pub", public(KEY), ""),
        (f"{'x' * 65}.key.pub", public(KEY), "is not named NAME.key.pub after a site"),
        ("c.key", private(KEY), "c.key: is not named NAME.key.pub after a site"),
        (
            "c.key.pub",
            public(OTHER),
            "c.key.pub: is also the key of a; each site needs its own key",
        ),
    ],
    ids=case,
)
def test_a_file_that_is_none_is_named(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    write(tmp_path / "a.key.pub", public(OTHER))
    write(tmp_path / name, data)
    # The file is hidden.
    if not words:
        assert list(public_keys(str(tmp_path))) == ["a"]
        return
    with pytest.raises(EspalierError, match=words) as caught:
        public_keys(str(tmp_path))
    assert str(caught.value).startswith(f"site-keys = {str(tmp_path)!r}:\n  ")


def test_all_invalid_files_are_named_at_once(tmp_path: Path) -> None:
    write(tmp_path / "a.key.pub", b"")
    write(tmp_path / "notes.txt", b"")
    (tmp_path / "b.key.pub").mkdir()
    with pytest.raises(EspalierError) as caught:
        public_keys(str(tmp_path))
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [("", "contains no key"), ("none", "cannot be read"), ("a\0b", "cannot be read")],
)
def test_a_directory_without_keys_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(EspalierError, match=words):
        public_keys(str(tmp_path / name) if name else str(tmp_path))


def test_a_fingerprint_is_that_of_ssh_keygen() -> None:
    """The expected value is the output of ``ssh-keygen -lf`` for ``KEY``."""
    assert fingerprint(KEY.public_key()) == "SHA256:ZRNBhXDdY0ChlvesbMHRjK+z2+HxQeapMmK/PFIz5L4"


def test_simulated_clients_have_no_keys() -> None:
    with pytest.raises(
        EspalierError, match="site-keys = 'sites': simulated clients have no keys; leave it out"
    ):
        parse({"site-keys": "sites"}, simulation=True)
    assert parse({"site-keys": "sites"}).site_keys == "sites"


def test_resumed_run_may_have_moved_keys() -> None:
    assert parse({"site-keys": "sites"}).digest() == parse({}).digest()

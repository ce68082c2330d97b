"""``espalier keys``: certificates for TLS and keys for Flower.

The command overwrites no file, and other users cannot read private keys.
"""

import os
import shutil
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.verification import PolicyBuilder, Store

from espalier.cli.command import main
from espalier.identity.site_keys import private_key, public_keys
from tests.flower.flower_parts import client_authentication, supernode_parser, try_load_public_key

SERVER = ("--server", "server.example.org", "--server", "10.1.2.3")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "federation"
    assert main(["keys", str(folder), *SERVER, "--site", "a", "--site", "b.1"]) == 0
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error of a command that creates nothing."""
    folder = Path(words[0])
    before = files(folder)
    capsys.readouterr()
    assert main(["keys", *words]) == 2
    assert files(folder) == before
    return capsys.readouterr().err


def test_each_recipient_has_a_folder(made: Path) -> None:
    of_sites = {
        f"sites/{site}/{name}"
        for site in ("a", "b.1")
        for name in ("ca.crt", f"{site}.key", f"{site}.key.pub")
    }
    of_server = {"ca.crt", "server.key", "server.pem", "sites/a.key.pub", "sites/b.1.key.pub"}
    assert files(made).keys() == {
        "ca/ca.key",
        "ca/ca.crt",
        *of_sites,
        *(f"server/{name}" for name in of_server),
    }
    for copy in ("server/ca.crt", "sites/a/ca.crt", "sites/b.1/ca.crt"):
        assert (made / copy).read_bytes() == (made / "ca" / "ca.crt").read_bytes()
    assert (made / "server" / "sites" / "a.key.pub").read_bytes() == (
        made / "sites" / "a" / "a.key.pub"
    ).read_bytes()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_private_keys_are_never_there_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    """The mode is private when the file is created and when it gets its name, for any umask."""
    seen = list[int]()
    link = os.link

    def noting(source: str, target: str) -> None:
        if Path(target).suffix == ".key":
            seen.append(stat.S_IMODE(os.stat(source).st_mode))
        assert not Path(target).exists()
        link(source, target)

    monkeypatch.setattr(os, "link", noting)
    before = os.umask(umask)
    try:
        assert main(["keys", str(tmp_path / "keys"), *SERVER, "--site", "a"]) == 0
    finally:
        os.umask(before)
    assert seen == [0o600] * 3
    for path in (tmp_path / "keys").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (
            0o700 & ~umask if path.is_dir() else 0o600 if path.suffix == ".key" else 0o644
        ), path


# ----- certificates -------------------------------------------------------------------------------


def certificate(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


@pytest.mark.parametrize("name", [x509.DNSName("server.example.org"), x509.DNSName("localhost")])
def test_certificate_holds_for_names_and_a_year(made: Path, name: x509.DNSName) -> None:
    """An independent verifier applies the rules of web certificates (RFC 5280)."""
    own = certificate(made / "server" / "server.pem")
    authority = certificate(made / "ca" / "ca.crt")
    now = datetime.now(UTC)

    def verified(at: datetime, subject: x509.DNSName) -> bool:
        verifier = PolicyBuilder().store(Store([authority])).time(at).build_server_verifier(subject)
        with suppress(x509.verification.VerificationError):
            return verifier.verify(own, []) == [own, authority]
        return False

    assert verified(now, name)
    assert verified(now + timedelta(days=364), name)
    assert not verified(now + timedelta(days=366), name)
    assert not verified(now - timedelta(days=1), name)
    assert not verified(now, x509.DNSName("other.example.org"))


def test_extensions(made: Path) -> None:
    own = certificate(made / "server" / "server.pem")
    authority = certificate(made / "ca" / "ca.crt")
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example.org", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == [
        "10.1.2.3",
        "127.0.0.1",
    ]
    limits = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (limits.critical, limits.value) == (True, x509.BasicConstraints(ca=True, path_length=0))
    assert own.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    usage = authority.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.key_cert_sign, usage.digital_signature) == (True, False)
    usage = own.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.key_cert_sign, usage.digital_signature) == (False, True)
    assert authority.not_valid_after_utc - datetime.now(UTC) > timedelta(days=3640)


@contextmanager
def tls_server(folder: Path) -> Iterator[int]:
    """Run a server that accepts every TLS handshake, and yield its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with suppress(OSError), context.wrap_socket(connection, server_side=True):
                    pass

        Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("name", ["server.example.org", "localhost", "127.0.0.1", "10.1.2.3"])
def test_who_has_the_authority_shakes_hands(made: Path, tmp_path: Path, name: str) -> None:
    assert main(["keys", str(tmp_path / "others"), *SERVER]) == 0
    with tls_server(made / "server") as port:
        context = ssl.create_default_context(cafile=str(made / "sites" / "a" / "ca.crt"))
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname=name) as secure,
        ):
            assert secure.version() == "TLSv1.3"
        for wrong, authority in (("example.org", made), (name, tmp_path / "others")):
            context = ssl.create_default_context(cafile=str(authority / "ca" / "ca.crt"))
            with (
                socket.create_connection(("127.0.0.1", port)) as plain,
                pytest.raises(ssl.SSLCertVerificationError),
            ):
                context.wrap_socket(plain, server_hostname=wrong)


# ----- key pairs ----------------------------------------------------------------------------------


def test_flower_takes_a_pair(made: Path) -> None:
    folder = made / "sites" / "a"
    given = supernode_parser().parse_args(["--auth-supernode-private-key", str(folder / "a.key")])
    pair = client_authentication(given)
    assert pair is not None
    form = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    assert pair[1].curve.name == "secp384r1"
    assert try_load_public_key(folder / "a.key.pub") == pair[1].public_bytes(*form)


def test_what_is_read_is_what_was_made(made: Path) -> None:
    """The server reads from its folder, each site from its own."""
    read = public_keys(str(made / "server" / "sites"))
    assert list(read) == ["a", "b.1"]
    for site, key in read.items():
        assert private_key(str(made / "sites" / site / f"{site}.key")).public_key() == key
        assert load_ssh_public_key((made / "sites" / site / f"{site}.key.pub").read_bytes()) == key
    assert load_ssh_private_key((made / "sites" / "a" / "a.key").read_bytes(), None) is not None


# ----- repeated commands --------------------------------------------------------------------------


@pytest.mark.parametrize("kept_elsewhere", ["ca", "ca/ca.key"])
def test_a_site_is_added_without_the_authority(
    made: Path, tmp_path: Path, kept_elsewhere: str
) -> None:
    shutil.move(made / kept_elsewhere, tmp_path / "safe")
    before = files(made)
    assert main(["keys", str(made), "--site", "c"]) == 0
    after = files(made)
    new = {"sites/c/ca.crt", "sites/c/c.key", "sites/c/c.key.pub", "server/sites/c.key.pub"}
    assert {name: data for name, data in after.items() if name not in new} == before
    assert after.keys() - before.keys() == new
    assert after["sites/c/ca.crt"] == after["sites/a/ca.crt"]


def test_removed_site_does_not_come_back(made: Path) -> None:
    (made / "server" / "sites" / "a.key.pub").unlink()
    assert main(["keys", str(made), "--site", "c"]) == 0
    assert list(public_keys(str(made / "server" / "sites"))) == ["b.1", "c"]


def test_new_certificate_has_the_same_authority(made: Path) -> None:
    before = files(made)
    for name in ("server.key", "server.pem"):
        (made / "server" / name).unlink()
    assert main(["keys", str(made), "--server", "new.example.org", "--days", "30"]) == 0
    after = files(made)
    assert {name for name in after if after[name] != before[name]} == {
        "server/server.key",
        "server/server.pem",
    }
    certificate(made / "server" / "server.pem").verify_directly_issued_by(
        certificate(made / "ca" / "ca.crt")
    )


def test_site_makes_its_pair_and_sends_one_key(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", str(tmp_path / "own"), "--site", "c"]) == 0
    assert files(tmp_path / "own").keys() == {"sites/c/c.key", "sites/c/c.key.pub"}
    assert "send c.key.pub to the server, and no other file" in capsys.readouterr().out
    shutil.copy(tmp_path / "own" / "sites" / "c" / "c.key.pub", made / "server" / "sites")
    assert list(public_keys(str(made / "server" / "sites"))) == ["a", "b.1", "c"]


def test_later_authority_reaches_existing_sites(tmp_path: Path) -> None:
    assert main(["keys", str(tmp_path), "--site", "c"]) == 0
    assert main(["keys", str(tmp_path), *SERVER, "--site", "a"]) == 0
    assert list(public_keys(str(tmp_path / "server" / "sites"))) == ["a", "c"]
    assert (tmp_path / "sites" / "c" / "ca.crt").read_bytes() == (
        tmp_path / "ca" / "ca.crt"
    ).read_bytes()


def test_another_authority_comes_to_all_sites(made: Path) -> None:
    """After the server key is lost, files that were moved away are created again.

    Every site gets the new certificate.
    """
    before = files(made / "sites")
    for folder in ("ca", "server"):
        (made / folder).rename(made / f"old-{folder}")
    assert main(["keys", str(made), *SERVER]) == 0
    certificate = (made / "ca" / "ca.crt").read_bytes()
    assert certificate != (made / "old-ca" / "ca.crt").read_bytes()
    after = files(made / "sites")
    assert {name for name in after if after[name] != before[name]} == {"a/ca.crt", "b.1/ca.crt"}
    assert (after["a/ca.crt"], after["b.1/ca.crt"]) == (certificate, certificate)
    assert list(public_keys(str(made / "server" / "sites"))) == ["a", "b.1"]


# ----- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [("--site", "a"), SERVER, ("--site", "c", "--site", "b.1"), (*SERVER, "--site", "c")]
)
def test_no_key_is_overwritten(
    made: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert "exists already, and keys are never overwritten" in refused(capsys, str(made), *words)


def test_nor_one_that_a_site_has_sent(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(made / "sites" / "a" / "a.key.pub", made / "server" / "sites" / "c.key.pub")
    assert f"{made / 'server' / 'sites' / 'c.key.pub'}: exists already" in refused(
        capsys, str(made), "--site", "c"
    )


def test_nor_one_that_somebody_made_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = os.link

    def late(source: str, target: str) -> None:
        Path(target).write_bytes(b"another's")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert main(["keys", str(tmp_path), "--site", "a"]) == 2
    assert files(tmp_path) == {"sites/a/a.key": b"another's"}
    assert "keys are never overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "give --server and each --site"),
        (("--site", "a/b"), "--site 'a/b': is not a valid site name"),
        (("--site", ".."), "--site '..': is not a valid site name"),
        (("--site", ""), "--site '': is not a valid site name"),
        (("--site", "x" * 65), "at most 64 characters"),
        (("--site", "c", "--site", "c"), "--site 'c': is given more than once"),
        (
            ("--server", "https://x.org"),
            (
                "--server 'https://x.org': is not a host name or address;"
                " write it without scheme and port"
            ),
        ),
        (("--server", "x.org:9092"), "--server 'x.org:9092'"),
        (("--server", "-x.org"), "--server '-x.org'"),
        (("--server", "1.2.3.400"), "--server '1.2.3.400'"),
        ((*SERVER, "--days", "0"), "--days 0: must be from 1 to 3650"),
        ((*SERVER, "--days", "9999"), "--days 9999"),
    ],
)
def test_impossible_request_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    # Only the form with "=" works for values that begin with "-".
    words = tuple(f"{word}={value}" for word, value in zip(words[::2], words[1::2], strict=True))
    assert told in refused(capsys, str(tmp_path / "new"), *words)
    assert not (tmp_path / "new").exists()


def test_all_mistakes_are_told_at_once(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(
        capsys, str(made), "--server", "a:1", "--site", "x y", "--site", "a", "--days", "0"
    )
    for word in (
        "--days 0",
        "'x y'",
        "a.key: exists already",
        "'a:1'",
        "server.key: exists already",
    ):
        assert word in told


def test_incomplete_authority_is_not_replaced(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("server.key", "server.pem"):
        (made / "server" / name).unlink()
    (made / "ca" / "ca.key").rename(made / "away")
    assert "ca.key: is missing" in refused(capsys, str(made), *SERVER)
    (made / "ca" / "ca.key").write_bytes((made / "sites" / "a" / "a.key").read_bytes())
    assert "ca.key" in refused(capsys, str(made), *SERVER)
    (made / "away").rename(made / "ca" / "ca.key")
    (made / "ca" / "ca.crt").unlink()
    assert "ca.crt: is missing" in refused(capsys, str(made), *SERVER)
    (made / "ca" / "ca.key").unlink()
    told = refused(capsys, str(made), *SERVER)
    assert "ca.crt: is missing" in told
    assert "ca.key: is missing" in told


def test_unwritable_directory_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["keys", str(tmp_path / "file"), "--site", "a"]) == 2
    assert (
        "a.key: cannot be written (File exists); name another directory" in capsys.readouterr().err
    )

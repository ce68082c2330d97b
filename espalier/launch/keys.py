"""``espalier keys``: what TLS, SuperNode authentication and names that are bound to keys need, in a folder for each recipient.

    ca/                 ca.key, ca.crt: the authority; ca.key signs certificates of servers, and nothing that runs needs it
    server/             ca.crt, server.pem, server.key; sites/NAME.key.pub: for the server
    sites/NAME/         ca.crt, NAME.key, NAME.key.pub: for this site

Covers: no key is ever overwritten; a private key is never there for others to read, not for a moment, nor half written.
Does not cover: how a folder comes to its owner. A private key that need not travel is made where it stays: the command makes a
site's pair also where there is no authority.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from espalier.launch.authority import (
    AUTHORITY_DAYS,
    names_of_server,
    new_authority,
    new_key,
    new_server_certificate,
    pem_of,
    read_authority,
)
from espalier.settings.mistakes import Mistake
from espalier.settings.node import MOST_NAME, SITE_NAME, is_site_name
from espalier.settings.site_keys import PRIVATE, PUBLIC

OWNER_ALONE = 0o600
EVERYBODY = 0o644
FOLDER_OF_KEYS = 0o700
NEVER_OVERWRITTEN = "is there, and no key is overwritten"


@dataclass(frozen=True)
class Keys:
    """A directory of keys."""

    root: Path

    @property
    def authority(self) -> Path:
        """Of the authority."""
        return self.root / "ca"

    @property
    def authority_key(self) -> Path:
        """The authority's private key, which may be kept elsewhere."""
        return self.authority / "ca.key"

    @property
    def certificate(self) -> Path:
        """The authority's, which everybody has."""
        return self.authority / "ca.crt"

    @property
    def at_hand(self) -> Path | None:
        """The same where the authority is kept elsewhere: the server has it too. None: there is no authority yet."""
        return next(
            (
                file
                for file in (self.certificate, self.server / self.certificate.name)
                if file.exists()
            ),
            None,
        )

    @property
    def server(self) -> Path:
        """For the server."""
        return self.root / "server"

    def of_server(self) -> tuple[Path, Path]:
        """The server's private key and its certificate."""
        return self.server / "server.key", self.server / "server.pem"

    def site(self, name: str) -> Path:
        """For a site."""
        return self.root / "sites" / name

    def private_key(self, name: str) -> Path:
        """A site's."""
        return self.site(name) / f"{name}{PRIVATE}"

    def public_key(self, name: str) -> Path:
        """A site's, beside its private one."""
        return self.site(name) / f"{name}{PUBLIC}"

    def at_server(self, name: str) -> Path:
        """A site's public key, as the server has it."""
        return self.server / "sites" / f"{name}{PUBLIC}"

    def sites(self) -> list[str]:
        """Sites whose keys were made here."""
        return sorted(
            folder.name
            for folder in self.root.glob("sites/*")
            if self.public_key(folder.name).is_file()
        )


def make_keys(root: Path, servers: Sequence[str], sites: Sequence[str], days: int) -> Iterator[str]:
    """Make what is asked for, and yield what was made for whom, a line each.

    Parameters
    ----------
    servers : names and addresses by which the server is reached; none: no certificate is made
    sites : each gets a key pair; where the directory has a server's folder, that gets the public key
    days : how long the server's certificate holds

    Raises
    ------
    Mistake
        Before anything is made: a name is none, a key is there already, or the authority is not; or a file cannot be written.
    """
    keys = Keys(root)
    _require_makeable(keys, servers, sites, days)
    members = list(sites)
    if servers:
        if keys.at_hand is None:
            members = sorted({*sites, *keys.sites()})  # those that were there before it
        _make_server(keys, servers, days)
        yield (
            f"{keys.authority}: stays with you; only another certificate of a server takes ca.key,"
            " so keep that elsewhere"
        )
    for name in sites:
        _make_pair(keys, name)
        yield f"{keys.site(name)}: for {name} alone"
    public = ", ".join(f"{name}{PUBLIC}" for name in members)
    if keys.at_hand is None:
        yield f"send the server {public} and nothing else; ca.crt comes back"
        return
    for name in members:
        _hand_on(keys.at_hand, keys.site(name) / keys.certificate.name)
        _hand_on(keys.public_key(name), keys.at_server(name))
    yield f"{keys.server}: for the server" + (
        "" if servers else f"; new in its folder sites: {public}"
    )


def _make_server(keys: Keys, servers: Sequence[str], days: int) -> None:
    """A certificate for the server, and the authority, where there is none yet."""
    if keys.certificate.exists():
        authority = read_authority(_read(keys.certificate), _read(keys.authority_key))
        new = False
    else:
        signing_key = new_key()
        authority = (new_authority(signing_key), signing_key)
        new = True
    key = new_key()
    certificate = new_server_certificate(
        key.public_key(), names_of_server(servers), days, authority
    )
    if new:
        _write(keys.authority_key, pem_of(authority[1]), OWNER_ALONE)
        _write(keys.certificate, authority[0].public_bytes(Encoding.PEM), EVERYBODY)
    private, public = keys.of_server()
    _write(private, pem_of(key), OWNER_ALONE)
    _write(public, certificate.public_bytes(Encoding.PEM), EVERYBODY)
    _hand_on(keys.certificate, keys.server / keys.certificate.name)


def _require_makeable(keys: Keys, servers: Sequence[str], sites: Sequence[str], days: int) -> None:
    lines = (
        []
        if servers or sites
        else ["name a --server, and each --site; or a --site alone for a key pair of its own"]
    )
    if not 1 <= days <= AUTHORITY_DAYS:
        lines.append(f"--days {days}: must be 1 to {AUTHORITY_DAYS}")
    for name in dict.fromkeys(sites):
        if not is_site_name(name) or name in ("", ".", ".."):
            lines.append(
                f"--site {name!r}: is no name of a site; {SITE_NAME[1:-2]} are its characters,"
                f" {MOST_NAME} at most"
            )
        elif sites.count(name) > 1:
            lines.append(f"--site {name!r}: is given more than once")
        else:
            there = (keys.private_key(name), keys.public_key(name), keys.at_server(name))
            lines += [
                f"{file}: {NEVER_OVERWRITTEN}; leave --site {name} out, or move it away"
                for file in there
                if file.exists()
            ]
    try:
        names_of_server(servers)
    except Mistake as mistake:
        lines.append(str(mistake))
    if servers:
        lines += _of_server(keys)
    if lines:
        raise Mistake("\n".join(lines))


def _of_server(keys: Keys) -> Iterator[str]:
    remedy = "leave --server out, or move server.key and server.pem away for new ones"
    yield from (
        f"{file}: {NEVER_OVERWRITTEN}; {remedy}" for file in keys.of_server() if file.exists()
    )
    if keys.at_hand is not None or keys.authority_key.exists():
        missing = [file for file in (keys.certificate, keys.authority_key) if not file.exists()]
        yield from (
            f"{file}: is kept elsewhere; bring it back for as long as this takes"
            for file in missing
        )


def _make_pair(keys: Keys, name: str) -> None:
    """A site's pair, in the formats that Flower takes; the public one ends with the site's name."""
    key = new_key()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(keys.private_key(name), private, OWNER_ALONE)
    _write(keys.public_key(name), public + f" {name}\n".encode(), EVERYBODY)


def _hand_on(file: Path, to: Path) -> None:
    """Copy a public file, where there is none; of another authority than now the certificate goes."""
    if file.name == "ca.crt" and to.exists() and _read(to) != _read(file):
        to.unlink()
    if not to.exists():
        _write(to, _read(file), EVERYBODY)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Mistake(f"{file}: cannot be read ({error.strerror})") from None


def _write(file: Path, data: bytes, mode: int) -> None:
    """Make a file that is there whole or not at all, from its first moment with these permissions; never over another one.

    Raises
    ------
    Mistake
        There is one, or the file system refuses.
    """
    try:
        for place in reversed((file.parent, *file.parent.parents)):
            if not place.is_dir():
                place.mkdir(FOLDER_OF_KEYS)
        # Its owner's alone, whatever the umask.
        handle, name = tempfile.mkstemp(prefix=".new-", dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as opened:
                opened.write(data)
                opened.flush()
                os.fchmod(handle, mode)
                os.fsync(handle)
            with suppress(FileExistsError):
                os.link(name, file)
                return
        finally:
            os.unlink(name)
    except OSError as error:
        raise Mistake(
            f"{file}: cannot be written ({error.strerror}); name another directory"
        ) from None
    raise Mistake(f"{file}: {NEVER_OVERWRITTEN}; move it away")

"""``espalier keys``: keys and certificates, in one folder per recipient.

They are for TLS, SuperNode authentication and site names that are bound to keys.

    ca/             ca.key, ca.crt: the authority; ca.key only signs server certificates
    server/         ca.crt, server.pem, server.key; sites/NAME.key.pub: for the server
    sites/NAME/     ca.crt, NAME.key, NAME.key.pub: for this site

No running program needs ca.key.

Covers: no key is ever overwritten. A private key is never readable by others, not even for a
moment, and never half written.
Does not cover: transport of a folder to its owner. A private key that need not travel should be
made where it stays: the command makes a site's key pair without an authority too.
"""

import argparse
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from espalier.cli import Commands
from espalier.errors import EspalierError, InputError, tell
from espalier.identity.site_keys import PRIVATE, PUBLIC
from espalier.launch.authority import (
    AUTHORITY_DAYS,
    names_of_server,
    new_authority,
    new_key,
    new_server_certificate,
    pem_of,
    read_authority,
)
from espalier.settings.node import MAX_NAME, SITE_NAME, is_site_name

OWNER_ONLY = 0o600
EVERYBODY = 0o644
FOLDER_OF_KEYS = 0o700
NEVER_OVERWRITTEN = "exists already, and keys are never overwritten"


def add_keys(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "keys", help="make certificates for TLS and a key pair for each site; existing files stay"
    )
    parser.add_argument(
        "directory",
        metavar="DIRECTORY",
        help="folder for the files; use the same folder again to add a site",
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="HOST",
        help="name or address under which sites reach the server",
    )
    parser.add_argument(
        "--site",
        action="append",
        default=[],
        metavar="NAME",
        help="name of a site, as in its --node-config",
    )
    parser.add_argument(
        "--days",
        type=int,
        default=365,
        help="number of days for which the certificate of the server is valid; default 365",
    )
    parser.set_defaults(execute=show_made_keys)


def show_made_keys(args: argparse.Namespace) -> int:
    """Make keys and certificates, and print which folder is for which recipient."""
    try:
        for line in make_keys(Path(args.directory), args.server, args.site, args.days):
            print(line)
    except OSError as error:
        where = error.filename or args.directory
        tell(f"keys: {where}: {error.strerror}")
        return 2
    return 0


class Keys:
    """Layout of a directory of keys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.authority = root / "ca"
        self.authority_key = self.authority / "ca.key"
        """Private key of the authority, which may be stored elsewhere."""
        self.certificate = self.authority / "ca.crt"
        """Certificate of the authority, which everybody has."""
        self.server = root / "server"
        self.server_files = (self.server / "server.key", self.server / "server.pem")
        """Private key and certificate of the server."""

    @property
    def at_hand(self) -> Path | None:
        """Certificate of the authority in this directory; None without an authority.

        If the authority's folder is stored elsewhere, it is the server's copy.
        """
        copies = (self.certificate, self.server / self.certificate.name)
        return next((file for file in copies if file.exists()), None)

    def site(self, name: str) -> Path:
        """Return the folder for a site."""
        return self.root / "sites" / name

    def pair(self, name: str) -> tuple[Path, Path]:
        """Return the files of a site's private and public key."""
        return self.site(name) / f"{name}{PRIVATE}", self.site(name) / f"{name}{PUBLIC}"

    def at_server(self, name: str) -> Path:
        """Return the file of a site's public key in the server's folder."""
        return self.server / "sites" / f"{name}{PUBLIC}"

    def sites(self) -> list[str]:
        """Return the sites whose keys were made in this directory."""
        names = sorted(folder.name for folder in self.root.glob("sites/*"))
        return [name for name in names if self.pair(name)[1].is_file()]


def make_keys(root: Path, servers: Sequence[str], sites: Sequence[str], days: int) -> Iterator[str]:
    """Make keys and certificates, and yield one line for each that names its recipient.

    Without ``servers`` no certificate is made; it is valid for ``days``. The public keys of the
    sites also go to the server's folder if there is one.

    Raises
    ------
    InputError
        Before anything is made: a name is invalid, a key exists already, or the authority is
        missing. Later: a file cannot be written.
    """
    keys = Keys(root)
    _require_makeable(keys, servers, sites, days)
    members = list(sites)
    if servers:
        if keys.at_hand is None:
            # Sites that were made before the authority get its certificate now.
            members = sorted({*sites, *keys.sites()})
        _make_server(keys, servers, days)
        yield (
            f"{keys.authority}: stays with you; ca.key is needed only for another server"
            " certificate, so store it elsewhere"
        )
    for name in sites:
        _make_pair(keys, name)
        yield f"{keys.site(name)}: only for {name}"
    public = ", ".join(f"{name}{PUBLIC}" for name in members)
    if keys.at_hand is None:
        yield f"send {public} to the server, and no other file; you get ca.crt back"
        return
    for name in members:
        _hand_on(keys.at_hand, keys.site(name) / keys.certificate.name)
        _hand_on(keys.pair(name)[1], keys.at_server(name))
    yield f"{keys.server}: for the server" + (
        "" if servers else f"; new in its folder sites: {public}"
    )


def _make_server(keys: Keys, servers: Sequence[str], days: int) -> None:
    """Make a server certificate, and the authority if there is none."""
    new = not keys.certificate.exists()
    if new:
        signing_key = new_key()
        authority = (new_authority(signing_key), signing_key)
    else:
        authority = read_authority(_read(keys.certificate), _read(keys.authority_key))
    key = new_key()
    certificate = new_server_certificate(
        key.public_key(), names_of_server(servers), days, authority
    )
    if new:
        _write(keys.authority_key, pem_of(authority[1]), OWNER_ONLY)
        _write(keys.certificate, authority[0].public_bytes(Encoding.PEM), EVERYBODY)
    private, public = keys.server_files
    _write(private, pem_of(key), OWNER_ONLY)
    _write(public, certificate.public_bytes(Encoding.PEM), EVERYBODY)
    _hand_on(keys.certificate, keys.server / keys.certificate.name)


def _require_makeable(keys: Keys, servers: Sequence[str], sites: Sequence[str], days: int) -> None:
    lines = []
    if not (servers or sites):
        lines.append("give --server and each --site, or only a --site for a new key pair")
    if not 1 <= days <= AUTHORITY_DAYS:
        lines.append(f"--days {days}: must be from 1 to {AUTHORITY_DAYS}")
    for name in dict.fromkeys(sites):
        if not is_site_name(name):
            lines.append(
                f"--site {name!r}: is not a valid site name; it has at most {MAX_NAME}"
                f" characters of {SITE_NAME[1:-2]}"
            )
        elif sites.count(name) > 1:
            lines.append(f"--site {name!r}: is given more than once")
        else:
            files = (*keys.pair(name), keys.at_server(name))
            lines += _existing(files, f"omit --site {name}, or move the file away")
    try:
        names_of_server(servers)
    except EspalierError as error:
        lines.append(str(error))
    if servers:
        lines += _existing(
            keys.server_files,
            "omit --server, or move server.key and server.pem away to make new ones",
        )
        if keys.at_hand is not None or keys.authority_key.exists():
            lines += [
                f"{file}: is missing; copy it here until the new files are made"
                for file in (keys.certificate, keys.authority_key)
                if not file.exists()
            ]
    if lines:
        raise InputError("\n".join(lines))


def _existing(files: Iterable[Path], remedy: str) -> list[str]:
    return [f"{file}: {NEVER_OVERWRITTEN}; {remedy}" for file in files if file.exists()]


def _make_pair(keys: Keys, name: str) -> None:
    """Make a site's key pair in Flower's formats; the public key ends with the site's name."""
    key = new_key()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    private_file, public_file = keys.pair(name)
    _write(private_file, private, OWNER_ONLY)
    _write(public_file, public + f" {name}\n".encode(), EVERYBODY)


def _hand_on(file: Path, to: Path) -> None:
    """Copy a public file unless it exists; a certificate of another authority is replaced."""
    if file.name == "ca.crt" and to.exists() and _read(to) != _read(file):
        to.unlink()
    if not to.exists():
        _write(to, _read(file), EVERYBODY)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from None


def _write(file: Path, data: bytes, mode: int) -> None:
    """Write a new file atomically, with these permissions; raise InputError if it exists."""
    try:
        for place in reversed((file.parent, *file.parent.parents)):
            if not place.is_dir():
                place.mkdir(FOLDER_OF_KEYS)
        # ``mkstemp`` makes a file that only its owner can read, whatever the umask.
        handle, name = tempfile.mkstemp(prefix=".new-", dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as opened:
                opened.write(data)
                opened.flush()
                os.fchmod(handle, mode)
                os.fsync(handle)
            # A link fails if the target exists, unlike a rename, which would replace it.
            with suppress(FileExistsError):
                os.link(name, file)
                return
        finally:
            os.unlink(name)
    except OSError as error:
        raise InputError(
            f"{file}: cannot be written ({error.strerror}); name another directory"
        ) from None
    raise InputError(f"{file}: {NEVER_OVERWRITTEN}; move it away")

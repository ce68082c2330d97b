"""A site's key pair in files: the private one at the site, and at the server a directory with a public one per site.

``server/sites/hospital-a.key.pub`` says that whoever has the private part of this key is ``hospital-a``. The formats are those
that Flower's SuperNode authentication takes: OpenSSH, on a curve of NIST's.
Covers: a private key that others of the machine can read is refused, as ssh does; so is a directory in which two sites have one
key, or a file is none.
Does not cover: who else has a private key, or may write to the directory.
"""

import os
import stat
from base64 import b64decode, b64encode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from espalier.settings.home import at_home
from espalier.settings.mistakes import Mistake
from espalier.settings.node import is_site_name

PRIVATE = ".key"
PUBLIC = ".key.pub"
"""Endings of the names of a site's files; in front of them is the site's name."""
CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
MOST_BYTES = 16_384
"""Of a file of a key."""
MAKE_ONE = "make one with espalier keys DIRECTORY --site NAME"

PublicKeys = Mapping[str, ec.EllipticCurvePublicKey]
"""By site."""


def private_key(path: str) -> ec.EllipticCurvePrivateKey:
    """Read a site's private key.

    Raises
    ------
    Mistake
        It cannot be read, others can read it, or it is no key that a SuperNode takes; nothing of it is quoted.
    """
    try:
        with open(at_home(path), "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MOST_BYTES)
    except OSError as error:
        raise Mistake(
            f"site-key = {path!r}: cannot be read ({error.strerror}); name the site's private key"
        ) from None
    if status.st_uid == os.getuid() and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise Mistake(f"site-key = {path!r}: others of this machine can read it; chmod 600 it")
    try:
        key = load_ssh_private_key(data, None)
    except TypeError:
        raise Mistake(
            f"site-key = {path!r}: asks for a passphrase, which a node cannot give; name a key"
            " without one"
        ) from None
    except (ValueError, IndexError, NotImplementedError, UnsupportedAlgorithm):
        raise Mistake(
            f"site-key = {path!r}: is no private key in OpenSSH's format; {MAKE_ONE}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, CURVES):
        raise Mistake(
            f"site-key = {path!r}: is no ECDSA key on a curve that a SuperNode takes; {MAKE_ONE}"
        )
    return key


def public_keys(folder: str) -> dict[str, ec.EllipticCurvePublicKey]:
    """Read the public keys of all sites, a file ``NAME.key.pub`` each.

    Raises
    ------
    Mistake
        With one line per file that is none, all of them at once; or there is no file at all.
    """
    try:
        files = sorted(
            file
            for file in at_home(folder).iterdir()
            if not file.name.startswith(".") or _site(file)
        )
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise Mistake(
            f"site-keys = {folder!r}: cannot be read ({why}); name a directory on the server with"
            f" the NAME{PUBLIC} of each site"
        ) from None
    found: dict[str, ec.EllipticCurvePublicKey] = {}
    lines = []
    holders = dict[bytes, str]()
    for file in files:
        try:
            name = _site(file)
            key = public_key(file)
        except Mistake as mistake:
            lines.append(str(mistake))
            continue
        other = holders.setdefault(_bytes_of(key), name)
        if other != name:
            lines.append(f"{file.name}: is the key of {other} too; each site has a key of its own")
        found[name] = key
    if not files:
        lines.append(f"holds no key; put the NAME{PUBLIC} of each site there")
    if lines:
        raise Mistake(f"site-keys = {folder!r}:\n" + "\n".join(f"  {line}" for line in lines))
    return found


def public_key(file: Path) -> ec.EllipticCurvePublicKey:
    """Read a public key from a file that is named after its site.

    Raises
    ------
    Mistake
        Its name is not that of a site's key, or it holds something else.
    """
    if not _site(file):
        raise Mistake(
            f"{file.name}: is not named NAME{PUBLIC} after a site; rename it, or take it away"
        )
    try:
        with open(file, "rb") as opened:
            key = load_ssh_public_key(opened.read(MOST_BYTES))
    except OSError as error:
        raise Mistake(f"{file.name}: cannot be read ({error.strerror})") from None
    except (ValueError, IndexError, NotImplementedError, UnsupportedAlgorithm):
        raise Mistake(
            f"{file.name}: is no public key in OpenSSH's format; ask the site for its {file.name}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVES):
        raise Mistake(
            f"{file.name}: is no ECDSA key on a curve that a SuperLink takes; have the site"
            f" {MAKE_ONE}"
        )
    return key


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Of a public key, as ``ssh-keygen -l`` shows it."""
    _, blob, *_ = _bytes_of(key).split()
    return f"SHA256:{b64encode(sha256(b64decode(blob)).digest()).decode().rstrip('=')}"


def _site(file: Path) -> str:
    """The site that a file is named after; empty if it is none."""
    name = file.name.removesuffix(PUBLIC)
    return (
        name
        if file.name.endswith(PUBLIC) and name not in ("", ".", "..") and is_site_name(name)
        else ""
    )


def _bytes_of(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)

"""Key pairs of sites in files: the private key at the site, the public keys at the server.

The file ``server/sites/hospital-a.key.pub`` states that the holder of the matching private key is
``hospital-a``. The formats are those of Flower's SuperNode authentication: OpenSSH, on a NIST
curve.
Covers: a private key that other users of the machine can read is refused, as ssh does. A directory
is refused if two sites have the same key or if a file is not a public key.
Does not cover: copies of a private key in other hands, or who may write to the directory.
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

from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError
from espalier.settings.node import is_site_name

PRIVATE = ".key"
PUBLIC = ".key.pub"
"""Suffixes of a site's key files, after the site's name."""
CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
PUBLIC_KEY = (b"ssh-", b"ecdsa-", b"sk-")
"""First bytes of public keys in OpenSSH format."""
MAX_BYTES = 16_384
"""Maximum number of bytes that are read of a key file."""
MAKE_ONE = "make one with espalier keys DIRECTORY --site NAME"

PublicKeys = Mapping[str, ec.EllipticCurvePublicKey]
"""Public keys by site name."""


def private_key(path: str, setting: str = "site-key") -> ec.EllipticCurvePrivateKey:
    """Read a site's private key.

    ``setting`` is the key or option that names the file.

    Raises InputError if the file cannot be read, other users can read it, or a SuperNode does not
    accept the key. Nothing of its content is quoted.
    """
    label = f"{setting} {path}" if setting.startswith("--") else f"{setting} = {path!r}"
    try:
        with open(at_home(path), "rb") as file:
            # The status of the open file: the path may be changed in between.
            status = os.fstat(file.fileno())
            data = file.read(MAX_BYTES)
    except OSError as error:
        raise InputError(
            f"{label}: cannot be read ({error.strerror}); name the site's private key"
        ) from None
    if data.startswith(PUBLIC_KEY):
        raise InputError(
            f"{label}: is a public key; name the private key of the pair, which has no .pub"
        )
    # A file of another user, for instance root in a container, is not for this user to change.
    if status.st_uid == os.getuid() and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(f"{label}: other users of this machine can read it; run: chmod 600 {path}")
    try:
        key = load_ssh_private_key(data, None)
    except TypeError:
        raise InputError(
            f"{label}: the key has a passphrase, which a node cannot enter; name a"
            " key without a passphrase"
        ) from None
    except (ValueError, IndexError, NotImplementedError, UnsupportedAlgorithm):
        raise InputError(f"{label}: is not a private key in OpenSSH format; {MAKE_ONE}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, CURVES):
        raise InputError(
            f"{label}: is not an ECDSA key on a curve that a SuperNode accepts; {MAKE_ONE}"
        )
    return key


def public_keys(folder: str, setting: str = "site-keys") -> dict[str, ec.EllipticCurvePublicKey]:
    """Read the public keys of all sites, one file ``NAME.key.pub`` each.

    ``setting`` is the key that names the directory. InputError has one line per invalid file, or
    says that the directory holds no key.
    """
    try:
        files = sorted(
            # Hidden files, such as those of an editor, are ignored unless they are named like keys.
            file
            for file in at_home(folder).iterdir()
            if not file.name.startswith(".") or _site(file)
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{setting} = {folder!r}: cannot be read ({reason}); name a directory with the"
            f" NAME{PUBLIC} of each site"
        ) from None
    keys: dict[str, ec.EllipticCurvePublicKey] = {}
    lines = []
    holders = dict[bytes, str]()
    for file in files:
        try:
            name = _site(file)
            key = public_key(file)
        except EspalierError as error:
            lines.append(str(error))
            continue
        # The same key at two sites would let one use the other's name.
        holder = holders.setdefault(_bytes_of(key), name)
        if holder != name:
            lines.append(f"{file.name}: is also the key of {holder}; each site needs its own key")
        keys[name] = key
    if not files:
        lines.append(f"contains no key; put the NAME{PUBLIC} of each site there")
    if lines:
        raise InputError(f"{setting} = {folder!r}:\n" + "\n".join(f"  {line}" for line in lines))
    return keys


def public_key(file: Path) -> ec.EllipticCurvePublicKey:
    """Read a public key from a file named after its site; raise InputError if it is none."""
    if not _site(file):
        raise InputError(
            f"{file.name}: is not named NAME{PUBLIC} after a site; rename or remove it"
        )
    try:
        with open(file, "rb") as handle:
            key = load_ssh_public_key(handle.read(MAX_BYTES))
    except OSError as error:
        raise InputError(f"{file.name}: cannot be read ({error.strerror})") from None
    except (ValueError, IndexError, NotImplementedError, UnsupportedAlgorithm):
        raise InputError(
            f"{file.name}: is not a public key in OpenSSH format; ask the site for its {file.name}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVES):
        raise InputError(
            f"{file.name}: is not an ECDSA key on a curve that a SuperLink accepts; ask the site"
            f" to {MAKE_ONE}"
        )
    return key


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return the fingerprint of a public key in the format of ``ssh-keygen -l``."""
    # The second part of an OpenSSH line is the key itself.
    _, blob, *_ = _bytes_of(key).split()
    return f"SHA256:{b64encode(sha256(b64decode(blob)).digest()).decode().rstrip('=')}"


def _site(file: Path) -> str:
    """Return the site after which a file is named; empty if it is named otherwise."""
    name = file.name.removesuffix(PUBLIC)
    return name if file.name.endswith(PUBLIC) and is_site_name(name) else ""


def _bytes_of(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)

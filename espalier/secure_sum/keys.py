"""Keys of one client for one secure sum, and what two clients derive from them.

A client has two X25519 key pairs (RFC 7748): one for the masks that it shares with each neighbour,
and one to encrypt the shares of its secrets. Both follow from random seeds of 16 bytes, so that
Shamir's scheme of the library, whose secrets have 16 bytes, can share the mask key. Agreed keys
are derived by HKDF with SHA-256 (RFC 5869) and are bound to the session and to the two clients.

Covers: whoever lacks both private keys of a pair cannot derive its keys (128 bits of security).
Does not cover: whose public key it is. Signatures (``espalier.messages.sums.secure_sum``) say that.
"""

import json
import os
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SEED_BYTES = 16
"""Size of a secret that is shared: of a mask key's seed, or of the seed of a client's own mask."""
KEY_BYTES = 32
"""Size of a public key, and of a derived key."""
NONCE_BYTES = 12
TAG_BYTES = 16
"""Size of the nonce and of the tag of AES-GCM."""
SEALED_BYTES = NONCE_BYTES + 2 * SEED_BYTES + TAG_BYTES
"""Size of an encrypted pair of shares."""


class UnreadableError(ValueError):
    """Error of a public key that cannot be used, or of shares that cannot be decrypted."""


@dataclass(frozen=True)
class Session:
    """Name of one attempt at one sum; all derived keys are bound to it."""

    lineage: str
    """Name of the run."""
    server_round: int
    number: str
    """Random number of the attempt, hexadecimal; the server chooses it."""

    def info(self, purpose: str, *clients: int) -> bytes:
        """Return the context of a derived key: its purpose, the session and the clients."""
        # JSON separates the parts, so that two contexts never have the same bytes.
        document = [purpose, self.lineage, self.server_round, self.number, *clients]
        return b"espalier secure sum 1\n" + json.dumps(document).encode()


@dataclass(frozen=True)
class Route:
    """Way of an encrypted pair of shares."""

    sender: int
    receiver: int
    list_sha256: str
    """Hash of what the client at either end was given: the list of keys, and the round's order.

    Two clients with different hashes cannot read each other's shares. So a server cannot give one
    client a shorter list, a lower threshold or other settings, adapters or masks than the others.
    """


def new_seed() -> bytes:
    """Return a new random secret."""
    return os.urandom(SEED_BYTES)


def derived(secret: bytes, info: bytes) -> bytes:
    """Return a key of 32 bytes that is derived from a secret by HKDF."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def private_key(seed: bytes, session: Session, purpose: str) -> X25519PrivateKey:
    """Return the private key that follows from a seed; ``purpose`` is "mask" or "share"."""
    return X25519PrivateKey.from_private_bytes(derived(seed, session.info(f"{purpose} key")))


def public_bytes(key: X25519PrivateKey) -> str:
    """Return the public key of a private one, hexadecimal."""
    return key.public_key().public_bytes_raw().hex()


def agreed(key: X25519PrivateKey, other: str, info: bytes) -> bytes:
    """Return the key that a client and another one derive from their key pairs.

    Raises UnreadableError if it is a point of small order, with which any key would agree.

    Parameters
    ----------
    other : public key of the other client, hexadecimal
    """
    try:
        # X25519 of a point of small order is all zeros; the library refuses it.
        secret = key.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
    except ValueError as error:
        raise UnreadableError("a public key is not usable") from error
    return derived(secret, info)


def is_usable(public: str) -> bool:
    """Return whether others can agree on keys with a public key, hexadecimal."""
    try:
        # Any key pair will do: only the public key is tested.
        agreed(X25519PrivateKey.generate(), public, b"")
    except UnreadableError:
        return False
    return True


def mask_key(key: X25519PrivateKey, other: str, session: Session, one: int, two: int) -> bytes:
    """Return the key of the mask that two clients share; it is the same for both."""
    # Ordered, so that both clients derive the same key.
    return agreed(key, other, session.info("pair mask", min(one, two), max(one, two)))


def own_mask_key(seed: bytes, session: Session, client: int) -> bytes:
    """Return the key of a client's own mask."""
    return derived(seed, session.info("own mask", client))


def sealed_shares(
    key: X25519PrivateKey, other: str, session: Session, route: Route, shares: bytes
) -> str:
    """Return a pair of shares, encrypted for another client by AES-256-GCM, hexadecimal."""
    info = session.info(f"shares {route.list_sha256}", route.sender, route.receiver)
    # A random nonce; each key encrypts one pair of shares.
    nonce = os.urandom(NONCE_BYTES)
    return (nonce + AESGCM(agreed(key, other, info)).encrypt(nonce, shares, info)).hex()


def opened_shares(
    key: X25519PrivateKey, other: str, session: Session, route: Route, text: str
) -> bytes:
    """Invert ``sealed_shares`` at the receiver.

    Raises UnreadableError if the text was not encrypted for this session, sender, receiver and list
    of keys.
    """
    # Sender, receiver and list are part of the key and of the authenticated data.
    info = session.info(f"shares {route.list_sha256}", route.sender, route.receiver)
    data = bytes.fromhex(text)
    try:
        return AESGCM(agreed(key, other, info)).decrypt(
            data[:NONCE_BYTES], data[NONCE_BYTES:], info
        )
    except InvalidTag as error:
        raise UnreadableError("shares cannot be decrypted") from error

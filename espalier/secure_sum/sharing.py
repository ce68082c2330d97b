"""Shares of secrets (Shamir 1979), by pycryptodome over GF(2^128).

Covers: fewer than ``threshold`` shares say nothing about a secret.
Does not cover: shares that its owner made wrongly. The owner publishes a hash of each share, by
which holders and server check it. An owner whose shares do not lie on one polynomial is found only
when its secret is put together and is not the one of its hash or public key.
"""

from collections.abc import Mapping
from hashlib import sha256

from Crypto.Protocol.SecretSharing import Shamir


def shared(secret: bytes, threshold: int, holders: list[int]) -> dict[int, bytes]:
    """Return a share of a secret of 16 bytes for each holder, in the order of ``holders``.

    ``threshold`` of them are needed to put it together.
    """
    # ``False``: not the variant of the program ``ssss``.
    shares = Shamir.split(threshold, len(holders), secret, False)
    return {holder: share for holder, (_, share) in zip(holders, shares, strict=True)}


def rebuilt(shares: Mapping[int, bytes], threshold: int, holders: list[int]) -> bytes:
    """Put a secret together from the shares of at least ``threshold`` of its holders.

    Raises ValueError if there are fewer shares.

    Parameters
    ----------
    holders : all holders, in the order of ``shared``
    """
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares, {threshold} are needed")
    # Places count from 1, because a share at 0 would be the secret itself.
    indices = {holder: index for index, holder in enumerate(holders, start=1)}
    # Exactly the threshold: more shares cost time and change nothing.
    chosen = sorted(shares)[:threshold]
    secret: bytes = Shamir.combine([(indices[holder], shares[holder]) for holder in chosen], False)
    return secret


def fingerprint(share: bytes) -> str:
    """Return the SHA-256 of a share or secret, hexadecimal; both are too random to be guessed."""
    # The prefix separates these hashes from others of the same bytes.
    return sha256(b"espalier secure sum\n" + share).hexdigest()

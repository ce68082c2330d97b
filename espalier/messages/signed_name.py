"""Signature of a site's name: the statement that a node signs when it enrols, and its verification.

The signed statement begins with a label that is used for nothing else that such a key signs
(Flower's SuperNode authentication signs a time). It contains the node's statement about itself, the
nonce of this request, the run, and Flower's id of the node.

Covers: a node that claims the name of another site

- without a signature, or with one by its own key;
- with a signature from an earlier request, run or node;
- with a signature that it obtained by forwarding the request to that site, because the statement
  then has the id of the node through which the site was asked.

Does not cover:

- another server that has the same site as a member and invents node ids; for this reason a site has
  a separate key for each federation;
- a person who can read the site's private key;
- messages after the enrolment, which Flower's node authentication and TLS protect.
"""

import json
from secrets import token_hex

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.hashes import SHA384

from espalier.messages.message import Fields

LABEL = b"espalier: a site says its name (1)\n"
"""Label of the statement, with the version of its form."""
NONCE_BYTES = 32
"""Size of a nonce in bytes."""
SIGNED = ec.ECDSA(SHA384())
"""Signature scheme: ECDSA with SHA-384."""


def new_nonce() -> str:
    """Return a new random nonce, hexadecimal."""
    return token_hex(NONCE_BYTES)


def statement(fields: Fields, nonce: str, lineage: str, node_id: int) -> bytes:
    """Return the bytes that are signed.

    Parameters
    ----------
    fields : statement of the node about itself, with its name and without a signature
    node_id : id of the node, as either side knows it from Flower
    """
    document = {"fields": fields.model_dump(), "nonce": nonce, "lineage": lineage, "node": node_id}
    return LABEL + json.dumps(document, sort_keys=True, allow_nan=False).encode()


def sign(key: ec.EllipticCurvePrivateKey, text: bytes) -> str:
    """Sign a statement.

    Returns
    -------
    str
        r and s, hexadecimal. All signatures by keys of one curve have the same length.
    """
    # DER signatures vary in length; a fixed size keeps equal runs equal in bytes.
    size = _size(key.curve)
    return b"".join(
        number.to_bytes(size) for number in decode_dss_signature(key.sign(text, SIGNED))
    ).hex()


def is_signed(key: ec.EllipticCurvePublicKey, text: bytes, signature: str) -> bool:
    """Return True if the hexadecimal ``signature``, of any length, fits ``text`` and ``key``."""
    size = _size(key.curve)
    if len(signature) != 4 * size:
        return False
    numbers = bytes.fromhex(signature)
    try:
        key.verify(
            encode_dss_signature(int.from_bytes(numbers[:size]), int.from_bytes(numbers[size:])),
            text,
            SIGNED,
        )
    except InvalidSignature:
        return False
    return True


def _size(curve: ec.EllipticCurve) -> int:
    """Return the size of r, and of s, in bytes."""
    return (curve.key_size + 7) // 8

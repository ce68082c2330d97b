"""A site's name, said with its key: what a node signs when it enrols, and how the server checks it.

Signed is a statement that begins with a label which nothing else has that is signed by such a key (Flower's SuperNode
authentication signs a time), and holds what the node says of itself, the number that the server drew for this one request, the
run, and Flower's id of the node.
Covers: a node that says another site's name, with no signature, with one of its own key, with one of an earlier request, run or
node, or with one that it had the site make: that names the node over which the site was asked.
Does not cover: another server of which the same site is a member, and which makes up ids of nodes: a site has a key for each
federation. Nor whoever can read the site's private key, nor what a node sends after it has enrolled, which Flower's node
authentication and TLS protect.
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

from espalier.wire.messages import Scalars

LABEL = b"espalier: a site says its name (1)\n"
NONCE_BYTES = 32
SIGNED = ec.ECDSA(SHA384())


def new_nonce() -> str:
    """A number that was never drawn before, hexadecimal."""
    return token_hex(NONCE_BYTES)


def statement(told: Scalars, nonce: str, lineage: str, node_id: int) -> bytes:
    """What is signed.

    Parameters
    ----------
    told : what the node says of itself, its name among it, without a signature
    nonce : that of the request
    lineage : names the run
    node_id : Flower's id of the node, as either side knows it from Flower
    """
    document = {"told": told.model_dump(), "nonce": nonce, "lineage": lineage, "node": node_id}
    return LABEL + json.dumps(document, sort_keys=True, allow_nan=False).encode()


def sign(key: ec.EllipticCurvePrivateKey, text: bytes) -> str:
    """Sign a statement: r and s, hexadecimal, of one length for all signatures by keys of a curve."""
    size = _size(key.curve)
    return b"".join(
        number.to_bytes(size) for number in decode_dss_signature(key.sign(text, SIGNED))
    ).hex()


def is_signed(key: ec.EllipticCurvePublicKey, text: bytes, signature: str) -> bool:
    """Whether a signature, hexadecimal digits of any number, is one of this statement by this key."""
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
    """Bytes of r, and of s."""
    return (curve.key_size + 7) // 8

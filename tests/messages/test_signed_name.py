"""The statement that a site signs with its key, and the valid signatures of it."""

import json

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from hypothesis import given
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.messages.enrolment import Challenge, Enrolment, SignedEnrolment, contract
from espalier.messages.message import validate
from espalier.messages.signed_name import is_signed, new_nonce, sign, statement
from tests.run_names import BY_HAND, named

TOLD = Enrolment(
    site="a",
    code_sha256="c" * 64,
    model_sha256="d" * 64,
    device="cpu",
    threads=1,
    capability=1.0,
    measured=False,
    approval=False,
    python="3.11.7",
    torch="2.7.0",
)
NONCE = "ab" * 32
KEYS = [
    ec.derive_private_key(number, curve())
    for number in (5, 6)
    for curve in (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
]
LENGTHS = [128, 192, 264] * 2


def test_statement_is_labelled_json() -> None:
    label, _, rest = statement(TOLD, NONCE, BY_HAND, 2**64 - 1).partition(b"\n")
    assert label == b"espalier: a site says its name (1)"
    assert json.loads(rest) == {
        "nonce": NONCE,
        "lineage": BY_HAND,
        "node": 2**64 - 1,
        "fields": {
            "site": "a", "code_sha256": "c" * 64, "model_sha256": "d" * 64, "device": "cpu",
            "threads": 1, "capability": 1.0, "measured": False, "approval": False,
            "python": "3.11.7", "torch": "2.7.0",
        },
    }  # fmt: skip


@pytest.mark.parametrize(("key", "length"), list(zip(KEYS, LENGTHS, strict=True)))
def test_a_signature_is_ecdsa_of_one_length(key: ec.EllipticCurvePrivateKey, length: int) -> None:
    """Signatures differ each time; ``cryptography`` verifies them without our own function."""
    text = statement(TOLD, NONCE, BY_HAND, 7)
    signatures = {sign(key, text) for _ in range(20)}
    assert len(signatures) == 20
    for signature in signatures:
        assert len(signature) == length
        r, s = (int(half, 16) for half in (signature[: length // 2], signature[length // 2 :]))
        key.public_key().verify(encode_dss_signature(r, s), text, ec.ECDSA(SHA384()))
        assert is_signed(key.public_key(), text, signature)
        assert [other for other in KEYS if is_signed(other.public_key(), text, signature)] == [key]
        with pytest.raises(InvalidSignature):
            key.public_key().verify(encode_dss_signature(r, s), text + b" ", ec.ECDSA(SHA384()))


@pytest.mark.parametrize(
    "other",
    [
        statement(TOLD, "ac" + NONCE[2:], BY_HAND, 7),
        statement(TOLD, NONCE, named("2"), 7),
        statement(TOLD, NONCE, BY_HAND, 8),
        *(
            statement(TOLD.model_copy(update=change), NONCE, BY_HAND, 7)
            for change in (
                {"site": "b"},
                {"code_sha256": "e" * 64},
                {"model_sha256": "e" * 64},
                {"capability": 2.0},
            )
        ),
    ],
)
def test_signature_is_of_one_request_and_node(other: bytes) -> None:
    assert not is_signed(
        KEYS[1].public_key(), other, sign(KEYS[1], statement(TOLD, NONCE, BY_HAND, 7))
    )


@given(st.binary(max_size=140))
def test_other_bytes_are_no_signature(data: bytes) -> None:
    for key in KEYS:
        assert not is_signed(key.public_key(), b"text", data.hex())


@given(st.integers(0, 2**384 - 1), st.integers(0, 2**384 - 1))
def test_other_numbers_are_no_signature(r: int, s: int) -> None:
    for first, second in ((r, s), (0, s), (r, 0), (0, 0)):
        assert not is_signed(KEYS[1].public_key(), b"text", f"{first:096x}{second:096x}")


def test_nonces_are_of_32_bytes_and_differ() -> None:
    nonces = {new_nonce() for _ in range(100)}
    assert len(nonces) == 100
    assert {validate(Challenge, {"nonce": nonce}).nonce for nonce in nonces} == nonces


@pytest.mark.parametrize(
    "nonce", ["", "ab" * 31, "ab" * 33, "AB" * 32, "zz" * 32, "ab" * 32 + "\n", 5, b"ab" * 32]
)
def test_nothing_else_is_a_nonce(nonce: object) -> None:
    with pytest.raises(EspalierError, match="Challenge: missing, surplus or out of range: nonce"):
        validate(Challenge, {"nonce": nonce})


@pytest.mark.parametrize("signature", ["a", "abc", "AB", "0x", "ab\n", "ab" * 133, 5])
def test_nothing_else_is_taken_for_a_signature(signature: object) -> None:
    with pytest.raises(EspalierError, match="signature"):
        validate(SignedEnrolment, TOLD.model_dump() | {"signature": signature})


def test_claimed_names_have_no_nonce_or_signature() -> None:
    plain = contract("fedprllm", signed=False)
    for side, fields in (
        (plain.down, {"nonce": NONCE}),
        (plain.up, TOLD.model_dump() | {"signature": "ab"}),
    ):
        with pytest.raises(EspalierError, match=r"nonce|signature"):
            validate(side.fields, fields)

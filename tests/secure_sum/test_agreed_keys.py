"""Keys of a secure sum: both sides agree, and nothing else does."""

import pytest

from espalier.secure_sum.keys import (
    SEALED_BYTES,
    Route,
    Session,
    UnreadableError,
    is_usable,
    mask_key,
    new_seed,
    opened_shares,
    own_mask_key,
    private_key,
    public_bytes,
    sealed_shares,
)

LIST = "0" * 64
"""Hash of the list of keys."""
SESSION = Session("20260101-000000-1", 3, "0f" * 16)
LATER = Session("20260101-000000-1", 3, "1f" * 16)
A = private_key(b"a" * 16, SESSION, "mask")
B = private_key(b"b" * 16, SESSION, "mask")
C = private_key(b"c" * 16, SESSION, "mask")


def test_two_clients_agree_on_one_mask_key() -> None:
    one = mask_key(A, public_bytes(B), SESSION, 4, 7)
    assert one == mask_key(B, public_bytes(A), SESSION, 7, 4)
    others = {
        mask_key(A, public_bytes(B), LATER, 4, 7),
        mask_key(A, public_bytes(B), SESSION, 4, 8),
        mask_key(A, public_bytes(C), SESSION, 4, 7),
        own_mask_key(b"a" * 16, SESSION, 4),
        own_mask_key(b"a" * 16, SESSION, 5),
        own_mask_key(b"a" * 16, LATER, 4),
    }
    assert len(others | {one}) == 7
    assert len(one) == 32


def test_private_keys_depend_on_seed_session_and_purpose() -> None:
    keys = {
        public_bytes(private_key(seed, session, purpose))
        for seed in (b"a" * 16, b"b" * 16)
        for session in (SESSION, LATER)
        for purpose in ("mask", "share")
    }
    assert len(keys) == 8
    assert len({new_seed() for _ in range(10)}) == 10


def test_shares_are_read_by_their_receiver_only() -> None:
    text = sealed_shares(A, public_bytes(B), SESSION, Route(4, 7, LIST), b"s" * 32)
    assert len(text) == 2 * SEALED_BYTES
    assert opened_shares(B, public_bytes(A), SESSION, Route(4, 7, LIST), text) == b"s" * 32
    for wrong in (
        lambda: opened_shares(C, public_bytes(A), SESSION, Route(4, 7, LIST), text),
        lambda: opened_shares(B, public_bytes(C), SESSION, Route(4, 7, LIST), text),
        lambda: opened_shares(B, public_bytes(A), LATER, Route(4, 7, LIST), text),
        lambda: opened_shares(B, public_bytes(A), SESSION, Route(7, 4, LIST), text),
        lambda: opened_shares(B, public_bytes(A), SESSION, Route(4, 7, "1" * 64), text),
        lambda: opened_shares(B, public_bytes(A), SESSION, Route(4, 7, LIST), "0" * len(text)),
    ):
        with pytest.raises(UnreadableError):
            wrong()


def test_points_of_small_order_are_not_usable() -> None:
    assert is_usable(public_bytes(A))
    assert not is_usable("0" * 64)
    assert not is_usable("01" + "0" * 62)

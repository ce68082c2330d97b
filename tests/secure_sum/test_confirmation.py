"""Confirmations of the list of a sum: each holds for one list, sender, receiver and session."""

import itertools
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from espalier.secure_sum.confirmation import LIST_TAG_BYTES, ListOfSum
from espalier.secure_sum.keys import Route, Session, public_bytes

ONE = X25519PrivateKey.generate()
TWO = X25519PrivateKey.generate()
SESSION = Session("20260101-000000-0123456789ab", 1, "0" * 32)
ROUTE = Route(4, 7, "a" * 64)
LIST = ListOfSum([1, 4, 7, 9], [1, 4, 7])


def confirmed(told: ListOfSum, session: Session, route: Route, tag: str) -> bool:
    return told.is_confirmed(TWO, public_bytes(ONE), session, route, tag)


def test_a_tag_holds_for_one_list_of_one_pair_in_one_session() -> None:
    tag = LIST.tag(ONE, public_bytes(TWO), SESSION, ROUTE)
    assert len(bytes.fromhex(tag)) == LIST_TAG_BYTES
    assert confirmed(LIST, SESSION, ROUTE, tag)
    assert not confirmed(replace(LIST, included=[1, 4, 9]), SESSION, ROUTE, tag)
    assert not confirmed(replace(LIST, members=[1, 4, 7]), SESSION, ROUTE, tag)
    assert not confirmed(LIST, replace(SESSION, number="1" * 32), ROUTE, tag)
    assert not confirmed(LIST, replace(SESSION, server_round=2), ROUTE, tag)
    assert not confirmed(LIST, SESSION, replace(ROUTE, list_sha256="b" * 64), tag)
    assert not confirmed(LIST, SESSION, Route(7, 4, "a" * 64), tag)
    assert not LIST.is_confirmed(ONE, public_bytes(ONE), SESSION, ROUTE, tag)


@pytest.mark.parametrize("clients", range(3, 13))
def test_no_two_lists_have_enough_confirmations(clients: int) -> None:
    """Honest clients confirm one list each, clients of the server all: every split is tried."""
    for threshold in range(2 * clients // 3 + 1, clients + 1):
        for colluding in range(2 * threshold - clients):
            honest = clients - colluding
            splits = ((one, honest - one) for one in range(honest + 1))
            both = [min(one, two) + colluding >= threshold for one, two in splits]
            assert not any(both)
        # One more than the bound suffices for two lists.
        colluding = 2 * threshold - clients
        halves = itertools.product(range(clients - colluding + 1), repeat=2)
        assert any(
            one + two == clients - colluding and min(one, two) + colluding >= threshold
            for one, two in halves
        )

"""A server that gives clients different lists of keys: nobody can read the shares of the others."""

from typing import Any

import pytest

from client_app.protocol.sum_party import Party
from espalier.messages.message import Header, request_header
from espalier.messages.sums.secure_sum import MaskOrder, ShareOrder
from espalier.secure_sum.keys import Session, new_seed, private_key, public_bytes
from espalier.secure_sum.neighbours import two_thirds

RUN = "20260101-000000-0123456789ab"
NUMBER = "ab" * 16
SECRETS = {
    client: {name: new_seed().hex() for name in ("own", "mask", "share")} for client in range(8)
}


def header(client: int) -> Header:
    return request_header("pooled-pruning", "shares", 1, client, 0, RUN)


def public(client: int, name: str) -> str:
    seed = bytes.fromhex(SECRETS[client][name])
    return public_bytes(private_key(seed, Session(RUN, 1, NUMBER), name))


def order(clients: list[int], threshold: int) -> ShareOrder:
    return ShareOrder(
        session=NUMBER,
        threshold=threshold,
        clients=clients,
        sites=[f"site-{client}" for client in clients],
        mask_keys=[public(client, "mask") for client in clients],
        share_keys=[public(client, "share") for client in clients],
        signatures=[""] * len(clients),
    )


def party(client: int, asked: ShareOrder, inputs: str = "") -> Party:
    kept: dict[str, Any] = {"session": NUMBER, "order": asked.model_dump(), "inputs": inputs}
    return Party(header(client), kept | {"secrets": SECRETS[client]})


def readable(sender: Party, receiver: Party) -> bool:
    """Return whether a client can read the shares of another one."""
    told, _ = sender.split_secrets()
    holders = sorted([*sender.neighbours, sender.client])
    place = holders.index(receiver.client)
    handed_on = MaskOrder(
        session=NUMBER,
        members=sorted([sender.client, receiver.client]),
        sources=[sender.client],
        shares=[told.shares[sender.neighbours.index(receiver.client)]],
        seed_sha256=[told.seed_sha256[place]],
        key_sha256=[told.key_sha256[place]],
    )
    received, unreadable = receiver.received_shares(handed_on)
    assert bool(received) != bool(unreadable)
    return bool(received)


def test_the_same_list_is_read() -> None:
    everybody = order(list(range(8)), 6)
    assert readable(party(0, everybody), party(1, everybody))


@pytest.mark.parametrize(
    "other",
    [([0, 1, 2], 3), (list(range(8)), 7), (list(range(7)), two_thirds(7))],
    ids=["few clients", "another threshold", "one client less"],
)
def test_another_list_or_threshold_is_not_read(other: tuple[list[int], int]) -> None:
    """With shares of both lists the server could rebuild both secrets of the first client."""
    everybody = party(1, order(list(range(8)), 6))
    first = party(0, order(*other))
    assert not readable(first, everybody)
    assert not readable(everybody, first)


def test_shares_of_a_client_with_another_order_are_not_read() -> None:
    """With settings or adapters that it chose, the server would know the others' summands."""
    everybody = order(list(range(8)), 6)
    first = party(0, everybody, "a")
    assert readable(first, party(1, everybody, "a"))
    assert not readable(first, party(1, everybody, "b"))
    assert not readable(party(1, everybody, "b"), first)

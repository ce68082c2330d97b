"""Secure sums with clients that break the protocol."""

from typing import Any

import pytest
from flwr.app import Message

from espalier.messages.message import MessageBody
from espalier.messages.records import address, read, write
from strategies.base.rounds import RunFailed
from tests.bench import Bench, model_files, private_text, summary
from tests.federation.secure_sum.pooled_sums import Change
from tests.in_process import InProcessGrid


def changed(kind: str, change: Change, grid: InProcessGrid, client: int) -> None:
    """Change the fields of a client's replies of a kind."""

    def tamper(request: Message, reply: Message) -> Message:
        body = read(reply.content)
        if body.header.kind != kind or body.header.status == "failed":
            return reply
        change(body.fields)
        return Message(write(body), reply_to=request)

    grid.tamper[client] = tamper


def garbled_shares(fields: dict[str, Any]) -> None:
    fields["shares"] = ["00" * (len(text) // 2) for text in fields["shares"]]


def wrong_hashes(fields: dict[str, Any]) -> None:
    fields["key_sha256"] = fields["key_sha256"][::-1]


def zero_key(fields: dict[str, Any]) -> None:
    fields["share_key"] = "0" * 64


def equal_keys(fields: dict[str, Any]) -> None:
    fields["share_key"] = fields["mask_key"]


def wrong_share(fields: dict[str, Any]) -> None:
    fields["seeds"][1] = "ab" * 16


def wrong_tags(fields: dict[str, Any]) -> None:
    fields["tags"] = ["ab" * 32] * len(fields["tags"])


def wrong_own_seed(fields: dict[str, Any]) -> None:
    fields["own_seed"] = "ab" * 16


def wrong_seed(fields: dict[str, Any]) -> None:
    fields["own_sha256"] = "0" * 64


@pytest.mark.parametrize(
    ("kind", "change", "reason", "counts"),
    [
        ("shares", garbled_shares, "shares: 3 clients could not read the shares", False),
        ("shares", wrong_hashes, "shares: 3 clients could not read the shares", False),
        ("train", zero_key, "train: its public keys are not usable", False),
        ("train", equal_keys, "train: its two public keys are equal", False),
        ("unmask", wrong_share, "unmask: a share is not the one that its owner made", True),
        ("unmask", wrong_own_seed, "unmask: the seed of its mask is not the one that it", True),
    ],
)
def test_a_lying_client_costs_itself(
    bench: Bench,
    plain: dict[bool, dict[str, bytes]],
    kind: str,
    change: Change,
    reason: str,
    counts: bool,
) -> None:
    grid = bench.grid()
    changed(kind, change, grid, 2)
    folder = bench.run(grid)
    client = summary(folder)["clients"][2]
    assert (client["status"], client["reason"].startswith(reason)) == ("dropped", True)
    assert model_files(folder) == plain[counts]


def test_clients_that_share_a_key_cost_themselves(bench: Bench) -> None:
    bench.num_clients = 6
    for client in (4, 5):
        (bench.folder / f"text-{client}.txt").write_text(private_text(client))
    grid = bench.grid(quorum=0.5)
    shared = list[str]()

    def tamper(request: Message, reply: Message) -> Message:
        body = read(reply.content)
        if body.header.kind == "train":
            shared.append(body.fields["mask_key"])
            body.fields["mask_key"] = shared[0]
        return Message(write(body), reply_to=request)

    for client in (2, 5):
        grid.tamper[client] = tamper
    clients = summary(bench.run(grid, quorum=0.5))["clients"]
    assert [client["status"] for client in clients] == [
        *["completed"] * 2, "dropped", *["completed"] * 2, "dropped",
    ]  # fmt: skip
    assert "another client has one of its public keys" in clients[5]["reason"]


def test_wrong_confirmations_of_one_client_cost_nothing(
    bench: Bench, plain: dict[bool, dict[str, bytes]]
) -> None:
    """Three of four tags are right, which is the threshold."""
    grid = bench.grid()
    changed("confirm", wrong_tags, grid, 2)
    folder = bench.run(grid)
    assert [client["status"] for client in summary(folder)["clients"]] == ["completed"] * 4
    assert model_files(folder) == plain[True]


class _EndError(Exception):
    """End of a run after an attack."""


def test_a_server_cannot_tell_two_lists(bench: Bench) -> None:
    """It tells client 0 that it is in the sum, and the others that it dropped out.

    With the seed from client 0, and shares of its mask key from the others, the server would know
    all masks of client 0. But nobody confirms the list of client 0.
    """
    grid = bench.grid()

    def attack(message: Message) -> None:
        body = read(message.content)
        if body.header.kind != "confirm":
            return
        nodes = list(grid.contexts)

        def told(client: int, kind: str, **fields: Any) -> MessageBody:
            header = body.header.model_copy(update={"kind": kind, "client": client})
            request = MessageBody(header, {"session": body.fields["session"], **fields})
            to = address(request, nodes[client], 60.0)
            return read(grid.answer(to, grid.contexts[nodes[client]]).content)

        others = [1, 2, 3]
        tags = {one: told(one, "confirm", included=others).fields["tags"] for one in others}
        assert len(told(0, "confirm", included=[0, *others]).fields["tags"]) == 3
        mine = {"included": [0, *others], "seeds_of": [0, *others], "keys_of": []}
        stolen = [tags[one][0] for one in others]
        answer = told(0, "unmask", **mine, confirmed=others, tags=stolen)
        assert "1 clients confirmed the list of the sum; 3 are needed" in str(answer.fields)
        again = told(1, "confirm", included=[0, *others])
        assert "answered another request of this session" in str(again.fields)
        # The sum of the others may be unmasked, and has nothing of client 0.
        own = [tags[2][0], tags[3][0]]
        theirs = {"included": others, "seeds_of": others, "keys_of": [0]}
        good = told(1, "unmask", **theirs, confirmed=[2, 3], tags=own)
        assert (len(good.fields["seeds"]), len(good.fields["keys"])) == (3, 1)
        raise _EndError

    grid.before_push = attack
    with pytest.raises(_EndError):
        bench.run(grid)


def test_wrong_polynomial_ends_the_run_without_a_sum(bench: Bench) -> None:
    grid = bench.grid()
    changed("shares", wrong_seed, grid, 2)
    with pytest.raises(
        RunFailed, match="the shares that node-00002 made do not fit its keys; the sum stays masked"
    ):
        bench.run(grid)

"""Contracts of tuning: parts, and what a server sends to a client."""

from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.messages.contract import check, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.message import MessageBody
from espalier.methods.tuning.adapters.tensors import parts, trained
from espalier.storage.blobs import sha256
from tests.messages.contracts.tuning_messages import (
    KEYS,
    ONE,
    PLAN,
    SECRET,
    SHA,
    blobs_of,
    header_of,
    hold,
    order,
    reply_to,
    settings_of,
)


def fetch_of(blobs: dict[str, bytes], server_round: int = 1, part: int = 1) -> MessageBody:
    """Return the request for the part that has these blobs."""
    hashes = [sha256(blobs[key]) for key in sorted(blobs)]
    return MessageBody(
        header_of("fetch", server_round, part), {"rank_limit": 4, "rank": 4, "blob_sha256": hashes}
    )


# ----- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire_dtype", "part_bytes", "expected"),
    [
        ("float32", 1 << 20, [KEYS]),
        ("float32", 768 * 2, [KEYS[:2], KEYS[2:]]),
        ("float32", 768 * 3, [KEYS[:3], KEYS[3:]]),
        ("float32", 767, [[key] for key in KEYS]),
        ("bfloat16", 768, [KEYS[:2], KEYS[2:]]),
        ("nf4", 2 * 116, [KEYS[:2], KEYS[2:]]),
        ("nf4", 2 * 116 - 1, [[key] for key in KEYS]),
    ],
)
def test_parts_are_of_whole_blocks(
    wire_dtype: str, part_bytes: int, expected: list[list[str]]
) -> None:
    """A block has three tensors of 32 elements and one of 96, here in NF4.

    They take 16 + 4 and 48 + 8 bytes.
    """
    settings = settings_of(wire_dtype, part_bytes)
    assert parts(trained(PLAN, settings, 4), settings) == expected


def test_a_limit_makes_smaller_blobs() -> None:
    """At rank 1 a block has 192 bytes, so a part holds four blocks in place of one."""
    settings = settings_of(part_bytes=768)
    assert parts(trained(PLAN, settings, 1), settings) == [KEYS]
    assert len(parts(trained(PLAN, settings, 4), settings)) == 4


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "nf4"])
def test_a_reply_goes_out_part_by_part(wire_dtype: str) -> None:
    settings = settings_of(
        wire_dtype, 2 * {"float32": 768, "bfloat16": 384, "nf4": 116}[wire_dtype]
    )
    request = order(settings)
    hold(reply_to(request, settings, blobs_of(KEYS[:2], settings)), request, settings)
    fetch = fetch_of(blobs_of(KEYS[2:], settings))
    hold(reply_to(fetch, settings, blobs_of(KEYS[2:], settings)), fetch, settings)
    for wrong, words in (
        (KEYS[:2], "2 surplus and 2 missing of 2"),
        (KEYS[1:], "1 surplus and 0 missing of 2"),
        (KEYS[2:3], "0 surplus and 1 missing of 2"),
    ):
        with pytest.raises(EspalierError, match=words):
            hold(reply_to(fetch, settings, blobs_of(wrong, settings)), fetch, settings)


def test_parts_that_do_not_exist() -> None:
    settings = settings_of(part_bytes=768)
    for kind, part in (("fetch", 4), ("fetch", 0), ("train", 1)):
        fields = {"rank_limit": 4, **({"blob_sha256": [SHA], "rank": 4} if kind == "fetch" else {})}
        with pytest.raises(
            EspalierError, match=f"part {part} of a {kind} does not exist, a reply has 4"
        ):
            contract_for(MessageBody(header_of(kind, part=part), fields), lambda: PLAN, settings)
    with pytest.raises(EspalierError, match="part 4 of a push does not exist, there are 4"):
        contract_for(
            MessageBody(header_of("push", 2, part=4), {"rank_limit": 4}), lambda: PLAN, settings
        )


# ----- from the server to the client --------------------------------------------------------------


def test_only_later_rounds_bring_a_last_part() -> None:
    settings = settings_of(part_bytes=768 * 3)

    def brings(server_round: int) -> set[str]:
        return set(contract_for(order(settings, server_round), lambda: PLAN, settings).down.blobs)

    assert [brings(1), brings(2), brings(3)] == [set(), {KEYS[3]}, {KEYS[3]}]
    check(
        order(settings, 2, blobs_of(KEYS[3:], settings)),
        contract_for(order(settings, 2), lambda: PLAN, settings).down,
    )
    fetch = MessageBody(
        header_of("fetch", 2, part=1), {"rank_limit": 4, "rank": 4, "blob_sha256": [SHA]}
    )
    assert not contract_for(fetch, lambda: PLAN, settings).down.blobs
    with pytest.raises(EspalierError, match="4 surplus and 0 missing of 0"):
        check(
            order(settings, 1, blobs_of(KEYS, settings)),
            contract_for(order(settings), lambda: PLAN, settings).down,
        )


@pytest.mark.parametrize(("part", "keys"), [(0, KEYS[:3]), (1, KEYS[3:])])
def test_every_part_can_be_pushed(part: int, keys: list[str]) -> None:
    """Before training, all parts but the last are pushed; of the result, all of them."""
    settings = settings_of(part_bytes=768 * 3)
    request = MessageBody(
        header_of("push", 2, part=part), {"rank_limit": 4}, blobs_of(keys, settings)
    )
    contract = contract_for(request, lambda: PLAN, settings)
    check(request, contract.down)
    check_reply(MessageBody(request.header), request, contract)
    with pytest.raises(EspalierError, match="surplus"):
        check_reply(MessageBody(request.header, {}, blobs_of(keys, settings)), request, contract)
    with pytest.raises(EspalierError, match="NoFields: missing, surplus or out of range: note"):
        check_reply(MessageBody(request.header, {"note": SECRET}), request, contract)


def test_a_limit_is_for_both_directions() -> None:
    """A client of rank 2 gets and sends rank 2; ranks 4 and 1 are refused."""
    request = order(ONE, 2, blobs_of(KEYS, ONE, 2), rank_limit=2)
    hold(reply_to(request, ONE, blobs_of(KEYS, ONE, 2), rank=2), request, ONE)
    for rank in (4, 1):
        words = rf"block-0000 attn.q.lora_a: is F32 \[{rank}, 8\], must be F32 \[2, 8\]"
        with pytest.raises(EspalierError, match=words):
            hold(reply_to(request, ONE, blobs_of(KEYS, ONE, rank)), request, ONE)
        with pytest.raises(EspalierError, match=words):
            check(
                order(ONE, 2, blobs_of(KEYS, ONE, rank), rank_limit=2),
                contract_for(request, lambda: PLAN, ONE).down,
            )


@pytest.mark.parametrize("limit", [0, -1, 2.0, "2", True, None])
def test_a_limit_that_is_none(limit: Any) -> None:
    for kind in ("train", "push"):
        with pytest.raises(
            EspalierError, match="Order: missing, surplus or out of range: rank_limit"
        ):
            contract_for(MessageBody(header_of(kind, 2), {"rank_limit": limit}), lambda: PLAN, ONE)


@pytest.mark.parametrize(
    ("kind", "rounds"), [("train", (1, 3)), ("fetch", (1, 3)), ("push", (2, 4))]
)
def test_rounds_that_the_run_does_not_have(kind: str, rounds: tuple[int, int]) -> None:
    """The run has three rounds; a push for round 4 is the result."""
    settings = settings_of(part_bytes=768, own_text=True)
    fields = {"rank_limit": 4, **({"blob_sha256": [SHA], "rank": 4} if kind == "fetch" else {})}

    def of_round(server_round: int) -> None:
        contract_for(
            MessageBody(header_of(kind, server_round, part=int(kind == "fetch")), fields),
            lambda: PLAN,
            settings,
        )

    for server_round in rounds:
        of_round(server_round)
    for server_round in (0, rounds[0] - 1, rounds[1] + 1, 10**9):
        with pytest.raises(
            EspalierError,
            match=f"a {kind} of round {server_round} does not exist, the run ends with round 3",
        ):
            of_round(server_round)


def test_unevaluated_result_is_not_pushed() -> None:
    with pytest.raises(EspalierError, match=r"a result is pushed, but evaluation\.own-text is off"):
        contract_for(
            MessageBody(header_of("push", 4), {"rank_limit": 4}),
            lambda: PLAN,
            settings_of(part_bytes=768),
        )


@pytest.mark.parametrize("kind", ["train", "push"])
def test_a_rank_that_no_adapter_has(kind: str) -> None:
    with pytest.raises(EspalierError, match=r"rank_limit is above 4, the largest rank of \[lora\]"):
        contract_for(MessageBody(header_of(kind, 2), {"rank_limit": 5}), lambda: PLAN, ONE)

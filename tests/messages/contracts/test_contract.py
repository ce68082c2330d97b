"""Contracts: a valid message passes; each possible fault is refused without quoting the content."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from espalier.errors import EspalierError
from espalier.messages.contract import HEADER_ROOM, Contract, byte_limit, check, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.message import UNREAD, MessageBody, failure
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.settings.run import parse
from espalier.storage.blobs import sha256
from tests.messages.contracts.fedprllm_messages import (
    PLAN,
    REQUEST,
    SECRET,
    SETTINGS,
    SHA,
    blob,
    header,
    refused,
    words,
)
from tests.run_names import named

# Half of each row is pruned: 4 x 3 = 12 of 24 weights and 3 x 15 = 45 of 90.
Q_MASK = sum(0b000111 << 6 * row for row in range(4))
UP_MASK = sum((2**15 - 1) << 30 * row for row in range(3))


def good_masks() -> dict[str, NDArray]:
    return {"attn.q.prune_mask": words(Q_MASK, 1), "mlp.up.prune_mask": words(UP_MASK, 2)}


def good_reply(
    fields: Mapping[str, Any] | None = None, masks: Mapping[str, NDArray] | None = None
) -> MessageBody:
    """Return a valid vote, with changed fields or with other tensors of block 0."""
    report = {"seconds": 1.5}
    tensors = good_masks() if masks is None else dict(masks)
    blobs = {"block-0000": blob(tensors), "block-0001": blob(good_masks())}
    hashes = {"blob_sha256": [sha256(blobs[key]) for key in sorted(blobs)]}
    return MessageBody(header(), report | hashes | dict(fields or {}), blobs)


def contract() -> Contract:
    return contract_for(REQUEST, lambda: PLAN, SETTINGS)


# ----- a valid reply ------------------------------------------------------------------------------


def test_a_good_reply_passes() -> None:
    fields = check_reply(good_reply(), REQUEST, contract())
    assert fields.model_dump()["seconds"] == 1.5


def test_tensor_order_in_blob_does_not_matter() -> None:
    masks = good_masks()
    check_reply(good_reply(masks=dict(reversed(masks.items()))), REQUEST, contract())


def test_good_request_has_no_scalars() -> None:
    check(REQUEST, contract().down)
    with pytest.raises(EspalierError):
        check(MessageBody(header(), {"note": SECRET}), contract().down)
    with pytest.raises(EspalierError):
        check(MessageBody(header(), {}, {"block-0000": blob(good_masks())}), contract().down)


def test_a_contract_says_what_an_observer_learns() -> None:
    assert "One bit per weight" in contract().observer


# ----- tensors ------------------------------------------------------------------------------------


def without(masks: dict[str, NDArray], name: str) -> dict[str, NDArray]:
    return {key: value for key, value in masks.items() if key != name}


WRONG_TENSORS: dict[str, tuple[Callable[[], dict[str, NDArray]], str]] = {
    "a missing tensor": (lambda: without(good_masks(), "attn.q.prune_mask"), "holds 1 tensor,"),
    "a surplus tensor": (lambda: good_masks() | {SECRET: np.zeros(1, np.uint8)}, "holds 3 tensors"),
    "another name": (
        lambda: without(good_masks(), "attn.q.prune_mask") | {SECRET: words(Q_MASK, 1)},
        "holds 2 tensors",
    ),
    "a signed dtype": (
        lambda: good_masks() | {"attn.q.prune_mask": words(Q_MASK, 1).astype(np.int64)},
        "is I64 .1., must be U64",
    ),
    "a float dtype": (
        lambda: good_masks() | {"attn.q.prune_mask": np.zeros(2, np.float32)},
        "is F32 .2., must be U64 .1.",
    ),
    "too many words": (
        lambda: good_masks() | {"attn.q.prune_mask": words(Q_MASK, 2)},
        "is U64 .2., must be U64 .1.",
    ),
    "too few words": (
        lambda: good_masks() | {"mlp.up.prune_mask": words(UP_MASK, 1)},
        "is U64 .1., must be U64 .2.",
    ),
    "another rank": (
        lambda: good_masks() | {"attn.q.prune_mask": words(Q_MASK, 1).reshape(1, 1)},
        "must be U64 .1.",
    ),
    "a weight too many": (
        lambda: good_masks() | {"attn.q.prune_mask": words(Q_MASK | 8, 1)},
        "prunes 13 weights, .* ask for 12",
    ),
    "a weight too few": (
        lambda: good_masks() | {"mlp.up.prune_mask": words(UP_MASK & ~1, 2)},
        "prunes 44 weights, .* for 45",
    ),
    "a padding bit": (
        lambda: good_masks() | {"mlp.up.prune_mask": words(UP_MASK & ~1 | 1 << 90, 2)},
        "beyond the last weight",
    ),
    "the last padding bit": (
        lambda: good_masks() | {"mlp.up.prune_mask": words(UP_MASK | 1 << 127, 2)},
        "beyond the last weight",
    ),
}


@pytest.mark.parametrize(("masks", "told"), WRONG_TENSORS.values(), ids=WRONG_TENSORS.keys())
def test_other_tensors_are_refused(masks: Callable[[], dict[str, NDArray]], told: str) -> None:
    with pytest.raises(EspalierError, match=f"block-0000.*{told}"):
        check_reply(good_reply(masks=masks()), REQUEST, contract())
    refused(good_reply(masks=masks()))


def test_mask_with_wrong_rows_is_refused() -> None:
    """The settings ask for 3 of every row of 6; this mask prunes two whole rows and no others."""
    refused(good_reply(masks=good_masks() | {"attn.q.prune_mask": words(2**12 - 1, 1)}))


# ----- blobs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["block-0002", "notes", SECRET])
def test_a_surplus_blob_is_refused(key: str) -> None:
    reply = good_reply()
    reply.blobs[key] = SECRET.encode()
    assert refused(reply) == "blobs: 1 surplus and 0 missing of 2"


def test_a_missing_blob_is_refused() -> None:
    reply = good_reply()
    del reply.blobs["block-0001"]
    assert refused(reply) == "blobs: 0 surplus and 1 missing of 2"


def test_oversize_blob_is_refused_before_reading() -> None:
    reply = good_reply()
    reply.blobs["block-0000"] = bytes(2 * HEADER_ROOM + 2 * 24 + 1)
    assert "at most" in refused(reply)


def test_limit_is_tensor_bytes_plus_headers() -> None:
    """Each of two blobs has three words of 8 bytes."""
    assert byte_limit(contract().up.blobs) == 2 * (24 + 64 * 1024)


SMUGGLED = {
    "safetensors metadata": blob(good_masks(), __metadata__={"note": SECRET}),
    "trailing bytes": blob(good_masks()) + SECRET.encode(),
    "raw text": SECRET.encode(),
    "nothing": b"",
}


@pytest.mark.parametrize("smuggled", SMUGGLED.values(), ids=SMUGGLED.keys())
def test_blob_with_extra_bytes_is_refused(smuggled: bytes) -> None:
    reply = good_reply()
    reply.blobs["block-0001"] = smuggled
    refused(reply)


def test_text_beside_dtype_and_shape_is_refused() -> None:
    text = blob(good_masks()).replace(b'"U64"', b'"U64","note":"' + SECRET.encode() + b'"', 1)
    (size,) = struct.unpack("<Q", text[:8])
    size += len(SECRET) + len(',"note":""')
    reply = good_reply()
    reply.blobs["block-0001"] = struct.pack("<Q", size) + text[8:]
    refused(reply)


# ----- fields -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"note": SECRET}, "Report: .*note"),
        ({"loss": 1.0}, "Report: .*loss"),
        ({"seconds": SECRET}, "Report: .*seconds"),
        ({"seconds": float("nan")}, "Report: .*seconds"),
        ({"seconds": float("inf")}, "Report: .*seconds"),
        ({"seconds": -0.5}, "Report: .*seconds"),
        ({"calibration_tokens": 2048}, "Report: .*calibration_tokens"),
        ({"calibration_sha256": SHA}, "Report: .*calibration_sha256"),
        ({"blob_sha256": [SHA, SECRET]}, "Report: .*blob_sha256.1"),
        ({"blob_sha256": [SHA]}, "1 hashes for 2 blobs"),
        ({"blob_sha256": [SHA] * 3}, "3 hashes for 2 blobs"),
        (
            {"blob_sha256": [SHA] * 2},
            "block-000[01]: the bytes do not have the SHA-256 that was named for them",
        ),
    ],
)
def test_other_scalars_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(EspalierError, match=told):
        check_reply(good_reply(fields), REQUEST, contract())
    refused(good_reply(fields))


def test_a_missing_scalar_is_refused() -> None:
    reply = good_reply()
    del reply.fields["seconds"]
    assert "seconds" in refused(reply)


# ----- headers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "evaluate"),
        ("method", "other"),
        ("lineage", named("2")),
        ("server_round", 2),
        ("client", 4),
        ("attempt", 2),
        ("part", 1),
        ("num_parts", 2),
    ],
)
def test_a_reply_to_something_else_is_refused(field: str, value: Any) -> None:
    reply = good_reply()
    reply.header = header(**{field: value})
    assert refused(reply) == f"header: {field} not as the request demands"


# ----- failures -----------------------------------------------------------------------------------


def test_failure_carries_its_reason_alone() -> None:
    failure = MessageBody(header(status="failed"), {"reason": "no text"})
    assert check_reply(failure, REQUEST, contract()).model_dump() == {
        "reason": "no text",
        "lost": False,
    }
    refused(replace(failure, fields={"reason": "no text", "lost": SECRET}))
    refused(replace(failure, fields={"reason": "no text", "note": SECRET}))
    refused(replace(failure, fields={}))
    refused(replace(failure, blobs={"block-0000": blob(good_masks())}))


@pytest.mark.parametrize("field", ["client", "server_round", "attempt", "kind", "lineage"])
def test_failure_for_another_request_is_refused(field: str) -> None:
    """A failure that could name another client or round would fail that one."""
    request = MessageBody(header())
    contract = contract_for(request, lambda: PLAN, SETTINGS)
    reply = failure(header(), "too little text")
    check_reply(reply, request, contract)
    check_reply(failure(UNREAD, "not read"), request, contract)
    other = {
        "client": 999,
        "server_round": 7,
        "attempt": 9,
        "kind": "fetch",
        "lineage": named("another"),
    }[field]
    with pytest.raises(EspalierError, match=f"header: {field} not as the request demands"):
        check_reply(
            MessageBody(reply.header.model_copy(update={field: other}), reply.fields),
            request,
            contract,
        )


def test_result_in_failure_s_form_is_refused() -> None:
    refused(MessageBody(header(), {"reason": SECRET}))


# ----- choice of the contract ---------------------------------------------------------------------


def test_a_request_of_another_method_is_refused() -> None:
    with pytest.raises(EspalierError, match=r"'other'.*'fedprllm'"):
        contract_for(MessageBody(header(method="other")), lambda: PLAN, SETTINGS)


def test_large_replies_travel_block_by_block() -> None:
    """Each block has 1200 bytes of masks, so with parts of 2000 bytes each block is a part."""
    wide = ModelPlan(
        tuple(BlockPlan(index, (LinearPlan("mlp.up", "up", (96, 100)),)) for index in range(3)), 0
    )
    settings = parse({"part-bytes": 2000})
    first = contract_for(REQUEST, lambda: wide, settings)
    third = contract_for(MessageBody(header(kind="fetch", part=2)), lambda: wide, settings)
    assert (first.num_parts, list(first.up.blobs)) == (3, ["block-0000"])
    assert (third.num_parts, list(third.up.blobs)) == (3, ["block-0002"])
    for request in (header(kind="fetch", part=3), header(kind="train", part=1)):
        with pytest.raises(EspalierError, match="does not exist"):
            contract_for(MessageBody(request), lambda: wide, settings)


def test_a_fetched_part_carries_no_scalars() -> None:
    settings = parse({"part-bytes": 1024})
    wide = ModelPlan(
        tuple(BlockPlan(index, (LinearPlan("mlp.up", "up", (96, 100)),)) for index in range(2)), 0
    )
    mask = words(sum((2**50 - 1) << 100 * row for row in range(96)), 150)
    part = blob({"mlp.up.prune_mask": mask})
    request = MessageBody(header(kind="fetch", part=1), {"blob_sha256": [sha256(part)]})
    found = contract_for(request, lambda: wide, settings)
    check(request, found.down)
    reply = MessageBody(header(kind="fetch", part=1, num_parts=2), {}, {"block-0001": part})
    check_reply(reply, request, found)
    for hashes, told in (
        ([SHA], "block-0001: the bytes do not have the SHA-256"),
        ([SHA] * 2, "2 hashes for 1 blobs"),
    ):
        other = replace(request, fields={"blob_sha256": hashes})
        with pytest.raises(EspalierError, match=told):
            check_reply(reply, other, contract_for(other, lambda: wide, settings))
    with pytest.raises(EspalierError):
        check_reply(replace(reply, fields={"seconds": 1.0}), request, found)


def test_a_part_is_asked_for_by_hashes_alone() -> None:
    request = MessageBody(header(kind="fetch"), {"blob_sha256": ["../../another-client/report"]})
    with pytest.raises(EspalierError):
        check(request, contract_for(request, lambda: PLAN, SETTINGS).down)

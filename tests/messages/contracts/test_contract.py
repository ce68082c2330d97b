"""Contracts: a valid message passes; each possible fault is refused without quoting the content."""

import json
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
from espalier.messages.message import UNREAD, Header, MessageBody, failure, request_header
from espalier.methods.pruning.fedprllm import decided_parts, decided_specs
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.settings.run import RunSettings, parse
from espalier.storage.blobs import sha256
from tests.run_names import BY_HAND, named

SECRET = "Anna K., born 1961, diagnosis F32.1"
SHA = "0" * 64

PLAN = ModelPlan(
    tuple(
        BlockPlan(index, (LinearPlan("attn.q", "q", (4, 6)), LinearPlan("mlp.up", "up", (3, 30))))
        for index in range(2)
    ),
    500,
)
"""Two blocks, each with a matrix of 24 weights and one of 90.

The mask of 24 weights has one word; that of 90 weights has two, with 38 bits of padding.
"""
SETTINGS = RunSettings()
TEXTS = {
    "evaluation.texts": "wiki=wiki.txt,c4=c4.txt",
    "evaluation.sequence-length": 4,
    "evaluation.max-samples": 2,
}
EVALUATING = parse(TEXTS)
OWN_TEXT = parse({"evaluation.own-text": True})
# Half of each row is pruned: 4 x 3 = 12 of 24 weights and 3 x 15 = 45 of 90.
Q_MASK = sum(0b000111 << 6 * row for row in range(4))
UP_MASK = sum((2**15 - 1) << 30 * row for row in range(3))


def words(value: int, number: int) -> NDArray[np.uint64]:
    return np.array([value >> 64 * index & (2**64 - 1) for index in range(number)], dtype=np.uint64)


def blob(tensors: Mapping[str, NDArray], **extra: Any) -> bytes:
    """Return a safetensors blob made by hand, with the tensors in the given order."""
    header: dict[str, Any] = dict(extra)
    data = b""
    for name, value in tensors.items():
        dtype = {"uint64": "U64", "int64": "I64", "int32": "I32", "uint8": "U8", "float32": "F32"}[
            str(value.dtype)
        ]
        header[name] = {
            "dtype": dtype,
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + value.nbytes],
        }
        data += value.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def good_masks() -> dict[str, NDArray]:
    return {"attn.q.prune_mask": words(Q_MASK, 1), "mlp.up.prune_mask": words(UP_MASK, 2)}


def header(**changes: Any) -> Header:
    usual = request_header("fedprllm", "train", 1, client=3, lineage=BY_HAND)
    return usual.model_copy(update=changes)


REQUEST = MessageBody(header())


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


def refused(reply: MessageBody, request: MessageBody = REQUEST) -> str:
    """Return the text of the refusal, which quotes no private value."""
    with pytest.raises(EspalierError) as caught:
        check_reply(reply, request, contract_for(request, lambda: PLAN, SETTINGS))
    assert "Anna" not in str(caught.value)
    return str(caught.value)


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


# ----- evaluation and enrolment -------------------------------------------------------------------

PUBLIC = {"names": ["wiki", "c4"], "num_samples": [2, 1], "sequence_length": 4, "own_text": False}


def evaluation(samples: Mapping[str, NDArray] | None = None, **fields: Any) -> MessageBody:
    tensors = samples or {"c4": np.zeros((1, 4), np.int32), "wiki": np.zeros((2, 4), np.int32)}
    return MessageBody(header(kind="evaluate"), PUBLIC | fields, {"public-samples": blob(tensors)})


def test_public_windows_pass_as_announced() -> None:
    request = evaluation()
    check(request, contract_for(request, lambda: PLAN, EVALUATING).down)
    with pytest.raises(EspalierError, match="must be I32"):
        check(
            evaluation({"c4": np.zeros((1, 4), np.int32), "wiki": np.zeros((3, 4), np.int32)}),
            _down(request),
        )
    with pytest.raises(EspalierError, match="2 different names, 1 numbers"):
        contract_for(evaluation(num_samples=[2]), lambda: PLAN, EVALUATING)


def _down(request: MessageBody) -> Any:
    return contract_for(request, lambda: PLAN, EVALUATING).down


@pytest.mark.parametrize(
    "changes", [{"num_samples": [2, -1]}, {"num_samples": [2, 0]}, {"names": ["wiki", "wiki"]}]
)
def test_texts_without_windows_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(EspalierError):
        contract_for(evaluation(**changes), lambda: PLAN, EVALUATING)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": ["wiki", "secret"]}, "evaluation.texts names no such text"),
        ({"num_samples": [2, 3]}, "3 samples of a text, evaluation.max-samples = 2"),
        ({"sequence_length": 3}, "samples of 3 tokens, evaluation.sequence-length = 4"),
        ({"test_items": 1, "test_metrics": ["loss"]}, "1 test items, 0 are allowed"),
        ({"test_metrics": ["loss"]}, "test_metrics"),
    ],
)
def test_evaluation_stays_within_settings(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EspalierError, match=words):
        contract_for(evaluation(**changes), lambda: PLAN, EVALUATING)
    with pytest.raises(EspalierError, match="texts are not allowed"):
        contract_for(
            evaluation(), lambda: PLAN, parse({**TEXTS, "evaluation.local-baseline": False})
        )


def test_number_of_task_items_is_that_of_settings() -> None:
    given = {
        "method": "fedpetuning",
        "task.name": "sst2",
        "data.source": "files",
        "task.max-test-items": 3,
    }
    fields = {"names": [], "num_samples": [], "test_requests": 4, "test_tokens": 40}

    def ask(**changes: Any) -> None:
        body = MessageBody(
            header(kind="evaluate", method="fedpetuning", server_round=3), PUBLIC | fields | changes
        )
        contract_for(body, lambda: PLAN, parse(given))

    ask(test_items=3, test_metrics=["loss", "acc"])
    for items, metrics, words in (
        (4, ["loss"], "4 test items, 3 are allowed"),
        (3, ["loss", "loss"], "test_metrics"),
        (3, ["text"], "test_metrics"),
    ):
        with pytest.raises(EspalierError, match=words):
            ask(test_items=items, test_metrics=metrics)


LOSSES = {"losses": [1.5, 2.5], "own_losses": [], "test_scores": [], "seconds": 0.1}


@pytest.mark.parametrize(
    ("changes", "own_text", "fits"),
    [
        ({}, False, True),
        ({"losses": [1.5]}, False, False),
        ({"losses": [1.5, 2.5, 0.5]}, False, False),
        ({"losses": [1.5, float("nan")]}, False, False),
        ({"losses": [1.5, SECRET]}, False, False),
        ({"losses": [1.5, 2.5001]}, False, False),
        ({"own_samples": 7}, False, False),
        ({"note": SECRET}, False, False),
        ({}, True, False),
        ({"own_losses": [3.0, 3.5, 3.25]}, True, True),
        ({"own_losses": [3.0, 3.5, 3.25]}, False, False),
        ({"own_losses": [3.0, 3.5, 3.25, 4.0]}, True, False),
        ({"own_losses": [3.0, 3.5, 3.2501]}, True, False),
    ],
)
def test_one_finite_loss_per_text_and_model(
    changes: dict[str, Any], own_text: bool, fits: bool
) -> None:
    reply = MessageBody(header(kind="evaluate"), LOSSES | changes)
    request = evaluation(own_text=own_text)
    found = contract_for(request, lambda: PLAN, parse({**TEXTS, "evaluation.own-text": own_text}))
    if fits:
        check_reply(reply, request, found)
    else:
        with pytest.raises(EspalierError) as mistake:
            check_reply(reply, request, found)
        assert SECRET not in str(mistake.value)


def test_own_text_alone_needs_no_public_windows() -> None:
    request = MessageBody(
        header(kind="evaluate"), PUBLIC | {"names": [], "num_samples": [], "own_text": True}
    )
    found = contract_for(request, lambda: PLAN, OWN_TEXT)
    check(request, found.down)
    check_reply(
        MessageBody(request.header, LOSSES | {"losses": [], "own_losses": [3.0, 3.5, 3.25]}),
        request,
        found,
    )


# ----- the federated result on its way to a client ------------------------------------------------


def delivered(scaled: bool, **fields: Any) -> MessageBody:
    """Return the whole result in one part."""
    blobs = {}
    for block in PLAN.blocks:
        blobs[f"block-{block.index:04d}"] = blob(
            {"attn.q.prune_mask": words(0, 1), "mlp.up.prune_mask": words(0, 2)}
        )
        if scaled:
            blobs[f"votes-{block.index:04d}"] = blob(
                {linear.name: np.zeros(linear.shape, np.uint8) for linear in block.linears}
            )
    return MessageBody(
        header(kind="deliver"), {"num_voters": [4, 4], "decided": 2, **fields}, blobs
    )


@pytest.mark.parametrize("scaled", [False, True])
def test_delivery_holds_masks_and_scaling_votes(scaled: bool) -> None:
    request = delivered(scaled)
    found = contract_for(
        request,
        lambda: PLAN,
        parse({"fedprllm.weight-scaling": scaled, "evaluation.own-text": True}),
    )
    check(request, found.down)
    check_reply(MessageBody(request.header, {}), request, found)
    with pytest.raises(EspalierError):
        check_reply(MessageBody(request.header, {"note": SECRET}), request, found)
    with pytest.raises(EspalierError, match="surplus"):
        check(delivered(not scaled), found.down)
    with pytest.raises(EspalierError, match="1 numbers of voters for 2 blocks"):
        check(delivered(scaled, num_voters=[4]), found.down)


def test_only_decided_blocks_may_be_delivered() -> None:
    """A client that lost its hidden states gets the blocks decided in earlier rounds.

    Parts hold whole blocks.
    """
    iterative = parse({"fedprllm.strategy": "iterative"})
    first = {
        "block-0000": blob({"attn.q.prune_mask": words(0, 1), "mlp.up.prune_mask": words(0, 2)})
    }
    request = MessageBody(
        header(kind="deliver", server_round=2), {"num_voters": [4], "decided": 1}, first
    )
    found = contract_for(request, lambda: PLAN, iterative)
    check(request, found.down)
    check_reply(MessageBody(request.header, {}), request, found)
    for settings, changes in (
        # One-shot FedPrLLM delivers no decided blocks.
        (SETTINGS, {}),
        (iterative, {"server_round": 1}),
        (iterative, {"server_round": 3}),
    ):
        again = MessageBody(request.header.model_copy(update=changes), request.fields, first)
        with pytest.raises(
            EspalierError,
            match="1 decided blocks are delivered, which is neither all nor those before the round",
        ):
            contract_for(again, lambda: PLAN, settings)
    with pytest.raises(EspalierError):
        check(MessageBody(request.header, request.fields, delivered(False).blobs), found.down)


def test_decided_parts_are_cut_from_those_blocks() -> None:
    plan = replace(PLAN, blocks=tuple(replace(PLAN.blocks[0], index=index) for index in range(5)))
    size = sum(
        spec.num_bytes
        for specs in decided_specs(plan.blocks[0], SETTINGS).values()
        for spec in specs.values()
    )
    settings = SETTINGS.model_copy(update={"part_bytes": 2 * size})
    assert [list(part) for part in decided_parts(plan, settings, 3)] == [[0, 1], [2]]
    assert [list(part) for part in decided_parts(plan, settings, 5)] == [[0, 1], [2, 3], [4]]


def test_order_after_scaling_brings_its_votes() -> None:
    settings = parse(
        {
            "fedprllm.strategy": "iterative",
            "fedprllm.weight-scaling": True,
            "fedprllm.continue-behind": "scaled",
            "num-clients": 4,
        }
    )
    first = contract_for(MessageBody(header()), lambda: PLAN, settings)
    check(MessageBody(header()), first.down)
    whole = delivered(scaled=True)
    blobs = {key: whole.blobs[key] for key in ("block-0000", "votes-0000")}
    order = MessageBody(header(server_round=2), {"num_voters": [4], "decided": 1}, blobs)
    found = contract_for(order, lambda: PLAN, settings)
    check(order, found.down)
    for fields, held, words in (
        ({"num_voters": [4, 4], "decided": 1}, blobs, "2 numbers of voters for 1 block"),
        ({}, blobs, "num_voters"),
        ({"num_voters": [4], "decided": 1}, {"block-0000": blobs["block-0000"]}, "1 missing"),
    ):
        with pytest.raises(EspalierError, match=words):
            check(MessageBody(header(server_round=2), fields, held), found.down)


def test_nonexistent_part_of_result_is_refused() -> None:
    with pytest.raises(EspalierError, match="part 99 of a deliver does not exist"):
        contract_for(
            MessageBody(header(kind="deliver", part=99), {"num_voters": [1], "decided": 2}),
            lambda: PLAN,
            OWN_TEXT,
        )


def test_own_text_is_what_the_run_s_settings_say() -> None:
    """A message cannot ask for more than the settings that the site was shown."""
    with pytest.raises(EspalierError, match=r"not what evaluation\.own-text says"):
        contract_for(evaluation(own_text=True), lambda: PLAN, SETTINGS)
    with pytest.raises(EspalierError, match=r"evaluation\.own-text is off"):
        contract_for(delivered(False), lambda: PLAN, SETTINGS)


@pytest.mark.parametrize(
    ("clients", "dtype"), [(1, "U8"), (255, "U8"), (256, "U16"), (65535, "U16"), (65536, "U32")]
)
def test_votes_have_smallest_sufficient_dtype(clients: int, dtype: str) -> None:
    settings = parse({"fedprllm.weight-scaling": True, "num-clients": clients})
    specs = decided_specs(PLAN.blocks[0], settings)["votes-0000"]
    assert {spec.dtype for spec in specs.values()} == {dtype}


ENROLMENT = {
    "site": "hospital-a",
    "code_sha256": SHA,
    "model_sha256": SHA,
    "device": "cpu",
    "threads": 2,
    "capability": 1.0,
    "measured": False,
    "approval": False,
    "python": "3.11.7",
    "torch": "2.6.0",
}


def test_a_good_enrolment_passes() -> None:
    request = MessageBody(header(kind="enrol", client=-1, server_round=0))
    check_reply(
        MessageBody(request.header, dict(ENROLMENT)),
        request,
        contract_for(request, lambda: PLAN, SETTINGS),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("site", "hospital a"),
        ("site", "../x"),
        ("site", ""),
        ("code_sha256", SECRET),
        ("model_sha256", "0" * 63),
        ("device", "tpu"),
        ("threads", 0),
        ("python", SECRET),
        ("torch", "x" * 65),
        ("note", SECRET),
    ],
)
def test_another_enrolment_is_refused(field: str, value: Any) -> None:
    request = MessageBody(header(kind="enrol", client=-1, server_round=0))
    reply = MessageBody(request.header, ENROLMENT | {field: value})
    assert field in refused(reply, request)

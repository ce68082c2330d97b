"""Contracts of tuning: adapters of the agreed shapes and a few counts, part by part.

Everything else is refused.
"""

from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from espalier.errors import EspalierError
from espalier.messages.blobs.adapters import pack_adapters
from espalier.messages.contract import check, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.message import Header, MessageBody, request_header
from espalier.methods.tuning.adapters.tensors import parts, trained
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.settings.run import RunSettings, parse
from espalier.storage.blobs import sha256
from tests.run_names import BY_HAND

SHA = "0" * 64
SECRET = "Anna K., born 1961, diagnosis F32.1"
LINEARS = (LinearPlan("attn.q", "q", (8, 8)), LinearPlan("mlp.up", "up", (24, 8)))
PLAN = ModelPlan(tuple(BlockPlan(index, LINEARS) for index in range(4)), 5000)
KEYS = [f"block-{index:04d}" for index in range(4)]
REPORT = {"seconds": 1.0, "samples": 40, "rank": 4, "skipped_steps": 0, "blob_sha256": [SHA] * 4}


def settings_of(
    wire_dtype: str = "float32", part_bytes: int = 1 << 20, own_text: bool = False
) -> RunSettings:
    """Return settings with rank 4 for all matrices.

    A block has 4 (8 + 8) + 4 (8 + 24) = 192 elements, 768 bytes in float32.
    """
    flat = {
        "lora.rank": 4,
        "lora.targets": "all",
        "federation.wire-dtype": wire_dtype,
        "training.steps": 5,
    }
    settings = parse({"method": "fedpetuning", "evaluation.own-text": own_text, **flat})
    return settings.model_copy(update={"part_bytes": part_bytes})


def block_of(rank: int = 4, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "attn.q.lora_a": torch.randn(rank, 8, generator=generator),
        "attn.q.lora_b": torch.randn(8, rank, generator=generator),
        "mlp.up.lora_a": torch.randn(rank, 8, generator=generator),
        "mlp.up.lora_b": torch.randn(24, rank, generator=generator),
    }


def blobs_of(keys: list[str], settings: RunSettings, rank: int = 4) -> dict[str, bytes]:
    return {key: pack_adapters(block_of(rank), settings.federation.wire_dtype)[0] for key in keys}


def header_of(kind: Any, server_round: int = 1, part: int = 0) -> Header:
    return request_header("fedpetuning", kind, server_round, part=part, lineage=BY_HAND)


def order(
    settings: RunSettings,
    server_round: int = 1,
    blobs: dict[str, bytes] | None = None,
    **fields: Any,
) -> MessageBody:
    """Return a training request; from round 2 on it holds the last part of the global adapters."""
    return MessageBody(header_of("train", server_round), {"rank_limit": 4, **fields}, blobs or {})


def hashes_of(blobs: dict[str, bytes]) -> list[str]:
    """Return the hashes of all blocks, as in a report; blocks in other parts get a dummy hash."""
    return [sha256(blobs[key]) if key in blobs else SHA for key in KEYS]


def fetch_of(blobs: dict[str, bytes], server_round: int = 1, part: int = 1) -> MessageBody:
    """Return the request for the part that has these blobs."""
    hashes = [sha256(blobs[key]) for key in sorted(blobs)]
    return MessageBody(
        header_of("fetch", server_round, part), {"rank_limit": 4, "rank": 4, "blob_sha256": hashes}
    )


def reply_to(
    request: MessageBody, settings: RunSettings, blobs: dict[str, bytes], **fields: Any
) -> MessageBody:
    num_parts = contract_for(request, lambda: PLAN, settings).num_parts
    report = {**REPORT, "blob_sha256": hashes_of(blobs)} if request.header.kind == "train" else {}
    return MessageBody(
        request.header.model_copy(update={"num_parts": num_parts}), {**report, **fields}, blobs
    )


def hold(reply: MessageBody, request: MessageBody, settings: RunSettings) -> None:
    contract = contract_for(request, lambda: PLAN, settings)
    check(request, contract.down)
    check_reply(reply, request, contract)


ONE = settings_of()


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
    with pytest.raises(EspalierError, match="part 4 of a deliver does not exist, there are 4"):
        contract_for(
            MessageBody(header_of("deliver", 2, part=4), {"rank_limit": 4}), lambda: PLAN, settings
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
def test_every_part_can_be_delivered(part: int, keys: list[str]) -> None:
    """Before training, all parts but the last are delivered; of the result, all of them."""
    settings = settings_of(part_bytes=768 * 3)
    request = MessageBody(
        header_of("deliver", 2, part=part), {"rank_limit": 4}, blobs_of(keys, settings)
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
    for kind in ("train", "deliver"):
        with pytest.raises(
            EspalierError, match="Order: missing, surplus or out of range: rank_limit"
        ):
            contract_for(MessageBody(header_of(kind, 2), {"rank_limit": limit}), lambda: PLAN, ONE)


@pytest.mark.parametrize(
    ("kind", "rounds"), [("train", (1, 3)), ("fetch", (1, 3)), ("deliver", (2, 4))]
)
def test_rounds_that_the_run_does_not_have(kind: str, rounds: tuple[int, int]) -> None:
    """The run has three rounds; a delivery for round 4 is the result."""
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


def test_unevaluated_result_is_not_delivered() -> None:
    with pytest.raises(
        EspalierError, match=r"a result is delivered, but evaluation\.own-text is off"
    ):
        contract_for(
            MessageBody(header_of("deliver", 4), {"rank_limit": 4}),
            lambda: PLAN,
            settings_of(part_bytes=768),
        )


@pytest.mark.parametrize("kind", ["train", "deliver"])
def test_a_rank_that_no_adapter_has(kind: str) -> None:
    with pytest.raises(EspalierError, match=r"rank_limit is above 4, the largest rank of \[lora\]"):
        contract_for(MessageBody(header_of(kind, 2), {"rank_limit": 5}), lambda: PLAN, ONE)


# ----- from the client to the server --------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"blob_sha256": [SHA] * 3}, "TuningReport: 3 hashes for 4 blobs"),
        ({"blob_sha256": [SHA] * 5}, "TuningReport: 5 hashes for 4 blobs"),
        ({"blob_sha256": [SHA] * 3 + [SECRET]}, "out of range: blob_sha256.3"),
        ({"samples": -1}, "out of range: samples"),
        ({"samples": 0}, "samples are sent only with federation.client-weights = 'samples'"),
        ({"samples": 10**10}, "out of range: samples"),
        ({"samples": 1.5}, "out of range: samples"),
        ({"skipped_steps": -1}, "out of range: skipped_steps"),
        ({"skipped_steps": 5}, "TuningReport: skipped_steps must be below the 5 steps of a round"),
        ({"seconds": float("nan")}, "out of range: seconds"),
        ({"seconds": 1e12}, "out of range: seconds"),
        ({"loss": 0.5}, "surplus or out of range: loss"),
        ({"text": SECRET}, "surplus or out of range: text"),
        ({"optimizer": [0.1, 0.2]}, "surplus or out of range: optimizer"),
    ],
)
def test_scalars_that_are_not_on_the_list(fields: dict[str, Any], words: str) -> None:
    request = order(ONE)
    with pytest.raises(EspalierError, match=words) as caught:
        hold(reply_to(request, ONE, blobs_of(KEYS, ONE), **fields), request, ONE)
    assert SECRET not in str(caught.value)


def test_sample_number_is_sent_only_as_a_weight() -> None:
    settings = parse(
        {
            "method": "fedpetuning",
            "lora.rank": 4,
            "lora.targets": "all",
            "federation.client-weights": "equal",
        }
    )
    request = order(settings)
    hold(reply_to(request, settings, blobs_of(KEYS, settings), samples=0), request, settings)
    with pytest.raises(
        EspalierError, match=r"samples are sent only with federation\.client-weights = 'samples'"
    ):
        hold(reply_to(request, settings, blobs_of(KEYS, settings)), request, settings)


def test_report_names_hashes_of_its_blobs() -> None:
    """Unchecked hashes would let a client send 32 arbitrary bytes per blob."""
    settings = settings_of(part_bytes=768 * 2)
    request = order(settings)
    blobs = blobs_of(KEYS[:2], settings)
    true = hashes_of(blobs)
    hold(reply_to(request, settings, blobs), request, settings)
    text = SECRET.encode()[:32].hex()
    for wrong in ([true[0], text, SHA, SHA], [text, true[1], SHA, SHA]):
        with pytest.raises(
            EspalierError, match=r"block-000[01]: the bytes do not have the SHA-256"
        ) as caught:
            hold(reply_to(request, settings, blobs, blob_sha256=wrong), request, settings)
        assert text not in str(caught.value)


def test_hashes_are_in_the_order_of_the_blobs() -> None:
    blobs = {
        key: pack_adapters(block_of(seed=place), "float32")[0] for place, key in enumerate(KEYS)
    }
    request = order(ONE)
    hold(reply_to(request, ONE, dict(reversed(blobs.items()))), request, ONE)
    with pytest.raises(EspalierError, match="the bytes do not have the SHA-256"):
        hold(reply_to(request, ONE, blobs, blob_sha256=hashes_of(blobs)[::-1]), request, ONE)


@pytest.mark.parametrize(
    ("flat", "least"),
    [
        ({"method": "fedpetuning"}, 4),
        ({"method": "hetlora", "hetlora.gamma": 1.0}, 4),
        ({"method": "hetlora"}, 1),
    ],
)
def test_lower_rank_needs_self_pruning(flat: dict[str, Any], least: int) -> None:
    settings = parse({**flat, "lora.rank": 4, "lora.targets": "all", "training.steps": 5})
    request = order(settings)
    request.header = request.header.model_copy(update={"method": settings.method})
    for rank in range(1, 6):
        tensors = {
            name: tensor * (torch.arange(4) < rank).view((4, 1) if name.endswith("a") else (1, 4))
            for name, tensor in block_of().items()
        }
        blobs = dict.fromkeys(KEYS, pack_adapters(tensors, "float32")[0])
        reply = reply_to(
            request,
            settings,
            blobs,
            rank=rank,
            samples=40 if settings.method == "fedpetuning" else 0,
        )
        if least <= rank <= 4:
            hold(reply, request, settings)
            continue
        with pytest.raises(
            EspalierError, match=r"TuningReport: rank is (below|above) 4, the order's rank_limit"
        ):
            hold(reply, request, settings)


def _gradient(block: dict[str, Tensor]) -> None:
    block["attn.q.lora_a.grad"] = torch.zeros(4, 8)


def _token_ids(block: dict[str, Tensor]) -> None:
    block["attn.q.lora_a"] = torch.arange(32, dtype=torch.int32).reshape(4, 8)


def _halved(block: dict[str, Tensor]) -> None:
    block["attn.q.lora_a"] = block["attn.q.lora_a"].half()


def _not_finite(block: dict[str, Tensor]) -> None:
    block["mlp.up.lora_b"][3, 1] = float("nan")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_gradient, "block-0001: holds 5 tensors, and not the 4"),
        (_token_ids, r"block-0001 attn.q.lora_a: is I32 \[4, 8\], must be F32 \[4, 8\]"),
        (_halved, r"block-0001 attn.q.lora_a: is F16"),
        (_not_finite, "block-0001 mlp.up.lora_b: a number is not finite"),
    ],
)
def test_tensors_that_are_not_the_adapters(change: Any, words: str) -> None:
    block = block_of()
    change(block)
    request = order(ONE)
    with pytest.raises(EspalierError, match=words):
        hold(
            reply_to(request, ONE, blobs_of(KEYS, ONE) | {"block-0001": save(block)}), request, ONE
        )


@pytest.mark.parametrize(
    ("sent", "agreed"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("nf4", "float32"), ("float32", "nf4")],
)
def test_another_payload_than_agreed(sent: str, agreed: str) -> None:
    request = order(settings_of(agreed))
    settings = settings_of(agreed)
    with pytest.raises(EspalierError, match=r"block-0000"):
        hold(reply_to(request, settings, blobs_of(KEYS, settings_of(sent))), request, settings)


def test_damaged_nf4_does_not_pass() -> None:
    request = order(settings_of("nf4"))
    settings = settings_of("nf4")
    blobs = blobs_of(KEYS, settings)
    hold(reply_to(request, settings, blobs), request, settings)
    tensors = load(blobs["block-0002"])
    tensors["mlp.up.lora_b.absmax"][0] = float("inf")
    with pytest.raises(
        EspalierError,
        match=r"block-0002 mlp.up.lora_b: a magnitude of an NF4 block is negative, NaN or infinite",
    ):
        hold(reply_to(request, settings, blobs | {"block-0002": save(tensors)}), request, settings)


def test_an_observer_is_told_what_adapters_reveal() -> None:
    observer = contract_for(order(ONE), lambda: PLAN, ONE).observer
    assert "Adapters trained on this client's data" in observer
    for words in (
        "the gradient of the sequences",
        "training text can be recovered in part",
        "the number of training sequences",
    ):
        assert words in observer

"""FedSpine's contracts: the shapes of a round follow from the bits in its requests."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from espalier.errors import EspalierError
from espalier.messages.blobs.adapters import pack_adapters
from espalier.messages.blobs.cut_bits import pack_bits
from espalier.messages.contract import check, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.message import MessageBody, request_header
from espalier.methods.tuning.fedspine import STRUCTURE, shortened, trained
from espalier.models.groups import Groups
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.settings.run import RunSettings, parse
from espalier.storage.blobs import sha256
from tests.run_names import BY_HAND

SHAPES = {
    "attn.q": (8, 8), "attn.k": (4, 8), "attn.v": (4, 8), "attn.o": (8, 8),
    "mlp.gate": (6, 8), "mlp.up": (6, 8), "mlp.down": (8, 6),
}  # fmt: skip
BLOCKS = tuple(
    BlockPlan(index, tuple(LinearPlan(name, name, SHAPES[name]) for name in SHAPES))
    for index in range(2)
)
PLAN = ModelPlan(BLOCKS, 1000, head_dim=2, heads_per_group=2)
GROUPS = Groups.of(PLAN)
KEYS = ["block-0000", "block-0001"]
REPORT = {
    "seconds": 1.0, "samples": 0, "skipped_steps": 0, "rank": 2, "loss_before": 2.125,
    "loss_after": 2.0, "taylor": 1.23e-7,
}  # fmt: skip


def settings_of(part_bytes: int = 1 << 20) -> RunSettings:
    flat = {
        "lora.rank": 2,
        "lora.alpha": 4.0,
        "lora.targets": "all",
        "pruning.ratio": 0.25,
        "pruning.selection": "global",
    }
    made = parse(
        {
            "method": "fedspine",
            "federation.client-weights": "importance",
            "federation.rounds": 3,
            **flat,
        }
    )
    return made.model_copy(update={"part_bytes": part_bytes})


def bits(*numbers: int) -> bytes:
    found = GROUPS.none
    found[list(numbers)] = True
    return pack_bits(found)


CUT = bits(0, 2, 3, 8)
"""Cut of one of 2 groups in each block, and of two of 6 channels in the first."""


def body(
    kind: Any, server_round: int, fields: dict[str, Any], blobs: dict[str, bytes], part: int = 0
) -> MessageBody:
    header = request_header("fedspine", kind, server_round, part=part, lineage=BY_HAND)
    return MessageBody(header, fields, blobs)


def adapters_of(
    settings: RunSettings, structure: bytes | None, keys: list[str]
) -> dict[str, bytes]:
    shapes = trained(PLAN, settings, 2, structure).shapes()
    drawn = {key: {name: torch.randn(shape) for name, shape in shapes[key].items()} for key in keys}
    return {key: pack_adapters(own, "float32")[0] for key, own in drawn.items()}


def hold(request: MessageBody, reply: MessageBody, settings: RunSettings) -> None:
    contract = contract_for(request, lambda: PLAN, settings)
    check(request, contract.down)
    reply.header.num_parts = contract.num_parts
    check_reply(reply, request, contract)


def answer(request: MessageBody, blobs: dict[str, bytes], **fields: Any) -> MessageBody:
    report: dict[str, Any] = {}
    if request.header.kind == "train":
        report = REPORT | {
            "blob_sha256": [sha256(blobs[key]) if key in blobs else "0" * 64 for key in KEYS]
        }
    return MessageBody(request.header.model_copy(), {**report, **fields}, blobs)


# ----- shapes -------------------------------------------------------------------------------------


def test_adapters_have_remaining_dimensions() -> None:
    shapes = trained(PLAN, settings_of(), 2, CUT).shapes()
    first = shapes["block-0000"]
    second = shapes["block-0001"]
    assert [first[f"{name}.lora_b"] for name in SHAPES] == [
        (4, 2),
        (2, 2),
        (2, 2),
        (8, 2),
        (4, 2),
        (4, 2),
        (8, 2),
    ]
    assert [first[f"{name}.lora_a"] for name in SHAPES] == [
        (2, 8),
        (2, 8),
        (2, 8),
        (2, 4),
        (2, 8),
        (2, 8),
        (2, 4),
    ]
    assert second["mlp.down.lora_a"] == (2, 6)
    assert second["attn.o.lora_a"] == (2, 4)


def test_encoder_head_is_whole_after_any_cut() -> None:
    """The width of the head is that of the model, which no cut changes."""
    encoder = replace(PLAN, head_features=8)
    task = {"task.name": "sst2", "data.source": "files", "data.path": "x"}
    settings = parse({"method": "fedspine", "lora.rank": 2, "lora.targets": "all", **task})
    head = {
        "head.dense.weight": (8, 8),
        "head.dense.bias": (8,),
        "head.out.weight": (2, 8),
        "head.out.bias": (2,),
    }
    for structure in (None, CUT):
        shapes = trained(encoder, settings, 1, structure).shapes()
        assert list(shapes) == [*KEYS, "head"]
        assert shapes["head"] == head
    assert shapes["block-0000"]["attn.q.lora_b"] == (4, 1)


def test_later_rounds_are_checked_by_their_bits() -> None:
    settings = settings_of()
    request = body(
        "train", 2, {"rank_limit": 2}, {STRUCTURE: CUT, **adapters_of(settings, CUT, KEYS)}
    )
    hold(request, answer(request, adapters_of(settings, CUT, KEYS)), settings)
    with pytest.raises(
        EspalierError, match=r"block-0000 attn.q.lora_b: is F32 \[8, 2\], must be F32 \[4, 2\]"
    ):
        hold(request, answer(request, adapters_of(settings, None, KEYS)), settings)
    with pytest.raises(EspalierError, match="1 surplus and 0 missing of 2"):
        hold(
            request, answer(request, {STRUCTURE: CUT, **adapters_of(settings, CUT, KEYS)}), settings
        )


@pytest.mark.parametrize("structure", [{}, {STRUCTURE: b"garbage"}, {STRUCTURE: bits(0, 1)}])
def test_a_request_without_good_bits_is_refused(structure: dict[str, bytes]) -> None:
    settings = settings_of()
    request = body(
        "train", 2, {"rank_limit": 2}, {**structure, **adapters_of(settings, None, KEYS)}
    )
    with pytest.raises(
        EspalierError, match=r"blobs: 0 surplus and 1 missing|safetensors|all groups of block 0"
    ):
        hold(request, answer(request, adapters_of(settings, None, KEYS)), settings)


def test_round_1_covers_whole_model() -> None:
    settings = settings_of()
    request = body("train", 1, {"rank_limit": 2}, {})
    hold(request, answer(request, adapters_of(settings, None, KEYS)), settings)
    request = body("train", 1, {"rank_limit": 2}, {STRUCTURE: CUT})
    with pytest.raises(EspalierError, match="1 surplus"):
        hold(request, answer(request, adapters_of(settings, CUT, KEYS)), settings)


def test_later_parts_are_asked_for_with_the_bits() -> None:
    settings = settings_of(part_bytes=1024)
    blobs = adapters_of(settings, CUT, KEYS[1:])
    asked = {"rank_limit": 2, "rank": 2, "blob_sha256": [sha256(blobs["block-0001"])]}
    request = body("fetch", 3, asked, {STRUCTURE: CUT}, part=1)
    hold(request, answer(request, blobs), settings)
    request = body("fetch", 3, asked, {}, part=1)
    with pytest.raises(EspalierError, match="0 surplus and 1 missing"):
        hold(request, answer(request, blobs), settings)


# ----- the request to cut -------------------------------------------------------------------------


def test_question_is_answered_with_bits() -> None:
    settings = settings_of()
    least = 120 / 672
    request = body("push", 2, {"pruned": least}, {STRUCTURE: bits(2)})
    hold(request, answer(request, {STRUCTURE: bits(0, 2)}), settings)
    # A device that lost its measurements repeats its cut.
    hold(request, answer(request, {STRUCTURE: bits(2)}), settings)
    for wrong in (bits(0), bits(2, 3), bits(0, 2, 8), bits(2, 3, 4, 5, 6, 7)):
        with pytest.raises(EspalierError, match=r"groups\.cut"):
            hold(request, answer(request, {STRUCTURE: wrong}), settings)
    with pytest.raises(EspalierError, match="blobs: 0 surplus and 1 missing"):
        hold(request, answer(request, {}), settings)
    with pytest.raises(EspalierError, match="1 surplus"):
        hold(request, answer(request, {STRUCTURE: bits(0, 2), "block-0000": bits()}), settings)


def test_no_device_is_asked_beyond_share() -> None:
    settings = settings_of()
    for pruned in (0.2501, 1.0, -0.1, float("nan")):
        request = body("push", 2, {"pruned": pruned}, {STRUCTURE: bits()})
        with pytest.raises(EspalierError, match="CutOrder"):
            hold(request, answer(request, {STRUCTURE: bits()}), settings)


def test_adapter_parts_follow_question() -> None:
    settings = settings_of(part_bytes=1024)
    for server_round, first in ((2, 1), (3, 1), (4, 0)):
        for part, key in enumerate(KEYS):
            blobs = {STRUCTURE: CUT, **adapters_of(settings, CUT, [key])}
            request = body("push", server_round, {"rank_limit": 2}, blobs, part + first)
            hold(request, answer(request, {}), settings)
    with pytest.raises(EspalierError, match="part 3 of a push does not exist"):
        contract_for(
            body("push", 2, {"rank_limit": 2}, {STRUCTURE: CUT}, 3), lambda: PLAN, settings
        )


# ----- the report ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_before": 2.1251}, "SpineReport: .* out of range: loss_before"),
        ({"loss_after": -1.0}, "loss_after"),
        ({"loss_after": float("inf")}, "loss_after"),
        ({"taylor": 1.2345e-7}, "SpineReport: .* out of range: taylor"),
        ({"taylor": -1.0}, "taylor"),
        ({"taylor": 1e31}, "taylor"),
        ({"samples": 4}, "samples are sent only with"),
        ({"rank": 1}, "rank is below 2"),
        ({"importance": 0.5}, "importance"),
    ],
)
def test_reports_say_no_more_than_they_may(changes: dict[str, Any], words: str) -> None:
    settings = settings_of()
    request = body("train", 1, {"rank_limit": 2}, {})
    with pytest.raises(EspalierError, match=words):
        hold(request, answer(request, adapters_of(settings, None, KEYS), **changes), settings)


def test_a_term_is_told_with_three_digits() -> None:
    assert [shortened(value) for value in (0.0, 1.2345e-7, 123456.0, 1e40)] == [
        0.0,
        1.23e-7,
        123000.0,
        1e30,
    ]
    assert all(
        shortened(shortened(value)) == shortened(value)
        for value in np.random.default_rng(0).lognormal(0, 30, 500)
    )

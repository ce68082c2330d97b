"""Messages of tuning by hand."""

from typing import Any

import torch
from torch import Tensor

from espalier.messages.blobs.adapters import pack_adapters
from espalier.messages.contract import check, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.message import Header, MessageBody, request_header
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

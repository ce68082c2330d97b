"""Replies of tuning: adapters of the agreed shapes and a few counts; everything else is refused."""

from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from espalier.errors import EspalierError
from espalier.messages.blobs.adapters import pack_adapters
from espalier.messages.contracts import contract_for
from espalier.settings.run import parse
from tests.messages.contracts.tuning_messages import (
    KEYS,
    ONE,
    PLAN,
    SECRET,
    SHA,
    blobs_of,
    block_of,
    hashes_of,
    hold,
    order,
    reply_to,
    settings_of,
)


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

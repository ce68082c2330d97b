"""Pruned blocks as payloads: masks and kept weights, and refusals of FedSpaLLM's contracts."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from espalier.errors import EspalierError
from espalier.hf.files.dtypes import TORCH_DTYPES
from espalier.messages.blobs.mask_tensors import PrunedMatrix, pack_kept, unpack_kept
from espalier.messages.blobs.masks import kept_specs, require_kept
from espalier.messages.contract import check, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.message import Header, MessageBody, request_header
from espalier.messages.tensor_blobs import tensor_specs
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.settings.run import parse
from espalier.storage.blobs import sha256
from pruning_kernels.votes.bitmask import pack
from tests.run_names import BY_HAND

SHA = "0" * 64


def block(index: int = 0, dtype: str = "BF16") -> BlockPlan:
    return BlockPlan(
        index,
        (LinearPlan("attn.q", "q", (4, 6), dtype), LinearPlan("mlp.up", "up", (3, 30), dtype)),
    )


def matrices(
    seed: int = 0, dtype: torch.dtype = torch.bfloat16, sparsity: float = 0.5
) -> dict[str, PrunedMatrix]:
    """Return random weights with an exact sparsity."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for linear in block().linears:
        weight = torch.randn(linear.shape, generator=generator)
        mask = torch.zeros(linear.num_weights, dtype=torch.bool)
        mask[
            torch.randperm(linear.num_weights, generator=generator)[
                : int(linear.num_weights * sparsity)
            ]
        ] = True
        found[linear.name] = PrunedMatrix.of(weight, mask.view(linear.shape), dtype)
    return found


def test_by_hand() -> None:
    """A matrix of two by two loses its second and third weight."""
    matrix = PrunedMatrix.of(
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([[False, True], [True, False]]),
        torch.float32,
    )
    assert matrix.kept.tolist() == [1.0, 4.0]
    assert matrix.weight().tolist() == [[1.0, 0.0], [0.0, 4.0]]
    plan = BlockPlan(0, (LinearPlan("a", "a", (2, 2)),))
    tensors = load(pack_kept({"a": matrix}))
    assert tensors["a.prune_mask"].tolist() == [0b0110]
    assert unpack_kept(plan, pack_kept({"a": matrix}))["a"].weight().tolist() == [
        [1.0, 0.0],
        [0.0, 4.0],
    ]


@given(st.sampled_from(["F16", "BF16", "F32"]), st.integers(0, 99))
def test_what_is_packed_is_unpacked_bit_by_bit(dtype: str, seed: int) -> None:
    torch_dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    before = matrices(seed, torch_dtype)
    blob = pack_kept(before)
    num_kept = {
        linear.name: linear.num_weights - linear.num_weights // 2 for linear in block().linears
    }
    assert tensor_specs(blob) == kept_specs(block(dtype=dtype), num_kept)
    for name, after in unpack_kept(block(), blob).items():
        assert torch.equal(after.prune_mask, before[name].prune_mask)
        assert torch.equal(after.kept, before[name].kept)


# ----- contracts ----------------------------------------------------------------------------------

PLAN = ModelPlan(tuple(block(index) for index in range(3)), 500)
SETTINGS = parse({"method": "fedspallm", "part-bytes": 1024})
REPORT = {
    "seconds": 1.0, "calibration_samples": 0, "damping": 0.01,
}  # fmt: skip


def header(kind: Any, server_round: int = 1, part: int = 0, num_parts: int = 1) -> Header:
    found = request_header("fedspallm", kind, server_round, part=part, lineage=BY_HAND)
    return found.model_copy(update={"num_parts": num_parts})


def train(**fields: Any) -> MessageBody:
    return MessageBody(header("train"), {"blocks": [0, 2], "versions": [0, 0, 0], **fields})


def reply(
    request: MessageBody, blobs: dict[str, bytes] | None = None, **fields: Any
) -> MessageBody:
    good = {f"block-{index:04d}": pack_kept(matrices(index)) for index in (0, 2)}
    num_parts = contract_for(request, lambda: PLAN, SETTINGS).num_parts
    hashes = {"blob_sha256": [sha256(blob) for _, blob in sorted((blobs or good).items())]}
    return MessageBody(
        request.header.model_copy(update={"num_parts": num_parts}),
        {**REPORT, **hashes, **fields},
        blobs or good,
    )


def hold(body: MessageBody, request: MessageBody) -> None:
    check_reply(body, request, contract_for(request, lambda: PLAN, SETTINGS))


def test_a_good_reply_passes() -> None:
    hold(reply(train()), train())


def spoiled(change: Any) -> dict[str, bytes]:
    tensors = load(pack_kept(matrices(0)))
    change(tensors)
    return {"block-0000": save(tensors), "block-0002": pack_kept(matrices(2))}


def _one_weight_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["attn.q.kept"] = tensors["attn.q.kept"].repeat(2)[:13]


def _one_bit_less(tensors: dict[str, torch.Tensor]) -> None:
    words = tensors["attn.q.prune_mask"].numpy().copy()
    words[0] &= words[0] - np.uint64(1)
    tensors["attn.q.prune_mask"] = torch.from_numpy(words)


def _not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["mlp.up.kept"][3] = float("inf")


def _padding(tensors: dict[str, torch.Tensor]) -> None:
    words = tensors["attn.q.prune_mask"].numpy().copy()
    words[0] |= np.uint64(1 << 63)
    tensors["attn.q.prune_mask"] = torch.from_numpy(words)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, -math.nan, None])
def test_non_finite_numbers_are_found(dtype: str, number: float | None) -> None:
    of_torch = TORCH_DTYPES[dtype]
    kept = torch.tensor(
        [torch.finfo(of_torch).max, torch.finfo(of_torch).min, 0.0, -0.0, 1e-6], dtype=of_torch
    )
    mask = torch.tensor([[False, True, False, True], [False, True, False, False]])
    if number is not None:
        kept[3] = number
    blob = pack_kept({"attn.q": PrunedMatrix(pack(mask.numpy()), (2, 4), kept)})
    block = BlockPlan(0, (LinearPlan("attn.q", "q.weight", (2, 4), dtype),))
    if number is None:
        assert require_kept(block, "block-0000", blob)["attn.q"].tolist() == [0b00101010]
    else:
        with pytest.raises(EspalierError, match=r"block-0000 attn\.q: a kept weight is not finite"):
            require_kept(block, "block-0000", blob)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_one_weight_more, r"attn.q.kept: is BF16 \[13\], must be BF16 \[12\]"),
        (_one_bit_less, "attn.q: the mask prunes 11 weights, the settings ask for 12"),
        (_not_finite, "mlp.up: a kept weight is not finite"),
        (_padding, "attn.q: bits are set beyond the last weight"),
    ],
)
def test_a_spoiled_layer_is_refused(change: Any, words: str) -> None:
    with pytest.raises(EspalierError, match=words):
        hold(reply(train(), spoiled(change)), train())


@pytest.mark.parametrize("blocks", [[0, 3], [2, 0], [1, 1]])
def test_unknown_or_unordered_layers_are_refused(blocks: list[int]) -> None:
    with pytest.raises(EspalierError, match="layers must be ascending and below 3"):
        contract_for(train(blocks=blocks), lambda: PLAN, SETTINGS)


def test_window_number_is_sent_only_as_a_weight() -> None:
    weighted = parse(
        {"method": "fedspallm", "part-bytes": 1024, "federation.client-weights": "samples"}
    )
    for settings, right, wrong in ((SETTINGS, 0, 2), (weighted, 2, 0)):
        contract = contract_for(train(), lambda: PLAN, settings)
        check_reply(reply(train(), calibration_samples=right), train(), contract)
        with pytest.raises(
            EspalierError,
            match=r"calibration_samples are sent only with federation\.client-weights = 'samples'",
        ):
            check_reply(reply(train(), calibration_samples=wrong), train(), contract)


def test_as_many_versions_as_layers() -> None:
    request = train(versions=[0, 0])
    with pytest.raises(EspalierError, match="2 versions for 3 layers"):
        check(request, contract_for(request, lambda: PLAN, SETTINGS).down)


def test_parts_are_of_whole_layers() -> None:
    """A layer has 3 words and 57 kept weights in bfloat16, so 138 bytes.

    With parts of 200 bytes, each layer travels in a part of its own.
    """
    settings = parse({"method": "fedspallm", "part-bytes": 1024}).model_copy(
        update={"part_bytes": 200}
    )
    request = MessageBody(header("fetch", part=1), {"blocks": [0, 2], "blob_sha256": [SHA]})
    contract = contract_for(request, lambda: PLAN, settings)
    assert contract.num_parts == 2
    assert set(contract.up.blobs) == {"block-0002"}
    with pytest.raises(EspalierError, match="part 2 of a fetch does not exist"):
        contract_for(MessageBody(header("fetch", part=2), request.fields), lambda: PLAN, settings)


def update(**changes: Any) -> MessageBody:
    fields = {"blocks": [1], "versions": [1], "num_kept": [12, 45], **changes}
    return MessageBody(
        header("push", server_round=2), fields, {"block-0001": pack_kept(matrices(1))}
    )


def test_an_update_brings_what_its_numbers_say() -> None:
    check(update(), contract_for(update(), lambda: PLAN, SETTINGS).down)
    for changes, words in (
        ({"num_kept": [12]}, "do not fit the layers"),
        ({"versions": [1, 1]}, "do not fit the layers"),
        ({"num_kept": [25, 45]}, "keeps more weights than it has"),
        ({"num_kept": [11, 45]}, "must be BF16"),
        ({"blocks": [5]}, "below 3"),
    ):
        with pytest.raises(EspalierError, match=words):
            check(update(**changes), contract_for(update(**changes), lambda: PLAN, SETTINGS).down)

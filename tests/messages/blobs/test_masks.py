"""Masks of a block as a payload, bit by bit."""

import json
import struct

import pytest
import torch

from espalier.messages.blobs.mask_tensors import pack_masks, unpack_masks
from espalier.messages.blobs.masks import mask_name
from espalier.models.plan import BlockPlan, LinearPlan

BLOCK = BlockPlan(
    0, (LinearPlan("attn.q", "q.weight", (2, 3)), LinearPlan("mlp.up", "up.weight", (5, 13)))
)


def masks() -> dict[str, torch.Tensor]:
    up = torch.zeros(5, 13, dtype=torch.bool)
    up[0, 1] = up[4, 12] = True
    return {"mlp.up": up, "attn.q": torch.tensor([[True, False, True], [True, False, False]])}


def test_the_bytes_on_paper() -> None:
    """6 weights take one word, 1 + 4 + 8; 65 weights take two words, with bits 1 and 64 set."""
    blob = pack_masks(masks())
    (size,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + size])
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()} == {
        "attn.q.prune_mask": ("U64", [1]),
        "mlp.up.prune_mask": ("U64", [2]),
    }
    start, stop = header["attn.q.prune_mask"]["data_offsets"]
    assert struct.unpack("<Q", blob[8 + size + start : 8 + size + stop]) == (13,)
    start, stop = header["mlp.up.prune_mask"]["data_offsets"]
    assert struct.unpack("<2Q", blob[8 + size + start : 8 + size + stop]) == (2, 1)


def test_masks_come_back_as_they_were() -> None:
    found = unpack_masks(BLOCK, pack_masks(masks()))
    assert list(found) == ["attn.q", "mlp.up"]
    for name, mask in masks().items():
        assert found[name].dtype == torch.bool
        assert torch.equal(found[name], mask)


def test_the_same_masks_are_the_same_bytes() -> None:
    assert pack_masks(masks()) == pack_masks(dict(reversed(masks().items())))


def test_a_bit_per_weight_and_little_else() -> None:
    large = pack_masks({"attn.q": torch.zeros(256, 256, dtype=torch.bool)})
    assert 256 * 256 // 8 <= len(large) <= 256 * 256 // 8 + 200


def test_masks_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="a mask of 65 weights has 2 words"):
        unpack_masks(BLOCK, pack_masks(masks() | {"mlp.up": torch.zeros(3, 3, dtype=torch.bool)}))


def test_the_tensors_name() -> None:
    assert mask_name("attn.q") == "attn.q.prune_mask"

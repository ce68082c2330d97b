"""Bits of cut groups: valid pruning steps of a model whose costs are computed by hand."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from espalier.errors import EspalierError
from espalier.hf.structured.selection import lowest
from espalier.messages.blobs.cut_bits import CUT_BITS, bit_specs, pack_bits, read_bits, require_step
from espalier.messages.tensor_blobs import pack_tensors
from espalier.models.groups import Cut, Groups, to_remove
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.settings.pruning import CutSettings

SHAPES = {
    "attn.q": (8, 8), "attn.k": (4, 8), "attn.v": (4, 8), "attn.o": (8, 8),
    "mlp.gate": (6, 8), "mlp.up": (6, 8), "mlp.down": (8, 6),
}  # fmt: skip
"""Two key-value groups with two query heads each, of width 2.

A group has 4 + 2 + 2 rows and 4 columns of 8 weights, which are 96; a channel has 24.
"""
BLOCKS = tuple(
    BlockPlan(index, tuple(LinearPlan(name, name, SHAPES[name]) for name in SHAPES))
    for index in range(2)
)
PLAN = ModelPlan(BLOCKS, 1000, head_dim=2, heads_per_group=2)
GROUPS = Groups.of(PLAN)
TOTAL = 2 * (2 * 96 + 6 * 24)


def job(**changes: Any) -> CutSettings:
    return CutSettings(**{"selection": "global", **changes})


def cut(*numbers: int) -> Cut:
    """Return a cut of these numbers: in each block, 0 and 1 are groups and 2 to 7 channels.

    The groups and channels of the second block are 8 to 15.
    """
    found = GROUPS.none
    found[list(numbers)] = True
    return found


def test_a_pruning_ratio_is_rounded_up() -> None:
    given = [(10, 0.5), (10, 0.51), (3, 1 / 3), (0, 0.5)]
    assert [to_remove(total, share) for total, share in given] == [5, 6, 1, 0]


def test_groups_are_ordered_block_by_block() -> None:
    assert GROUPS.costs.tolist() == [96, 96, *[24] * 6] * 2
    assert GROUPS.pools.tolist() == [0, 0, *[1] * 6, 2, 2, *[3] * 6]
    assert GROUPS.ratio(cut(0, 10)) == 120 / TOTAL
    assert GROUPS.wanted(job(pruning_ratio=0.5)) == 0.5


def test_bits_travel_and_come_back() -> None:
    found = read_bits(GROUPS, pack_bits(cut(1, 2, 7, 15)))
    assert np.flatnonzero(found).tolist() == [1, 2, 7, 15]
    assert bit_specs(GROUPS)[CUT_BITS].shape == (1,)
    assert found[GROUPS.at(0, "groups")].tolist() == [False, True]
    assert found[GROUPS.at(1, "channels")].tolist() == [False] * 5 + [True]
    structure = GROUPS.structure(found)
    assert structure.blocks[0].groups == (0,)
    assert structure.blocks[0].channels == (1, 2, 3, 4)
    assert structure.blocks[1].channels == (0, 1, 2, 3, 4)
    assert not structure.cuts_residual


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (
            pack_tensors({CUT_BITS: np.zeros(2, np.uint64)}),
            "not the bits of this model's 16 groups and channels",
        ),
        (pack_tensors({"cut": np.zeros(1, np.uint64)}), "not the bits of this model's 16"),
        (pack_tensors({CUT_BITS: np.zeros(1, np.int64)}), "not the bits of this model's 16"),
        (
            pack_tensors({CUT_BITS: np.array([1 << 16], np.uint64)}),
            "bits are set beyond the last group",
        ),
        (pack_bits(cut(0, 1)), "all groups of block 0 are cut, one must stay"),
        (pack_bits(cut(*range(10, 16))), "all channels of block 1 are cut, one must stay"),
        (b"\xff" * 40, "not a safetensors blob"),
        (b"", "not a safetensors blob"),
    ],
)
def test_other_bits_are_refused(blob: bytes, words: str) -> None:
    with pytest.raises(EspalierError, match=words):
        read_bits(GROUPS, blob)


@pytest.mark.parametrize(
    ("before", "after", "share", "words"),
    [
        # 72 exceeds 60 by less than one more channel of 24.
        ((), (2, 3, 4), 60 / TOTAL, ""),
        ((), (2, 3, 4), 72 / TOTAL, ""),
        ((), (2, 3, 4), 72.1 / TOTAL, "ratio is below the requested"),
        ((), (2, 3, 4), 48 / TOTAL, "ratio is above the requested"),
        # One group may be cut, whatever it costs.
        ((), (0,), 1 / TOTAL, ""),
        # The total is 120; the group may have been cut last.
        ((), (0, 2), 25 / TOTAL, ""),
        ((), (0, 2), 24 / TOTAL, "ratio is above the requested"),
        ((), (0, 8), 1 / TOTAL, "ratio is above the requested"),
        ((2,), (3, 4, 5), 60 / TOTAL, "are present again"),
        # A device that lost its measurements repeats its cut.
        ((2, 3), (2, 3), 0.5, ""),
        # No more parameters were asked for.
        ((2, 3), (2, 3, 4), 48 / TOTAL, "ratio is above the requested"),
        ((2, 3), (2, 3, 4), 49 / TOTAL, ""),
    ],
)
def test_a_step_comes_to_the_share_within_a_group(
    before: Any, after: Any, share: float, words: str
) -> None:
    if not words:
        require_step(GROUPS, cut(*before), cut(*after), share, job())
        return
    with pytest.raises(EspalierError, match=words):
        require_step(GROUPS, cut(*before), cut(*after), share, job())


def test_separate_kinds_each_reach_share() -> None:
    """A quarter of 192 is one group and a quarter of 144 is two channels, in each block."""
    kinds = job(selection="kind")
    step = partial(require_step, GROUPS)
    step(cut(), cut(0, 2, 3, 9, 14, 15), 0.25, kinds)
    with pytest.raises(EspalierError, match="ratio is below the requested"):
        step(cut(), cut(0, 2, 3, 9, 14), 0.25, kinds)
    with pytest.raises(EspalierError, match="ratio is above the requested"):
        step(cut(), cut(0, 2, 3, 4, 9, 14, 15), 0.25, kinds)
    assert GROUPS.reaches(cut(0, 2, 3, 9, 14, 15), 0.25, kinds)
    assert not GROUPS.reaches(cut(0, 2, 3, 9, 14), 0.25, kinds)
    assert GROUPS.reaches(cut(0, 2, 3, 9, 14), 0.25, job())
    # A quarter of 336 is 84.
    blocks = job(selection="block")
    step(cut(), cut(0, 10, 11, 12, 13), 0.25, blocks)
    with pytest.raises(EspalierError, match="ratio is below the requested"):
        step(cut(), cut(0, 10, 11, 12), 0.25, blocks)


def test_kept_multiple_widens_bounds() -> None:
    """4 or 2 of 6 channels stay, so a cut of one channel (1/8 of 144) becomes two."""
    multiple = job(selection="kind", channel_multiple=2)
    require_step(GROUPS, cut(), cut(0, 2, 3, 8, 10, 11), 1 / 8, multiple)
    with pytest.raises(EspalierError, match="block 1 are not a multiple of 2"):
        require_step(GROUPS, cut(), cut(0, 2, 3, 8, 10), 1 / 8, multiple)
    with pytest.raises(EspalierError, match="ratio is above the requested"):
        require_step(GROUPS, cut(), cut(0, 2, 3, 4, 5, 8, 10, 11), 1 / 8, multiple)


def test_exhausted_device_reaches_any_share() -> None:
    """A multiple of 4 keeps 4 of 6 channels, and one group of two stays."""
    chosen = job(channel_multiple=4)
    assert GROUPS.reaches(cut(0, 2, 3, 8, 10, 11), 0.9, chosen)
    assert not GROUPS.reaches(cut(0, 2, 3, 10, 11), 0.9, chosen)
    assert not GROUPS.reaches(cut(0, 2, 3, 8, 10), 0.9, chosen)
    blocks = job(channel_multiple=4, selection="block")
    assert not GROUPS.reaches(cut(0, 2, 3), 0.9, blocks)
    assert GROUPS.reaches(cut(0, 2, 3, 8, 10, 11), 0.9, blocks)
    assert GROUPS.reaches(cut(0, 2, 3, 4, 5, 6, 8, 10, 11, 12, 13, 14), 0.99, job())
    assert not GROUPS.reaches(cut(0, 2, 3, 4, 5, 6, 8, 10, 11, 12, 13), 0.99, job())


@pytest.mark.parametrize("selection", ["global", "block", "kind"])
@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_honest_cut_is_always_a_valid_step(selection: str, multiple: int) -> None:
    """Every cut of an honest device is valid, for any scores and any growth of the ratio."""
    generator = np.random.default_rng(multiple)
    chosen = job(selection=selection, channel_multiple=multiple, pruning_ratio=0.45)
    for _ in range(60):
        before = GROUPS.none
        share = 0.0
        for _ in range(4):
            share = min(0.45, share + float(generator.choice([0.0, 0.01, 0.1, 0.3])))
            if GROUPS.reaches(before, share, chosen):
                continue
            # Some scores are equal.
            values = np.where(generator.random(16) < 0.3, 0.5, generator.random(16))
            after = lowest(GROUPS, torch.from_numpy(values), chosen, share, before)
            require_step(GROUPS, before, after, share, chosen)
            before = read_bits(GROUPS, pack_bits(after))

"""Tensors of the mask generator that clients share (SFT-P, section 3.2): names and shapes, by the model's plan.

For each gate, that is kind of lane and block, ``h = GELU(norm(trunk([embedding; code])))`` and ``logits = head h``. Codes,
trunk and norm lie in a blob of their own, heads in those of their blocks, or ``shared`` ones, one per kind of lane, beside
the trunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from espalier.wire.payload import block_key
from espalier.wire.plan import ModelPlan
from espalier.wire.structure import LANES, units_of

GENERATOR_KEY = "generator"
"""Blob of what is no block's."""
PREFIX = "mask."
"""How canonical names of the generator's tensors begin."""
CODES = f"{PREFIX}codes"
TRUNK = f"{PREFIX}trunk.weight"
TRUNK_BIAS = f"{PREFIX}trunk.bias"
NORM = f"{PREFIX}norm.weight"
NORM_BIAS = f"{PREFIX}norm.bias"

Heads = Literal["per-gate", "shared"]


def head_name(kind: str) -> str:
    """Canonical name of the head for a kind of lane."""
    return f"{PREFIX}{kind}.head"


@dataclass(frozen=True)
class GeneratorShape:
    """How wide a generator is."""

    embedding: int
    """Numbers of a client's own embedding (d_e)."""
    code: int
    """Numbers of a gate's learned code (d_l)."""
    width: int
    heads: Heads

    def shapes(self, plan: ModelPlan) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shapes of all tensors, by blob key and canonical name; a head is (lanes, width)."""
        found: dict[str, dict[str, tuple[int, ...]]] = {
            block_key(block.index): {} for block in plan.blocks
        }
        common = found[GENERATOR_KEY] = {
            CODES: (len(plan.blocks) * len(LANES), self.code),
            TRUNK: (self.width, self.embedding + self.code),
            TRUNK_BIAS: (self.width,),
            NORM: (self.width,),
            NORM_BIAS: (self.width,),
        }
        for block in plan.blocks:
            for kind in LANES:
                of = found[block_key(block.index)] if self.heads == "per-gate" else common
                of[head_name(kind)] = (getattr(units_of(plan, block), kind), self.width)
        return {key: tensors for key, tensors in found.items() if tensors}

    def head_key(self, block: int) -> str:
        """Blob of a block's heads."""
        return block_key(block) if self.heads == "per-gate" else GENERATOR_KEY


def num_parameters(shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> int:
    """Numbers of a generator of these shapes."""
    total = 0
    for tensors in shapes.values():
        for shape in tensors.values():
            size = 1
            for side in shape:
                size *= side
            total += size
    return total

"""Names and shapes of the shared mask generator's tensors (SFT-P, section 3.2).

A gate belongs to one block and one kind of residual dimensions. For each gate the generator
computes ``h = GELU(norm(trunk([embedding; budget; code])))`` and ``logits = head h``; the client's
budget is an input only if the settings say so. Codes, trunk and norm are in one blob. Heads are in
the blobs of their blocks, or with ``heads = "shared"`` one per kind is in the blob of the trunk.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from espalier.models.plan import ModelPlan, block_key
from espalier.models.structure import RESIDUAL_KINDS, sizes_of

GENERATOR_KEY = "generator"
"""Key of the blob with the tensors that belong to no block."""
PREFIX = "mask."
"""Prefix of the canonical names of the generator's tensors."""
CODES = f"{PREFIX}codes"
TRUNK = f"{PREFIX}trunk.weight"
TRUNK_BIAS = f"{PREFIX}trunk.bias"
NORM = f"{PREFIX}norm.weight"
NORM_BIAS = f"{PREFIX}norm.bias"

Heads = Literal["per-gate", "shared"]


def head_name(kind: str) -> str:
    """Return the canonical name of the head for a kind of residual dimensions."""
    return f"{PREFIX}{kind}.head"


@dataclass(frozen=True)
class GeneratorShape:
    """Sizes of a generator."""

    embedding: int
    """Size of a client's own embedding (d_e)."""
    code: int
    """Size of a gate's learned code (d_l)."""
    width: int
    """Output size of the trunk."""
    heads: Heads
    """One head per gate, or one per kind that all blocks share."""
    budget: int = 0
    """Number of inputs for the client's budget: 0 or 1."""

    def shapes(self, plan: ModelPlan) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return the shapes of all tensors by blob key and canonical name.

        A head has the shape (residual dimensions, width).
        """
        shapes: dict[str, dict[str, tuple[int, ...]]] = {
            block_key(block.index): {} for block in plan.blocks
        }
        generator_shapes = shapes[GENERATOR_KEY] = {
            CODES: (len(plan.blocks) * len(RESIDUAL_KINDS), self.code),
            TRUNK: (self.width, self.embedding + self.budget + self.code),
            TRUNK_BIAS: (self.width,),
            NORM: (self.width,),
            NORM_BIAS: (self.width,),
        }
        for block in plan.blocks:
            for kind in RESIDUAL_KINDS:
                head_shapes = (
                    shapes[block_key(block.index)] if self.heads == "per-gate" else generator_shapes
                )
                head_shapes[head_name(kind)] = (getattr(sizes_of(plan, block), kind), self.width)
        return {key: tensors for key, tensors in shapes.items() if tensors}

    def head_key(self, block: int) -> str:
        """Return the key of the blob with a block's heads."""
        return block_key(block) if self.heads == "per-gate" else GENERATOR_KEY


def num_parameters(shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> int:
    """Return the number of parameters of a generator with these shapes."""
    return sum(math.prod(shape) for tensors in shapes.values() for shape in tensors.values())

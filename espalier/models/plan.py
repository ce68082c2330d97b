"""Model plan: the prunable matrices of each decoder block. Every contract is a function of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearPlan:
    """Prunable matrix of a block."""

    name: str
    """Canonical name, which is the same in every model family, for instance ``attn.q``."""
    parameter: str
    """Name of the weight tensor in the model's files."""
    shape: tuple[int, int]
    """(out_features, in_features)"""
    dtype: str = "F32"
    """Dtype of the weights in the model's files, by its safetensors name."""
    bias: bool = False
    """True if the matrix has a bias, one number per row. No method prunes biases separately."""

    @property
    def bias_parameter(self) -> str:
        """Name of the bias in the model's files, whether there is one or not."""
        return self.parameter.removesuffix("weight") + "bias"

    @property
    def num_weights(self) -> int:
        """Number of weights of the matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def num_parameters(self) -> int:
        """Number of weights and bias values."""
        return self.num_weights + self.shape[0] * self.bias


@dataclass(frozen=True)
class BlockPlan:
    """Decoder block."""

    index: int
    linears: tuple[LinearPlan, ...]
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Canonical name, such as ``norm.mlp.weight``, and shape of each parameter of a norm."""

    @property
    def num_weights(self) -> int:
        """Number of prunable weights of the block."""
        return sum(linear.num_weights for linear in self.linears)

    @property
    def num_parameters(self) -> int:
        """Number of all parameters of the block."""
        return sum(linear.num_parameters for linear in self.linears) + sum(
            math.prod(shape) for _, shape in self.others
        )

    def linear(self, name: str) -> LinearPlan:
        """Return the matrix with this canonical name.

        Raises KeyError if the model family has no such matrix.
        """
        return {linear.name: linear for linear in self.linears}[name]


@dataclass(frozen=True)
class ModelPlan:
    """All decoder blocks of a model, in order."""

    blocks: tuple[BlockPlan, ...]
    num_parameters: int
    """Number of all parameters of the model, prunable or not; tied ones count once."""
    head_features: int = 0
    """Number of input features of an encoder's classification head; 0 for a decoder."""
    head_dim: int = 1
    """Number of rows of a query, key or value matrix that belong to one attention head."""
    heads_per_group: int = 1
    """Number of query heads that share a key-value head; 1 in multi-head attention."""
    heads_prunable: bool = True
    """False if no heads can be removed; channels can."""

    @property
    def num_weights(self) -> int:
        """Number of prunable weights of the model."""
        return sum(block.num_weights for block in self.blocks)

    @property
    def linears(self) -> list[LinearPlan]:
        """All prunable matrices, in block order."""
        return [linear for block in self.blocks for linear in block.linears]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shapes of all prunable matrices, in block order."""
        return [linear.shape for linear in self.linears]

    def block(self, key: str) -> BlockPlan:
        """Return the block whose blob has this key, which must exist."""
        return self.blocks[int(key.removeprefix("block-"))]


PlanOf = Callable[[], ModelPlan]
"""Function that returns the plan of the clients' model; it is called only if the plan is needed."""


def cut_into_parts(block_bytes: list[int], part_bytes: int) -> list[range]:
    """Group whole blocks, in order, into parts of at most ``part_bytes``.

    A larger block is a part of its own.
    """
    parts: list[range] = []
    start = 0
    size = 0
    for index, block in enumerate(block_bytes):
        if index > start and size + block > part_bytes:
            parts.append(range(start, index))
            start = index
            size = 0
        size += block
    parts.append(range(start, len(block_bytes)))
    return parts


def block_key(index: int) -> str:
    """Return the key of a decoder block's blob."""
    return f"block-{index:04d}"


def block_of_key(key: str) -> int | None:
    """Return the number of the decoder block with this blob key; None for other blobs."""
    number = key.removeprefix("block-")
    return int(number) if number.isdecimal() and block_key(int(number)) == key else None

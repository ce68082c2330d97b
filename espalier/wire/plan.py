"""The plan of a model: which matrices of which decoder blocks can be pruned. Every contract is a function of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearPlan:
    """One prunable matrix of a block."""

    name: str
    """Canonical name, the same in every model family, for instance ``attn.q``."""
    parameter: str
    """Name of the weight tensor in the model's files."""
    shape: tuple[int, int]
    """(out_features, in_features)"""
    dtype: str = "F32"
    """Dtype of the weights in the model's files, by safetensors' name."""
    bias: bool = False
    """Whether the matrix has a bias: a number for each of its rows, which no method prunes by itself."""

    @property
    def num_weights(self) -> int:
        """Number of weights of the matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def num_parameters(self) -> int:
        """Weights, and numbers of the bias."""
        return self.num_weights + self.shape[0] * self.bias


@dataclass(frozen=True)
class BlockPlan:
    """One decoder block."""

    index: int
    linears: tuple[LinearPlan, ...]
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Parameters beside the matrices and their biases, those of norms: canonical name, as ``norm.mlp.weight``, and shape."""

    @property
    def num_weights(self) -> int:
        """Number of prunable weights of the block."""
        return sum(linear.num_weights for linear in self.linears)

    @property
    def num_parameters(self) -> int:
        """All parameters of the block."""
        return sum(linear.num_parameters for linear in self.linears) + sum(
            math.prod(shape) for _, shape in self.others
        )

    def linear(self, name: str) -> LinearPlan:
        """The matrix of a canonical name; ``KeyError`` where the family has none."""
        return {linear.name: linear for linear in self.linears}[name]


@dataclass(frozen=True)
class ModelPlan:
    """All decoder blocks of a model, in order."""

    blocks: tuple[BlockPlan, ...]
    num_parameters: int
    """All parameters of the model, prunable or not; tied ones once."""
    head_features: int = 0
    """Features that an encoder's classification head reads; 0 for a decoder, which has none."""
    head_dim: int = 1
    """Rows of a query, key or value matrix that are one attention head."""
    heads_per_group: int = 1
    """Query heads that share a head of keys and values; 1 in multi-head attention."""

    @property
    def num_weights(self) -> int:
        """Number of prunable weights of the model."""
        return sum(block.num_weights for block in self.blocks)


PlanOf = Callable[[], ModelPlan]
"""Gives the plan of the model that clients work on, to whoever turns out to need it."""


def cut_into_parts(block_bytes: list[int], part_bytes: int) -> list[range]:
    """Group whole blocks, in order, into parts of at most ``part_bytes``; a larger block is a part of its own."""
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

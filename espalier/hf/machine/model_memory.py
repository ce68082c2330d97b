"""How large a model is, from its configuration alone: no weight is read, none is made."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from espalier.hf.families import Family, family_of
from espalier.hf.nf4.matrices import nf4_bytes
from espalier.hf.opening.config_file import CONFIG, explained, read_config
from espalier.hf.opening.opened import check_labels, skeleton_of


@dataclass(frozen=True)
class Footprint:
    """Parameters of a model by their place, a tied one once, where it is met first: with the embeddings."""

    matrices: tuple[tuple[int, int], ...]
    """Shapes of the blocks' linears: what is quantised."""
    embeddings: int
    head: int
    """Of a decoder its language-model head, 0 if tied; of an encoder the classification head, which is float32 always."""
    others: int
    """Norms, biases, and projections beside the blocks."""
    trained_head: bool
    """Whether the head is one for classification."""

    @property
    def linears(self) -> int:
        """Number of weights of the blocks' linears."""
        return sum(math.prod(shape) for shape in self.matrices)

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.linears + self.embeddings + self.head + self.others

    def weight_bytes(
        self, base: str, dtype: torch.dtype = torch.bfloat16, double_quantisation: bool = True
    ) -> int:
        """Bytes of the weights as ``load_whole`` holds them; activations, gradients and optimiser state come on top.

        Parameters
        ----------
        base : ``float32``, ``bfloat16`` or ``nf4``
        dtype : with ``nf4``, of what is not quantised
        double_quantisation : with ``nf4``, of the scales
        """
        size = {"float32": 4, "bfloat16": 2, "nf4": dtype.itemsize}[base]
        head = self.head * (4 if self.trained_head else size)
        linears = size * self.linears
        if base == "nf4":
            linears = nf4_bytes(self.matrices, double_quantisation)
        return linears + head + size * (self.embeddings + self.others)


def footprint(source: Mapping[str, Any] | Path, num_labels: int | None = None) -> Footprint:
    """Count the parameters of a model.

    Parameters
    ----------
    source : a configuration, as ``config.json`` holds it, or a directory that has one, with or without weights
    num_labels : of an encoder, the number of classes; None for a decoder

    Raises
    ------
    Mistake
        The configuration cannot be read, is of a kind that is not supported, or ``num_labels`` does not go with it.
    """
    from transformers import AutoConfig

    config, where = (source, "the configuration") if isinstance(source, Mapping) else _read(source)
    family = family_of(config, where)
    check_labels(family, num_labels, where)
    with explained(where):
        known = AutoConfig.for_model(**config)
    return _count(family, skeleton_of(known, family, num_labels, where))


def _read(directory: Path) -> tuple[Mapping[str, Any], str]:
    path = directory / CONFIG
    return read_config(path), str(path)


def _count(family: Family, skeleton: nn.Module) -> Footprint:
    endings = tuple(f".{path}.weight" for path in family.linears.values())
    heads = (f"{family.head}.", *(f"{path}." for path in family.head_linears.values()))
    matrices = []
    embeddings = 0
    head = 0
    others = 0
    for name, parameter in skeleton.named_parameters():
        if name.startswith(f"{family.blocks}.") and name.endswith(endings):
            matrices.append((parameter.shape[0], parameter.shape[1]))
        elif name.startswith(f"{family.embeddings}."):
            embeddings += parameter.numel()
        elif name.startswith(heads):
            head += parameter.numel()
        else:
            others += parameter.numel()
    return Footprint(tuple(matrices), embeddings, head, others, family.kind == "encoder")

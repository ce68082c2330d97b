"""Memory of a model's weights, computed from its configuration; no weight is read or created."""

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
from espalier.hf.opening.opened_model import check_labels, skeleton_of


@dataclass(frozen=True)
class Footprint:
    """Number of a model's parameters by place.

    A tied parameter counts once, at the place where it comes first: the embeddings.
    """

    matrices: tuple[tuple[int, int], ...]
    """Shapes of the blocks' linears, which can be quantised."""
    embeddings: int
    head: int
    """Parameters of the head.

    For a decoder this is the language-model head, 0 if it is tied. For an encoder it is the
    classification head, which is always float32.
    """
    others: int
    """Parameters of norms, biases, and projections outside the blocks."""
    trained_head: bool
    """True if the head is a classification head."""

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
        """Return the size in bytes of the weights in the format of ``load_whole``.

        Activations, gradients and optimiser state are not included.

        Parameters
        ----------
        base : ``float32``, ``bfloat16`` or ``nf4``
        dtype : dtype of the weights that are not quantised; used only with ``nf4``
        double_quantisation : True if scales are quantised; used only with ``nf4``
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
    source : content of ``config.json``, or a directory that has this file, with or without weights
    num_labels : number of classes of an encoder; None for a decoder

    Raises
    ------
    InputError
        The configuration cannot be read or is of an unsupported kind, or ``num_labels`` does not
        match it.
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

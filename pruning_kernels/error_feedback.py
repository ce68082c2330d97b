"""Error feedback: what a coarse code loses in one round is added to the values of the next (Seide et al. 2014).

Without it the error of a value that changes little is the same in every round and adds up; with it the sum of all that was
decoded differs from the sum of all values by the last residual alone (Karimireddy et al. 2019, algorithm 1). The residual
belongs to whoever encodes: it is as private as the values, and each receiver of its own code has one of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pruning_kernels import nf4
from pruning_kernels.nf4 import Nf4
from pruning_kernels.scores import NotFiniteError

Code = TypeVar("Code")


@dataclass(frozen=True)
class Codec(Generic[Code]):
    """How values become a code that takes less room, and values again."""

    encode: Callable[[Tensor], Code]
    decode: Callable[[Code, Sequence[int]], Tensor]
    """Of a code and the shape of the values; float32."""


def encode_with_feedback(
    values: Tensor, residual: Tensor, codec: Codec[Code]
) -> tuple[Code, Tensor]:
    """Code of ``values + residual``, and what it loses.

    Parameters
    ----------
    values : any float dtype
    residual : float32, shaped like ``values``: what the call before returned, zeros at first
    codec : ``NF4`` or ``BFLOAT16``

    Returns
    -------
    code
        Of the sum, in float32.
    residual : Tensor
        float32, ``values + residual - decode(code)``.

    Raises
    ------
    NotFiniteError
        A sum is NaN or infinite, or has no finite code.
    ValueError
        The shapes differ.
    """
    if values.shape != residual.shape:
        raise ValueError(
            f"the residual of values {tuple(values.shape)} is shaped like them, got"
            f" {tuple(residual.shape)}"
        )
    wanted = values.detach().to(torch.float32) + residual
    code = codec.encode(wanted)
    return code, wanted - codec.decode(code, wanted.shape)


def _to_bfloat16(values: Tensor) -> Tensor:
    """Round to nearest, ties to even."""
    rounded = values.to(torch.bfloat16)
    if not bool(torch.isfinite(rounded).all()):
        raise NotFiniteError(
            "NaN or infinity, or a number beyond bfloat16; lower the learning rate or check the"
            " data"
        )
    return rounded


def _from_bfloat16(code: Tensor, shape: Sequence[int]) -> Tensor:
    return code.to(torch.float32).reshape(tuple(shape))


NF4: Codec[Nf4] = Codec(nf4.encode, nf4.decode)
BFLOAT16: Codec[Tensor] = Codec(_to_bfloat16, _from_bfloat16)

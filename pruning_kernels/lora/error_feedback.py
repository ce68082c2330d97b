"""Error feedback: the quantisation error of a round is added to the next values.

Source: Seide et al. 2014. Without feedback the error of a value that changes little is the same in
every round and accumulates. With it the sum of all decoded values differs from the sum of all
values only by the last residual (Karimireddy et al. 2019, algorithm 1). The residual stays with the
sender. It is as private as the values, and a sender keeps one residual per receiver that gets its
own codes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pruning_kernels.lora import nf4
from pruning_kernels.lora.nf4 import Nf4
from pruning_kernels.selection.scores import NotFiniteError

Code = TypeVar("Code")


@dataclass(frozen=True)
class Codec(Generic[Code]):
    """Pair of functions that encode values in fewer bytes and decode them."""

    encode: Callable[[Tensor], Code]
    decode: Callable[[Code, Sequence[int]], Tensor]
    """Function of a code and the shape of the values; returns float32."""


def encode_with_feedback(
    values: Tensor, residual: Tensor, codec: Codec[Code]
) -> tuple[Code, Tensor]:
    """Return the code of ``values + residual`` and the new residual.

    Parameters
    ----------
    values : any float dtype
    residual : float32, shaped like ``values``: residual of the previous call, at first zeros
    codec : ``NF4`` or ``BFLOAT16``

    Returns
    -------
    code
        Code of the sum, which is computed in float32.
    residual : Tensor
        float32, ``values + residual - decode(code)``.

    Raises
    ------
    NotFiniteError
        A sum is NaN or infinite, or has no finite code.
    """
    # In float32, also for bfloat16 values: a residual is often smaller than their last place.
    corrected = values.detach().to(torch.float32) + residual
    code = codec.encode(corrected)
    return code, corrected - codec.decode(code, corrected.shape)


def _to_bfloat16(values: Tensor) -> Tensor:
    """Round to the nearest bfloat16, ties to even."""
    rounded = values.to(torch.bfloat16)
    if not bool(torch.isfinite(rounded).all()):
        raise NotFiniteError(
            "NaN or infinity, or a number beyond bfloat16; lower the learning rate or check the"
            " data"
        )
    return rounded


NF4: Codec[Nf4] = Codec(nf4.encode, nf4.decode)
BFLOAT16: Codec[Tensor] = Codec(
    _to_bfloat16, lambda code, shape: code.to(torch.float32).reshape(tuple(shape))
)

"""Tensors of a GGUF file: names, order of rows and number formats."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InputError
from espalier.hf.files.checkpoint import STORED_DTYPES
from espalier.hf.gguf.architecture import Architecture

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPES = get_args(Dtype)
OF_FILES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float32"}
"""Format for matrices that safetensors files hold in a format; F64 has none in GGUF."""


@dataclass(frozen=True)
class Place:
    """Place of a tensor in a GGUF file."""

    name: str
    heads: int | None = None
    """Number of heads whose rows are reordered; None leaves the rows in their order."""


def place_of(architecture: Architecture, names: Any, parameter: str) -> Place:
    """Return the place of a model's tensor.

    Parameters
    ----------
    architecture : architecture of the model
    names : ``gguf.get_tensor_name_map`` of the architecture
    parameter : name of the tensor in the model, such as ``model.layers.0.self_attn.q_proj.weight``
    """
    name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise InputError(
            f"{architecture.model.directory}: llama.cpp's architecture {architecture.name!r} has"
            f" no tensor for {parameter}; load the model with transformers"
        )
    split_name = architecture.model.family.block_of(parameter)
    if split_name is None or not architecture.rotates_neighbours:
        return Place(name)
    _, index, path = split_name
    module = path.rpartition(".")[0]
    linears = architecture.model.family.linears
    rotated = {linears[linear]: linear for linear in ("attn.q", "attn.k")}
    return Place(name, architecture.heads(index, rotated[module]) if module in rotated else None)


def reordered(value: "Tensor", heads: int | None) -> "Tensor":
    """Reorder the rows of each head so that the two rows of a rotation are neighbours.

    transformers rotates row ``i`` of a head with row ``i + head_dim / 2``.

    Parameters
    ----------
    value : (heads * head_dim, ...)
    heads : number of heads; None returns the value unchanged
    """
    if heads is None:
        return value
    rows = value.shape[0] // heads
    halves = value.reshape(heads, 2, rows // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


def in_format(value: "Tensor", name: str, dtype: str) -> NDArray[Any]:
    """Return the values of a tensor in a number format of GGUF; bfloat16 as bytes.

    Raises InputError if a value is too large for float16.
    """
    from gguf import GGMLQuantizationType, quantize

    values = value.float().numpy()
    if dtype == "float32":
        return np.ascontiguousarray(values)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float16)
        if not np.isfinite(rounded).all():
            raise InputError(
                f"--dtype float16: {name} has values beyond 65504; choose bfloat16 or float32"
            )
        return rounded
    return quantize(np.ascontiguousarray(values), GGMLQuantizationType.BF16)


def format_of(shape: tuple[int, ...], dtype: str) -> str:
    """Return the format of a tensor: vectors such as norms are float32, as llama.cpp needs."""
    return dtype if len(shape) > 1 else "float32"


def announce(writer: "GGUFWriter", name: str, shape: tuple[int, ...], dtype: str) -> None:
    """Add the name, shape and format of a tensor whose values are written later."""
    from gguf import GGMLQuantizationType

    num_bytes = math.prod(shape) * (4 if dtype == "float32" else 2)
    # GGUF has the names of safetensors.
    kind = GGMLQuantizationType[STORED_DTYPES[dtype]]
    writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, kind)


def rope_factors(architecture: Architecture) -> Iterator[tuple[str, "Tensor"]]:
    """Yield the tensor with factors of the frequencies, (head_dim / 2,), of LLaMA 3's rotation."""
    import torch

    rope = architecture.rope
    if rope.get("rope_type") != "llama3":
        return
    half = architecture.model.plan.head_dim // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    wavelengths = 2 * math.pi * float(rope["rope_theta"]) ** exponents
    before = rope["original_max_position_embeddings"]
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    smooth = ((before / wavelengths - low) / (high - low)).clamp(0, 1)
    # The frequency is divided by these factors, and interpolated linearly in between.
    factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    yield "rope_freqs.weight", factors.float()

"""Layout of NF4 matrices in safetensors files, as bitsandbytes and transformers read and write it.

``config.json`` describes the quantisation under ``quantization_config``. A matrix of n weights is
stored as ``<parameter>``, shape (n / 2, 1), with two codes per byte. Further tensors have the same
name with a suffix:

- ``absmax`` and ``quant_map``
- ``nested_absmax`` and ``nested_quant_map``, with double quantisation
- ``quant_state.bitsandbytes__nf4``, a JSON text that holds the shape

``Nf4Matrix`` documents the first four. This module does not import torch, because processes that
only open files do without it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.environment.bounded_json import read_json
from espalier.errors import InputError

BLOCK = 64
"""Number of consecutive weights of a row that share a scale."""
NESTED_BLOCK = 256
"""Number of scales that share a second-level scale, with double quantisation."""
LEVELS = 16
NESTED_LEVELS = 256

CONFIG_KEY = "quantization_config"
"""Key of ``config.json`` that describes the quantisation."""
STATE = "quant_state.bitsandbytes__nf4"
OTHER_STATE = "quant_state.bitsandbytes__fp4"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE)
"""Suffixes of the tensors that are stored next to the codes of a matrix."""
STATE_BYTES = 256
"""Size in bytes of a quantisation state that Espalier writes.

The JSON text is shorter and is padded with spaces, which JSON allows. The sizes of all tensors are
therefore known before the first one is quantised, and floats are aligned to multiples of their
size.
"""
LONGEST_STATE = 4096
"""Maximum size in bytes of a quantisation state that is read."""


@dataclass(frozen=True)
class HeldMatrix:
    """Content of the quantisation state of a matrix."""

    shape: tuple[int, int]
    """Shape (out_features, in_features)."""
    offset: float | None
    """Mean of the scales, representable in float32; None without double quantisation."""


def quantisation_config(
    double_quantisation: bool, dtype: str, left_out: Sequence[str]
) -> dict[str, Any]:
    """Return the value that transformers writes under ``quantization_config``.

    Parameters
    ----------
    double_quantisation : True if the scales are quantised too
    dtype : name of the torch dtype in which the linears compute
    left_out : module paths of the linears that are not quantised
    """
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double_quantisation,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(left_out),
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }


def is_doubly_quantised(document: Any, where: str) -> bool:
    """Return whether a ``quantization_config`` quantises the scales too.

    Parameters
    ----------
    document : value of ``quantization_config``
    where : name of the configuration file, for error messages

    Raises
    ------
    InputError
        The model is not quantised to NF4 by bitsandbytes. The message names the key that differs.
    """
    known = document if isinstance(document, Mapping) else {}
    # Files may leave out keys with the default value, for which None stands.
    wanted: dict[str, tuple[Any, ...]] = {
        "quant_method": ("bitsandbytes",),
        "load_in_8bit": (False, None),
        "load_in_4bit": (True,),
        "bnb_4bit_quant_type": ("nf4",),
        "bnb_4bit_quant_storage": ("uint8", None),
        "bnb_4bit_use_double_quant": (True, False, None),
    }
    for key, values in wanted.items():
        if known.get(key) not in values:
            raise InputError(
                f"{where}: {CONFIG_KEY} is set, with {key} = {known.get(key)!r}; name the model"
                " before quantisation, or a model in NF4 of bitsandbytes (load_in_4bit,"
                " bnb_4bit_quant_type = 'nf4')"
            )
    return bool(known.get("bnb_4bit_use_double_quant"))


def stored_parts(
    shape: tuple[int, int], double_quantisation: bool
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return the tensors that belong to the codes of a matrix, except its quantisation state.

    Returns
    -------
    dict
        Suffix of the tensor name -> (safetensors dtype, shape, number of bytes)
    """
    blocks = shape[0] * shape[1] // BLOCK
    table: dict[str, tuple[str, tuple[int, ...], int]] = {
        "quant_map": ("F32", (LEVELS,), 4 * LEVELS)
    }
    if not double_quantisation:
        return {"absmax": ("F32", (blocks,), 4 * blocks)} | table
    # Rounded up.
    nested = -(-blocks // NESTED_BLOCK)
    return {
        "absmax": ("U8", (blocks,), blocks),
        **table,
        "nested_absmax": ("F32", (nested,), 4 * nested),
        "nested_quant_map": ("F32", (NESTED_LEVELS,), 4 * NESTED_LEVELS),
    }


def held_matrix(state: bytes, double_quantisation: bool) -> HeldMatrix:
    """Parse the quantisation state of a matrix.

    Raises
    ------
    ValueError
        The state is not a JSON text, or it describes another quantisation than NF4 in blocks of 64.
    """
    said = read_json(state)
    shape = tuple(said["shape"])
    offset = said.get("nested_offset")
    if len(shape) != 2 or not all(type(side) is int and side > 0 for side in shape):
        raise ValueError("it has no shape")
    if (said["quant_type"], said["blocksize"]) != ("nf4", BLOCK):
        raise ValueError(f"it is not NF4 in blocks of {BLOCK}")
    # Blocks must not continue in the next row; see ``require_whole_blocks``.
    if shape[1] % BLOCK:
        raise ValueError(f"its rows are not a multiple of the block size {BLOCK}")
    if double_quantisation != ("nested_blocksize" in said):
        raise ValueError(
            f"{CONFIG_KEY} in config.json disagrees on whether its scales are quantised"
        )
    if double_quantisation:
        if (
            said["nested_blocksize"] != NESTED_BLOCK
            or not isinstance(offset, float)
            or not math.isfinite(offset)
        ):
            raise ValueError("its scales are quantised in an unknown way")
    return HeldMatrix((shape[0], shape[1]), offset if double_quantisation else None)

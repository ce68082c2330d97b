"""How a model's files hold matrices in NF4: as bitsandbytes and transformers write and read them.

``config.json`` says so under ``quantization_config``. A matrix of n weights is ``<parameter>`` (n / 2, 1), two codes to a byte,
and beside it, under names that begin with its own: ``absmax``, ``quant_map``, with double quantisation ``nested_absmax`` and
``nested_quant_map``, and ``quant_state.bitsandbytes__nf4``, a JSON text that has its shape. What the first four mean says
``Nf4Matrix``. Nothing here needs torch: files are opened by processes that do without.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.environment.bounded_json import read_json
from espalier.errors import Mistake

BLOCK = 64
"""Weights that share a scale; they follow each other in a row."""
NESTED_BLOCK = 256
"""Scales that share a scale of their own, with double quantisation."""
LEVELS = 16
NESTED_LEVELS = 256

CONFIG_KEY = "quantization_config"
"""Of ``config.json``."""
STATE = "quant_state.bitsandbytes__nf4"
OTHER_STATE = "quant_state.bitsandbytes__fp4"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE)
"""What lies beside the codes of a matrix."""
STATE_BYTES = 256
"""Of a state that is written here: its text is shorter, and is filled up with spaces, which JSON allows. So the sizes of all
tensors are known before the first is quantised, and floats lie at multiples of their size."""
LONGEST_STATE = 4096
"""Bytes of a state that is read at all."""


@dataclass(frozen=True)
class HeldMatrix:
    """What the state of a matrix says."""

    shape: tuple[int, int]
    """(out_features, in_features)"""
    offset: float | None
    """Mean of the scales, which a float32 holds; None without double quantisation."""


def quantisation_config(
    double_quantisation: bool, dtype: str, left_out: Sequence[str]
) -> dict[str, Any]:
    """What transformers writes under ``quantization_config``.

    Parameters
    ----------
    dtype : in which the linears compute, by torch's name
    left_out : paths of the linears that are not quantised
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
    """Whether the scales are quantised too, by the ``quantization_config`` of a file ``where``.

    Raises
    ------
    Mistake
        The model is quantised in another way than NF4 by bitsandbytes; what differs is named.
    """
    known = document if isinstance(document, Mapping) else {}
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
            raise Mistake(
                f"{where}: {CONFIG_KEY} is set, with {key} = {known.get(key)!r}; name the model as"
                " it was before it was quantised, or one that bitsandbytes holds in NF4"
                " (load_in_4bit, bnb_4bit_quant_type = 'nf4')"
            )
    return bool(known.get("bnb_4bit_use_double_quant"))


def stored_parts(
    shape: tuple[int, int], double_quantisation: bool
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """What lies beside the codes of a matrix but for its state: name -> (safetensors dtype, shape, bytes)."""
    blocks = shape[0] * shape[1] // BLOCK
    table: dict[str, tuple[str, tuple[int, ...], int]] = {
        "quant_map": ("F32", (LEVELS,), 4 * LEVELS)
    }
    if not double_quantisation:
        return {"absmax": ("F32", (blocks,), 4 * blocks)} | table
    nested = -(-blocks // NESTED_BLOCK)
    return {
        "absmax": ("U8", (blocks,), blocks),
        **table,
        "nested_absmax": ("F32", (nested,), 4 * nested),
        "nested_quant_map": ("F32", (NESTED_LEVELS,), 4 * NESTED_LEVELS),
    }


def held_matrix(state: bytes, double_quantisation: bool) -> HeldMatrix:
    """Read the state of a matrix.

    Raises
    ------
    ValueError
        It is no JSON text, or that of a matrix which is quantised otherwise.
    """
    said = read_json(state)
    shape = tuple(said["shape"])
    offset = said.get("nested_offset")
    if len(shape) != 2 or not all(type(side) is int and side > 0 for side in shape):
        raise ValueError("it has no shape")
    if (said["quant_type"], said["blocksize"]) != ("nf4", BLOCK):
        raise ValueError(f"it is no NF4 in blocks of {BLOCK}")
    if shape[1] % BLOCK:
        raise ValueError(f"its rows are no whole number of blocks of {BLOCK}")
    if double_quantisation != ("nested_blocksize" in said):
        raise ValueError(
            f"{CONFIG_KEY} in config.json says otherwise whether its scales are quantised"
        )
    if double_quantisation:
        if (
            said["nested_blocksize"] != NESTED_BLOCK
            or not isinstance(offset, float)
            or not math.isfinite(offset)
        ):
            raise ValueError("its scales are quantised in another way")
    return HeldMatrix((shape[0], shape[1]), offset if double_quantisation else None)

"""Matrices in NF4: 4 bits per weight and one scale per 64 weights.

Source: QLoRA, Dettmers et al. 2023, section 3.

bitsandbytes computes with them and supplies tables and kernels. A matrix gets the same bytes on
every device and with every number of threads, so that all nodes hold the same model. For that,
three steps replace bitsandbytes' ``quantize_4bit``:

- ``nf4.encode`` gives the codes, in stretches of whole blocks as the matrix is read. Its codes are
  those of bitsandbytes on a CPU; on CUDA, values near a midpoint get other codes from bitsandbytes,
  and a block of zeros does not stay zero.
- The mean scale is summed on the CPU in float64. bitsandbytes sums it in float32, where the last
  bits depend on the number of threads.
- The scales are quantised on the CPU.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from espalier.errors import InputError
from espalier.hf.nf4.blocks import BLOCK, LEVELS, NESTED_BLOCK, NESTED_LEVELS
from espalier.models.plan import ModelPlan
from espalier.settings.libraries import WITHOUT_BITSANDBYTES
from pruning_kernels.lora.nf4 import encode

STRETCH = 1 << 20
"""Number of weights that are quantised at a time, a multiple of the block size."""


@dataclass(frozen=True)
class Nf4Matrix:
    """Quantised matrix of n weights, in row-major order, in n / 64 blocks.

    A weight is ``table[code] * scale``, where a code has 4 bits. A scale is ``absmax``, or with
    double quantisation ``nested_table[absmax] * nested_absmax + offset``.
    """

    shape: tuple[int, int]
    """Shape (out_features, in_features)."""
    packed: Tensor
    """Codes, (n / 2, 1), uint8: two per byte, the first one in the upper four bits."""
    absmax: Tensor
    """Scales, (blocks,): float32, or uint8 with double quantisation."""
    nested_absmax: Tensor | None = None
    """Second-level scales, (ceil(blocks / 256),), float32; None without double quantisation."""
    offset: Tensor | None = None
    """Mean of the scales, a float32 scalar; None without double quantisation."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors to store, by name."""
        names = ("packed", "absmax", "nested_absmax", "offset")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}


def silence_bitsandbytes() -> None:
    """Suppress warnings of bitsandbytes about features that Espalier does not use.

    They concern a kernel for AVX512-BF16, and an old part of torch that torch itself imports for
    its compiler. peft imports bitsandbytes too. Flower's simulation shows such warnings.
    """
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    # Setting a level clears the level caches of all loggers, so it is done once.
    if logger.level != logging.ERROR:
        logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is ", DeprecationWarning)


def bitsandbytes() -> Any:
    """Import bitsandbytes and return the module; InputError if it is not installed."""
    silence_bitsandbytes()
    try:
        import bitsandbytes as library
    except ModuleNotFoundError:
        raise InputError(WITHOUT_BITSANDBYTES) from None
    return library


def quantise(
    pieces: Iterable[Tensor],
    shape: tuple[int, int],
    device: torch.device,
    double_quantisation: bool = True,
) -> Nf4Matrix:
    """Quantise a matrix that arrives in pieces, in row-major order.

    Parameters
    ----------
    pieces : flat tensors of any floating dtype; all but the last have a multiple of 64 weights
    shape : (out_features, in_features); see ``require_whole_blocks``
    device : device of the computation and of the result
    double_quantisation : also quantise the scales to 8 bits, in blocks of 256 (QLoRA, section 3,
        "Double Quantization")
    """
    require_whole_blocks(shape)
    functional = bitsandbytes().functional
    weights = shape[0] * shape[1]
    packed = torch.empty(weights // 2, 1, dtype=torch.uint8, device=device)
    absmax = torch.empty(weights // BLOCK, dtype=torch.float32, device=device)
    start = 0
    for piece in pieces:
        # Stretches of whole blocks: their codes do not depend on how the matrix arrives.
        for stretch in piece.view(-1).split(STRETCH):
            codes = encode(stretch.to(device, torch.float32))
            packed[start // 2 : start // 2 + len(codes.packed), 0] = codes.packed
            absmax[start // BLOCK : start // BLOCK + len(codes.absmax)] = codes.absmax
            start += stretch.numel()
    if not double_quantisation:
        return Nf4Matrix(shape, packed, absmax)
    # In float64 the result does not depend on the number of threads.
    offset = absmax.cpu().mean(dtype=torch.float64).to(torch.float32)
    # On the CPU, so that all devices get the same scales.
    scales, state = functional.quantize_blockwise(absmax.cpu() - offset, blocksize=NESTED_BLOCK)
    return Nf4Matrix(shape, packed, scales.to(device), state.absmax.to(device), offset.to(device))


def require_whole_blocks(shape: tuple[int, int], name: str = "a matrix") -> None:
    """Refuse a matrix whose rows are not a whole number of blocks.

    A block would continue in the next row. bitsandbytes quantises such a matrix correctly, but on
    CPUs with AVX-512 it computes with the scales of other blocks. Rows could not be cut out of it
    either. The number of rows is free. Raises InputError if in_features is not a multiple of 64.
    """
    if shape[1] % BLOCK:
        raise InputError(
            f"training.base = 'nf4': {name} has {shape[1]} input features, which is not a"
            f" multiple of {BLOCK}, and cannot be quantised to NF4; set training.base to"
            " 'bfloat16'"
        )


def require_quantisable(plan: ModelPlan) -> None:
    """Raise InputError for a model with a matrix that ``require_whole_blocks`` refuses."""
    for linear in plan.linears:
        require_whole_blocks(linear.shape, linear.parameter)


def tables(device: torch.device) -> dict[str, Tensor]:
    """Return the values of the codes, float32: ``table``, (16,), and ``nested_table``, (256,)."""
    functional = bitsandbytes().functional
    return {
        "table": functional.get_4bit_type("nf4", device=device),
        "nested_table": functional.create_dynamic_map().to(device),
    }


def linear_of(
    matrix: Nf4Matrix, lookup: dict[str, Tensor], compute_dtype: torch.dtype, bias: bool
) -> nn.Module:
    """Return a ``bitsandbytes.nn.Linear4bit`` with a quantised matrix; a bias stays on meta.

    ``lookup`` are the tables of values, which all linears share; ``compute_dtype`` is the dtype of
    the matrix product.
    """
    library = bitsandbytes()
    linear = library.nn.Linear4bit(
        matrix.shape[1],
        matrix.shape[0],
        bias,
        compute_dtype,
        matrix.offset is not None,
        "nf4",
        device="meta",
    )
    # Otherwise a forward pass in evaluation mode on a CPU with AVX512-BF16 repacks the weight in
    # place with other scales, and later dequantisation gives wrong values.
    linear.support_avx512bf16_for_cpu = False
    linear.weight = library.nn.Params4bit(
        # Already quantised: without ``bnb_quantized`` moving it to a device would quantise again.
        matrix.packed,
        requires_grad=False,
        quant_state=state_of(matrix, lookup, compute_dtype),
        blocksize=BLOCK,
        compress_statistics=matrix.offset is not None,
        quant_type="nf4",
        module=linear,
        bnb_quantized=True,
    )
    linear.quant_state = linear.weight.quant_state
    return linear


def dequantised(matrix: Nf4Matrix, lookup: dict[str, Tensor]) -> Tensor:
    """Return the weights, float32, with the shape of the matrix; ``lookup`` are the tables."""
    return bitsandbytes().functional.dequantize_4bit(
        matrix.packed, state_of(matrix, lookup, torch.float32)
    )


def row_reader(packed: Tensor, state: Any) -> Callable[[int, int], Tensor]:
    """Return a function that dequantises some rows, for kernels that work on a few rows at a time.

    The scales, one float32 per 64 weights, are dequantised once and kept.

    ``packed`` and ``state`` are ``linear.weight.data`` and ``linear.weight.quant_state`` of
    ``linear_of``. The function takes the first row and the end (exclusive), and returns (rows,
    in_features), float32, on the device of the matrix, equal to the rows of ``dequantised``.
    """
    functional = bitsandbytes().functional
    in_features = state.shape[1]
    scales = state.absmax
    # Doubly quantised scales are read once.
    if state.nested:
        scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    # Rows are whole numbers of blocks; see ``require_whole_blocks``.
    per_row = in_features // BLOCK

    def read(first: int, end: int) -> Tensor:
        rows = functional.QuantState(
            scales[first * per_row : end * per_row].contiguous(),
            shape=torch.Size((end - first, in_features)),
            code=state.code,
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=torch.float32,
        )
        # Two codes per byte; rows begin at whole bytes.
        dense: Tensor = functional.dequantize_4bit(
            packed.view(-1, 1)[first * in_features // 2 : end * in_features // 2], rows
        )
        return dense

    return read


def state_of(matrix: Nf4Matrix, lookup: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Return the ``bitsandbytes.functional.QuantState`` of a matrix, everything but the codes.

    ``dtype`` is that of dequantised weights.
    """
    make = bitsandbytes().functional.QuantState
    nested = None
    # Scales of the scales, if there are any.
    if matrix.offset is not None:
        nested = make(
            matrix.nested_absmax,
            code=lookup["nested_table"],
            blocksize=NESTED_BLOCK,
            dtype=torch.float32,
        )
    return make(
        matrix.absmax,
        shape=torch.Size(matrix.shape),
        code=lookup["table"],
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=matrix.offset,
        state2=nested,
    )


def nf4_bytes(shapes: Iterable[tuple[int, int]], double_quantisation: bool = True) -> int:
    """Return the size in bytes of matrices in NF4: codes, scales, offsets and the shared tables.

    This is 0.516 bytes per weight with double quantisation, and 0.563 without.
    """
    total = 4 * (LEVELS + NESTED_LEVELS * double_quantisation)
    for shape in shapes:
        require_whole_blocks(shape)
        blocks = math.prod(shape) // BLOCK
        # Two codes per byte.
        total += math.prod(shape) // 2
        # Scales: float32, or one byte each, a float32 per 256 of them, and the offset.
        total += blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 if double_quantisation else 4 * blocks
    return total

"""Matrices in NF4: 4 bits per weight and a scale per 64 of them (QLoRA, Dettmers et al. 2023, section 3).

bitsandbytes computes with them, and its tables and kernels make the numbers. Two things are done here in place of its
``quantize_4bit``. A matrix is quantised in stretches of whole blocks as it is read, so that neither the matrix nor the
eight-fold temporary memory of its CPU code is ever there. And the mean scale is summed in float64: bitsandbytes sums it in
float32, whose last bits depend on the number of threads, and two nodes would then hold different models.
"""

import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from espalier.errors import Mistake
from espalier.hf.nf4.layout import BLOCK, LEVELS, NESTED_BLOCK, NESTED_LEVELS
from espalier.models.plan import ModelPlan
from espalier.settings.libraries import WITHOUT_BITSANDBYTES

STRETCH = 1 << 20
"""Weights that are quantised at a time, a multiple of a block."""


@dataclass(frozen=True)
class Nf4Matrix:
    """One quantised matrix of n weights, row-major, in n / 64 blocks.

    A weight is ``table[4 bits] * scale``; a scale is ``absmax``, or with double quantisation
    ``nested_table[absmax] * nested_absmax + offset``.
    """

    shape: tuple[int, int]
    """(out_features, in_features)"""
    packed: Tensor
    """(n / 2, 1), uint8: two weights each, the earlier one in the upper four bits."""
    absmax: Tensor
    """(blocks,): float32, or uint8 with double quantisation."""
    nested_absmax: Tensor | None = None
    """(ceil(blocks / 256),), float32."""
    offset: Tensor | None = None
    """Mean of the scales, a float32 scalar."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What has to be kept of it, by name."""
        kept = {
            "packed": self.packed,
            "absmax": self.absmax,
            "nested_absmax": self.nested_absmax,
            "offset": self.offset,
        }
        return {name: tensor for name, tensor in kept.items() if tensor is not None}


def hush() -> None:
    """Keep the import of bitsandbytes, which peft imports too, from warning of what this program does without.

    That is a kernel for AVX512-BF16, and a part of torch that is old: torch itself imports it for its compiler, and Flower's
    simulation shows such warnings.
    """
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    # Setting it makes every logger of the process look anew at what it logs.
    if logger.level != logging.ERROR:
        logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is ", DeprecationWarning)


def bitsandbytes() -> Any:
    """The library, imported when it is needed.

    Raises
    ------
    Mistake
        It is not installed.
    """
    hush()
    try:
        import bitsandbytes as library
    except ModuleNotFoundError:
        raise Mistake(WITHOUT_BITSANDBYTES) from None
    return library


def quantise(
    pieces: Iterable[Tensor],
    shape: tuple[int, int],
    device: torch.device,
    double_quantisation: bool = True,
) -> Nf4Matrix:
    """Quantise a matrix that comes in pieces, in row-major order.

    Parameters
    ----------
    pieces : flat tensors of any floating dtype; all but the last one have a multiple of 64 weights
    shape : (out_features, in_features); see ``require_whole_blocks``
    device : where it is done and where the result lies
    double_quantisation : also quantise the scales, to 8 bits in blocks of 256 (QLoRA, section 3, "Double Quantization")

    Raises
    ------
    Mistake
        See ``require_whole_blocks``.
    """
    require_whole_blocks(shape)
    functional = bitsandbytes().functional
    weights = shape[0] * shape[1]
    packed = torch.empty(weights // 2, 1, dtype=torch.uint8, device=device)
    absmax = torch.empty(weights // BLOCK, dtype=torch.float32, device=device)
    start = 0
    for piece in pieces:
        for stretch in piece.view(-1).split(STRETCH):
            codes, state = functional.quantize_4bit(
                stretch.to(device, torch.float32), blocksize=BLOCK, quant_type="nf4"
            )
            packed[start // 2 : start // 2 + len(codes)] = codes
            absmax[start // BLOCK : start // BLOCK + len(state.absmax)] = state.absmax
            start += stretch.numel()
    if not double_quantisation:
        return Nf4Matrix(shape, packed, absmax)
    offset = absmax.mean(dtype=torch.float64).to(torch.float32)
    codes, state = functional.quantize_blockwise(absmax - offset, blocksize=NESTED_BLOCK)
    return Nf4Matrix(shape, packed, codes, state.absmax, offset)


def require_whole_blocks(shape: tuple[int, int], name: str = "a matrix") -> None:
    """Refuse rows that are no whole number of blocks; any number of rows will do.

    A block would go on in the next row. bitsandbytes quantises such a matrix well, and on CPUs with AVX-512 computes with
    the scales of other blocks; nor could rows be cut out of it.

    Raises
    ------
    Mistake
        in_features is no multiple of 64.
    """
    if shape[1] % BLOCK:
        raise Mistake(
            f"training.base = 'nf4': {name} has {shape[1]} input features, no multiple of {BLOCK},"
            " and cannot be quantised to NF4; set training.base to 'bfloat16'"
        )


def require_quantisable(plan: ModelPlan) -> None:
    """Refuse a model with a matrix that ``require_whole_blocks`` does; the Mistake names it by its tensor in the files."""
    for block in plan.blocks:
        for linear in block.linears:
            require_whole_blocks(linear.shape, linear.parameter)


def tables(device: torch.device) -> dict[str, Tensor]:
    """The values that codes stand for: ``table`` of weights, (16,), ``nested_table`` of scales, (256,), float32."""
    functional = bitsandbytes().functional
    return {
        "table": functional.get_4bit_type("nf4", device=device),
        "nested_table": functional.create_dynamic_map().to(device),
    }


def linear_of(
    matrix: Nf4Matrix, known: dict[str, Tensor], compute_dtype: torch.dtype, bias: bool
) -> nn.Module:
    """A ``bitsandbytes.nn.Linear4bit`` that computes with a matrix; its bias, if any, is on the meta device still.

    ``known`` are the tables, shared by all linears.
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
    # Otherwise a forward pass in evaluation mode on a CPU with AVX512-BF16 repacks the weight in place: other scales,
    # and whatever dequantises it later gets garbage.
    linear.support_avx512bf16_for_cpu = False
    linear.weight = library.nn.Params4bit(
        matrix.packed,
        requires_grad=False,
        quant_state=state_of(matrix, known, compute_dtype),
        blocksize=BLOCK,
        compress_statistics=matrix.offset is not None,
        quant_type="nf4",
        module=linear,
        bnb_quantized=True,
    )
    linear.quant_state = linear.weight.quant_state
    return linear


def dequantised(matrix: Nf4Matrix, known: dict[str, Tensor]) -> Tensor:
    """The weights, float32, shaped like the matrix; ``known`` are the tables."""
    return bitsandbytes().functional.dequantize_4bit(
        matrix.packed, state_of(matrix, known, torch.float32)
    )


def row_reader(packed: Tensor, state: Any) -> Callable[[int, int], Tensor]:
    """What dequantises rows of a matrix and no others, for kernels that go through it in stretches of rows.

    Parameters
    ----------
    packed, state : as ``linear_of`` made them: ``linear.weight.data`` and ``linear.weight.quant_state``

    Returns
    -------
    Callable
        From the first row and the one behind the last to these rows, (rows, in_features), float32, on the device of the matrix:
        bit for bit those of ``dequantised``. The scales, one float32 per 64 weights, are dequantised once and held.
    """
    functional = bitsandbytes().functional
    in_features = state.shape[1]
    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
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
        found: Tensor = functional.dequantize_4bit(
            packed.view(-1, 1)[first * in_features // 2 : end * in_features // 2], rows
        )
        return found

    return read


def state_of(matrix: Nf4Matrix, known: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """A ``bitsandbytes.functional.QuantState``: all but the codes; ``dtype`` is that of dequantised weights."""
    make = bitsandbytes().functional.QuantState
    nested = None
    if matrix.offset is not None:
        nested = make(
            matrix.nested_absmax,
            code=known["nested_table"],
            blocksize=NESTED_BLOCK,
            dtype=torch.float32,
        )
    return make(
        matrix.absmax,
        shape=torch.Size(matrix.shape),
        code=known["table"],
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=matrix.offset,
        state2=nested,
    )


def tensor_sizes(
    shape: tuple[int, int], double_quantisation: bool
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """What ``Nf4Matrix.tensors`` will be of a matrix: name -> (safetensors dtype, shape, bytes)."""
    require_whole_blocks(shape)
    weights = shape[0] * shape[1]
    pairs = weights // 2
    blocks = weights // BLOCK
    packed = {"packed": ("U8", (pairs, 1), pairs)}
    if not double_quantisation:
        return packed | {"absmax": ("F32", (blocks,), 4 * blocks)}
    nested = -(-blocks // NESTED_BLOCK)
    scales = {
        "absmax": ("U8", (blocks,), blocks),
        "nested_absmax": ("F32", (nested,), 4 * nested),
        "offset": ("F32", (), 4),
    }
    return packed | scales


def matrix_bytes(shape: tuple[int, int], double_quantisation: bool = True) -> int:
    """Bytes of one matrix in NF4, without the tables: 0.516 per weight with double quantisation, 0.563 without."""
    return sum(size for _, _, size in tensor_sizes(shape, double_quantisation).values())


def nf4_bytes(shapes: Iterable[tuple[int, int]], double_quantisation: bool = True) -> int:
    """Bytes of matrices in NF4: codes, scales, offsets, and the tables once."""
    return sum(matrix_bytes(shape, double_quantisation) for shape in shapes) + table_bytes(
        double_quantisation
    )


def table_bytes(double_quantisation: bool = True) -> int:
    """Bytes of the tables, which all matrices share."""
    return 4 * (LEVELS + NESTED_LEVELS * double_quantisation)

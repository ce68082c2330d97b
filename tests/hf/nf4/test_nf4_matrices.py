"""NF4 matrices against a slow loop over the paper's definition.

Includes the guard against bitsandbytes' weight repacking on CPUs.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from espalier.errors import EspalierError
from espalier.hf.nf4.matrices import (
    BLOCK,
    STRETCH,
    Nf4Matrix,
    bitsandbytes,
    linear_of,
    nf4_bytes,
    quantise,
    row_reader,
    tables,
)
from espalier.hf.nf4.matrices import dequantised as dequantised_matrix

LEVELS = [
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
]  # fmt: skip
"""Levels of QLoRA, appendix E."""
SHAPES = [(64, 128), (7, 64), (33, 192), (1, 64)]
"""Shapes, some with a number of rows that is not a multiple of 32."""


def weight_of(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def scales_of(matrix: Nf4Matrix, device: torch.device) -> list[float]:
    """Return the scale of each block as the docstring of ``Nf4Matrix`` defines it."""
    if matrix.offset is None or matrix.nested_absmax is None:
        return matrix.absmax.tolist()
    nested = tables(device)["nested_table"].tolist()
    return [
        nested[code] * matrix.nested_absmax[index // 256].item() + matrix.offset.item()
        for index, code in enumerate(matrix.absmax.tolist())
    ]


def slowly_dequantised(matrix: Nf4Matrix, device: torch.device) -> Tensor:
    scales = scales_of(matrix, device)
    values = []
    for pair in matrix.packed.flatten().tolist():
        values += [LEVELS[pair >> 4], LEVELS[pair & 15]]
    weights = matrix.shape[0] * matrix.shape[1]
    return torch.tensor([values[index] * scales[index // 64] for index in range(weights)]).view(
        matrix.shape
    )


def dequantised(linear: nn.Module) -> Tensor:
    return (
        bitsandbytes()
        .functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)
        .cpu()
    )


def linear_from(
    matrix: Nf4Matrix, device: torch.device, dtype: torch.dtype = torch.float32
) -> nn.Module:
    return linear_of(matrix, tables(device), dtype, bias=False)


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_are_the_nearest_levels(shape: tuple[int, int], device: torch.device) -> None:
    weight = weight_of(shape)
    matrix = quantise([weight.flatten()], shape, device, double_quantisation=False)
    flat = weight.flatten().tolist()
    codes = [code for pair in matrix.packed.flatten().tolist() for code in divmod(pair, 16)]
    for start in range(0, len(flat), 64):
        block = flat[start : start + 64]
        largest = max(abs(value) for value in block)
        assert matrix.absmax[start // 64].item() == pytest.approx(largest, rel=1e-6)
        for index, value in enumerate(block):
            distances = [abs(value / largest - level) for level in LEVELS]
            assert distances[codes[start + index]] <= min(distances) + 1e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("double", [True, False])
def test_linear_equals_slow_loop(
    shape: tuple[int, int], double: bool, device: torch.device
) -> None:
    matrix = quantise([weight_of(shape).flatten()], shape, device, double)
    expected = slowly_dequantised(matrix, device)
    linear = linear_from(matrix, device)
    torch.testing.assert_close(dequantised(linear), expected, rtol=1e-5, atol=1e-7)
    inputs = weight_of((4, shape[1]), seed=1)
    torch.testing.assert_close(
        linear(inputs.to(device)).cpu(), inputs @ expected.T, rtol=1e-4, atol=1e-5
    )


def test_double_quantised_scales_are_within_1_pct(device: torch.device) -> None:
    weight = weight_of((256, 256))
    plain, double = (quantise([weight.flatten()], (256, 256), device, way) for way in (False, True))
    assert torch.equal(plain.packed, double.packed)
    assert double.offset is not None
    assert double.offset.item() == pytest.approx(math.fsum(plain.absmax.tolist()) / 1024, rel=1e-6)
    for exact, kept in zip(plain.absmax.tolist(), scales_of(double, device), strict=True):
        assert kept == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cut_into_pieces_or_whole_it_is_the_same(dtype: torch.dtype, device: torch.device) -> None:
    """Covers a matrix that is longer than ``STRETCH``."""
    shape = (1030, 1088)
    assert shape[0] * shape[1] > STRETCH
    flat = weight_of(shape).flatten().to(dtype)
    whole = quantise([flat], shape, device)
    cut = quantise(flat.split(5 * BLOCK * 1000), shape, device)
    assert all(torch.equal(tensor, cut.tensors[name]) for name, tensor in whole.tensors.items())
    direct, _ = bitsandbytes().functional.quantize_4bit(
        flat.to(device), blocksize=64, quant_type="nf4"
    )
    assert torch.equal(whole.packed, direct)


def test_bits_do_not_depend_on_threads() -> None:
    """The float32 mean of these 65,536 scales depends on the threads.

    Smaller means never do, because torch does not split them between threads.
    """
    flat = weight_of((2048, 2048), seed=3).flatten()
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(quantise([flat], (2048, 2048), torch.device("cpu")).tensors)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


def test_zeros_stay_zeros(device: torch.device) -> None:
    """A pruned model may have whole blocks of zeros."""
    weight = weight_of((64, 128))
    weight[10:20] = 0
    weight[:, ::2] = 0
    linear = linear_from(quantise([weight.flatten()], (64, 128), device), device)
    assert not dequantised(linear)[weight == 0].any()


@pytest.mark.parametrize("shape", [(64, 128), (33, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_leaves_weight_alone(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """On CPUs with AVX512-BF16, bitsandbytes would repack the weight.

    It would refuse the second shape.
    """
    linear = linear_from(
        quantise([weight_of(shape).flatten()], shape, device), device, dtype
    ).eval()
    before = dequantised(linear)
    with torch.no_grad():
        first, second = (
            linear(torch.ones(3, shape[1], dtype=dtype, device=device)) for _ in range(2)
        )
    assert first.dtype == dtype
    assert torch.equal(first, second)
    assert torch.equal(dequantised(linear), before)
    assert linear.support_avx512bf16_for_cpu is False


def test_gradients_reach_the_input_alone(device: torch.device) -> None:
    linear = linear_from(quantise([weight_of((64, 128)).flatten()], (64, 128), device), device)
    inputs = weight_of((5, 128), seed=2).to(device).requires_grad_()
    linear(inputs).sum().backward()
    assert inputs.grad is not None
    torch.testing.assert_close(
        inputs.grad.cpu(), dequantised(linear).sum(dim=0).expand(5, -1), rtol=1e-4, atol=1e-5
    )
    assert linear.weight.grad is None
    assert not linear.weight.requires_grad


@pytest.mark.parametrize("shape", [(64, 32), (48, 96), (5, 66), (33, 65), (1, 100)])
def test_rows_of_partial_blocks_are_refused(shape: tuple[int, int], device: torch.device) -> None:
    with pytest.raises(
        EspalierError,
        match=(
            rf"training.base = 'nf4': a matrix has {shape[1]} input features, .* set training.base"
            r" to 'bfloat16'"
        ),
    ):
        quantise([weight_of(shape).flatten()], shape, device)
    with pytest.raises(EspalierError, match="input features"):
        nf4_bytes([shape])


# ----- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, (1030, 1088)])
@pytest.mark.parametrize("double", [True, False])
def test_bytes_are_those_of_the_buffers(
    shape: tuple[int, int], double: bool, device: torch.device
) -> None:
    matrix = quantise([weight_of(shape).flatten()], shape, device, double)
    found = nf4_bytes([shape], double) - nf4_bytes([], double)
    assert found == sum(tensor.nbytes for tensor in matrix.tensors.values())


def test_bytes_on_paper() -> None:
    """4096 x 4096: 2^24 weights, 2^18 scales, 2^10 nested scales; tables of 16 and 256 floats."""
    assert (
        nf4_bytes([(4096, 4096)] * 2, True)
        == 2 * (2**23 + 2**18 + 4 * 2**10 + 4) + 4 * 16 + 4 * 256
    )
    assert nf4_bytes([(4096, 4096)] * 2, False) == 2 * (2**23 + 4 * 2**18) + 4 * 16


def test_the_tables_are_those_of_the_paper(device: torch.device) -> None:
    found = tables(device)
    assert found["table"].tolist() == pytest.approx(LEVELS, abs=1e-6)
    assert found["nested_table"].shape == (256,)
    assert found["nested_table"].dtype == torch.float32


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_equal_whole_matrix(
    shape: tuple[int, int], double: bool, device: torch.device
) -> None:
    """Includes row ranges whose scales begin inside a nested block."""
    matrix = quantise([weight_of(shape).flatten()], shape, device, double)
    linear = linear_from(matrix, device, torch.bfloat16)
    whole = slowly_dequantised(matrix, device)
    read = row_reader(linear.weight.data, linear.weight.quant_state)
    for size in (1, 5, 64):
        pieces = [read(start, min(start + size, shape[0])) for start in range(0, shape[0], size)]
        assert {piece.dtype for piece in pieces} == {torch.float32}
        assert torch.cat(pieces).cpu().tolist() == [
            pytest.approx(row, rel=1e-6) for row in whole.tolist()
        ]
        assert torch.equal(torch.cat(pieces), dequantised_matrix(matrix, tables(device)))

"""NF4 codes by hand, against a slow loop, and against bitsandbytes if it is installed."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning_kernels.lora.nf4 import BLOCK, LEVELS, Nf4, decode, encode, num_bytes

pytestmark = pytest.mark.usefixtures("tests_on_device")

WIDEST_GAP = 1 - 0.6961928009986877
"""Gap between -1 and its neighbour."""


def codes_of(nf4: Nf4, size: int) -> list[int]:
    """Return the codes by integer arithmetic on the bytes."""
    return [code for byte in nf4.packed.tolist() for code in (byte // 16, byte % 16)][:size]


def slow_codes(values: list[float]) -> list[int]:
    """Return for each value the number of midpoints between two levels that lie below it."""
    levels = [np.float32(level) for level in LEVELS]
    middles = [(low + high) / np.float32(2) for low, high in pairwise(levels)]
    codes = []
    for start in range(0, len(values), 64):
        block = [np.float32(value) for value in values[start : start + 64]]
        reciprocal = np.float32(1) / max(max(abs(value) for value in block), np.float32(1e-38))
        codes += [sum(bool(value * reciprocal > middle) for middle in middles) for value in block]
    return codes


def test_the_levels_are_normal_quantiles() -> None:
    """QLoRA's recipe: quantiles from 1 - (1/32 + 1/30) / 2 to 1/2, divided by the largest.

    There are 8 even steps for positive levels and 7 for negative ones.
    """
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = 0.9677083

    def quantiles(number: int) -> list[float]:
        return normal.icdf(torch.linspace(offset, 0.5, number, dtype=torch.float64)[:-1]).tolist()

    found = sorted([*quantiles(9), 0.0, *(-value for value in quantiles(8))])
    assert [value / max(found) for value in found] == pytest.approx(LEVELS, abs=1e-6)
    assert list(LEVELS) == [float(np.float32(level)) for level in LEVELS]


def test_on_paper(device: torch.device) -> None:
    """The largest magnitude is 4; divided by it, the values are -1, 0, 0.1 and 0.75.

    0.1 is near 0.0796, which is code 8, and 0.75 is near 0.723, which is code 14.
    """
    found = encode(torch.tensor([[-4.0, 0.0], [0.4, 3.0]], device=device))
    assert found.packed.tolist() == [0 * 16 + 7, 8 * 16 + 14]
    assert found.absmax.tolist() == [4.0]
    decoded = decode(found, (2, 2))
    assert decoded.device.type == device.type
    expected = [[-4.0, 0.0], [4 * 0.07958029955625534, 4 * 0.7229568362236023]]
    assert decoded.tolist() == [pytest.approx(row) for row in expected]


def test_odd_number_of_values_is_padded_by_zero() -> None:
    found = encode(torch.tensor([1.0, -1.0, 1.0]))
    assert found.packed.tolist() == [15 * 16 + 0, 15 * 16 + 7]
    assert decode(found, (3,)).tolist() == [1.0, -1.0, 1.0]


def test_midpoint_takes_lower_level() -> None:
    levels = torch.tensor(LEVELS)
    middles = (levels[1:] + levels[:-1]) / 2
    above = torch.nextafter(middles, torch.tensor(2.0))
    assert codes_of(encode(torch.cat([torch.ones(1), middles])), 16)[1:] == list(range(15))
    assert codes_of(encode(torch.cat([torch.ones(1), above])), 16)[1:] == list(range(1, 16))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.floats(1e-30, 1e30), st.integers(0, 2**32 - 1))
def test_against_a_slow_loop(size: int, scale: float, seed: int) -> None:
    values = torch.tensor(
        (np.random.default_rng(seed).normal(size=size) * scale).astype(np.float32)
    )
    found = encode(values)
    assert codes_of(found, size) == slow_codes(values.tolist())
    assert found.absmax.tolist() == [
        max(abs(v) for v in values[s : s + 64].tolist()) for s in range(0, size, 64)
    ]
    for value, decoded, start in zip(
        values.tolist(), decode(found, (size,)).tolist(), range(size), strict=True
    ):
        assert abs(value - decoded) <= float(found.absmax[start // 64]) * WIDEST_GAP / 2 * 1.000001


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_decoded_values_have_the_same_codes_again(size: int, seed: int) -> None:
    found = encode(torch.tensor(np.random.default_rng(seed).normal(size=size).astype(np.float32)))
    again = encode(decode(found, (size,)))
    assert torch.equal(again.packed, found.packed)
    assert torch.equal(again.absmax, found.absmax)


@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 65, 127, 128, 1000, 4096 * 16])
def test_number_of_bytes(size: int) -> None:
    found = encode(torch.ones(size))
    assert found.packed.numel() * 1 + found.absmax.numel() * 4 == num_bytes(size)
    assert num_bytes(size) == math.ceil(size / 2) + 4 * math.ceil(size / 64)
    assert decode(found, (size,)).tolist() == [1.0] * size


def test_bytes_per_value() -> None:
    assert num_bytes(64 * 1000) == 0.5625 * 64 * 1000
    assert BLOCK == 64


@pytest.mark.parametrize(
    "values", [[0.0] * 70, [1e-42, -5e-43, 0.0], [3e38, -3e38, 1e38], [-0.0, 0.0]]
)
def test_numbers_at_the_ends_of_float32(values: list[float]) -> None:
    """Values that are too small for a reciprocal become at worst zero."""
    given_values = torch.tensor(values)
    decoded = decode(encode(given_values), (len(values),))
    assert bool(torch.isfinite(decoded).all())
    assert float((decoded - given_values).abs().max()) <= max(
        float(given_values.abs().max()) * WIDEST_GAP / 2, 1e-38
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_taken_in_float32(dtype: torch.dtype) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = encode(values)
    assert codes_of(found, 100) == slow_codes(values.to(torch.float32).tolist())
    assert decode(found, (10, 10)).dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
def test_what_is_not_finite_has_no_code(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinity has no NF4 code"):
        encode(torch.tensor([1.0, bad], dtype=torch.float64))


def damaged(name: str) -> Nf4:
    """Return the codes of 65 values (33 bytes, 2 magnitudes) with one fault."""
    packed = torch.full((33,), 0x77, dtype=torch.uint8)
    absmax = torch.ones(2)
    changed = {
        "a byte too few": Nf4(packed[:-1], absmax),
        "a byte too many": Nf4(torch.cat([packed, packed[:1]]), absmax),
        "codes of another dtype": Nf4(packed.to(torch.int32), absmax),
        "codes in two dimensions": Nf4(packed[None], absmax),
        "a magnitude too few": Nf4(packed, absmax[:1]),
        "magnitudes of another dtype": Nf4(packed, absmax.to(torch.float16)),
        "negative": Nf4(packed, torch.tensor([1.0, -1.0])),
        "nan": Nf4(packed, torch.tensor([math.nan, 1.0])),
        "infinite": Nf4(packed, torch.tensor([1.0, math.inf])),
        "unused bits": Nf4(
            torch.cat([packed[:-1], torch.tensor([0x70], dtype=torch.uint8)]), absmax
        ),
    }
    return changed[name]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a byte too few", r"the codes of 65 values in NF4 are 33 of torch.uint8, got \(32,\)"),
        ("a byte too many", r"got \(34,\)"),
        ("codes of another dtype", "got .* of torch.int32"),
        ("codes in two dimensions", r"got \(1, 33\)"),
        (
            "a magnitude too few",
            r"the magnitudes of 65 values in NF4 are 2 of torch.float32, got \(1,\)",
        ),
        ("magnitudes of another dtype", "of torch.float16"),
        ("negative", "negative, NaN or infinite"),
        ("nan", "negative, NaN or infinite"),
        ("infinite", "negative, NaN or infinite"),
        ("unused bits", "unused bits"),
    ],
)
def test_damaged_codes_are_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        decode(damaged(name), (13, 5))


def test_codes_of_another_count_are_refused() -> None:
    with pytest.raises(ValueError, match="the codes of 66 values"):
        decode(encode(torch.ones(64)), (66,))


@pytest.mark.parametrize("size", [64, 64 * 33, 6, 64 * 5 + 18])
def test_codes_and_values_equal_bitsandbytes(size: int) -> None:
    """Whole blocks agree bit by bit.

    In a short block, values exactly at a midpoint could differ; here there are none.
    """
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="bitsandbytes is not installed"
    )
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 0.02
    packed, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
    found = encode(values)
    assert torch.equal(found.packed, packed.reshape(-1))
    assert torch.equal(found.absmax, state.absmax)
    assert torch.equal(
        decode(found, values.shape), functional.dequantize_4bit(packed, state).reshape(-1)
    )


def test_midpoints_equal_bitsandbytes_on_cpu(device: torch.device) -> None:
    """All midpoints between two levels and their float32 neighbours.

    The magnitudes are powers of two, which divide without rounding.
    """
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="bitsandbytes is not installed"
    )
    levels = torch.tensor(LEVELS)
    middles = (levels[1:] + levels[:-1]) / 2
    near = [torch.nextafter(middles, torch.tensor(side)) for side in (-2.0, 2.0)]
    values = torch.zeros(4, 64)
    values[:, :46] = torch.cat([torch.ones(1), middles, *near]) * torch.tensor(
        [[1.0], [2.0], [2.0**-20], [2.0**20]]
    )
    packed, _ = functional.quantize_4bit(values.cpu(), blocksize=64, quant_type="nf4")
    assert torch.equal(encode(values).packed, packed.reshape(-1).to(device))

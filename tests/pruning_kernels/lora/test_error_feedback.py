"""Decoded values add up to the given values, except for the last residual."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning_kernels.lora.error_feedback import BFLOAT16, NF4, Codec, encode_with_feedback

pytestmark = pytest.mark.usefixtures("tests_on_device")

CODECS = [pytest.param(NF4, id="nf4"), pytest.param(BFLOAT16, id="bfloat16")]
WIDEST_GAP = 1 - 0.6961928009986877


def decoded_rounds(
    values: torch.Tensor, rounds: int, codec: Codec[Any], feedback: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of the values decoded in these rounds, float64, and the last residual."""
    total = torch.zeros(values.shape, dtype=torch.float64)
    residual = torch.zeros_like(values)
    for _ in range(rounds):
        code, lost = encode_with_feedback(values, residual, codec)
        total += codec.decode(code, values.shape)
        residual = lost if feedback else residual
    return total / rounds, residual


def test_on_paper() -> None:
    """0.9 is rounded to the level 1; with the residual it is 0.8, which is rounded to 0.723."""
    values = torch.tensor([1.0, 0.9])
    code, residual = encode_with_feedback(values, torch.zeros(2), NF4)
    assert NF4.decode(code, (2,)).tolist() == [1.0, 1.0]
    assert residual.tolist() == pytest.approx([0.0, -0.1])
    code, residual = encode_with_feedback(values, residual, NF4)
    assert NF4.decode(code, (2,)).tolist() == pytest.approx([1.0, 0.7229568])
    assert residual.tolist() == pytest.approx([0.0, 0.0770432], abs=1e-6)


def test_bfloat16_on_paper() -> None:
    """Steps between 1 and 2 are 2^-7, so 1 + 3/1024 becomes 1 with the residual 3/1024.

    In the next round, 1 + 6/1024 becomes 1 + 8/1024.
    """
    values = torch.tensor([1 + 3 / 1024])
    code, residual = encode_with_feedback(values, torch.zeros(1), BFLOAT16)
    assert (code.dtype, code.tolist(), residual.tolist()) == (torch.bfloat16, [1.0], [3 / 1024])
    code, residual = encode_with_feedback(values, residual, BFLOAT16)
    assert (code.tolist(), residual.tolist()) == ([1 + 8 / 1024], [-2 / 1024])


@pytest.mark.parametrize("codec", CODECS)
def test_mean_converges_with_feedback_alone(codec: Codec[Any]) -> None:
    values = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    biased, _ = decoded_rounds(values, 1, codec, feedback=False)
    bias = float((biased - values).abs().max())
    assert bias > 1e-3
    for rounds in (10, 100, 1000):
        without, _ = decoded_rounds(values, rounds, codec, feedback=False)
        assert float((without - values).abs().max()) == pytest.approx(bias)
        mean, _ = decoded_rounds(values, rounds, codec, feedback=True)
        assert float((mean - values).abs().max()) <= 2 * bias / rounds + 1e-6


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 130), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_decoded_sum_lacks_last_residual(size: int, rounds: int, seed: int) -> None:
    """Values change in each round; the residual stays below a fraction of the largest value."""
    generator = np.random.default_rng(seed)
    given_sum = np.zeros(size)
    decoded_sum = np.zeros(size)
    residual = torch.zeros(size)
    largest = 0.0
    for _ in range(rounds):
        values = torch.tensor(generator.normal(size=size).astype(np.float32))
        largest = max(largest, float(values.abs().max()))
        code, residual = encode_with_feedback(values, residual, NF4)
        given_sum += values.numpy()
        decoded_sum += NF4.decode(code, (size,)).numpy()
    assert decoded_sum + residual.numpy() == pytest.approx(given_sum, abs=1e-5)
    share = WIDEST_GAP / 2
    assert float(residual.abs().max()) <= largest * share / (1 - share) * 1.00001


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3.4e38])
def test_what_has_no_finite_code_is_refused(codec: Codec[Any], bad: float) -> None:
    """2 * 3.4e38 exceeds float32, and 3.4e38 exceeds the largest value of bfloat16."""
    with pytest.raises(ValueError, match="NaN or infinity"):
        encode_with_feedback(torch.tensor([bad]), torch.tensor([bad]), codec)

"""Importance from LoRA gradients needs no second matrix of the weight's size."""

import pytest
import torch

from pruning_kernels.lora import importance
from pruning_kernels.lora.factors import Factors
from pruning_kernels.lora.importance import Gradients, Score, group_importance
from tests.largest_tensor import LargestTensor


@pytest.mark.parametrize("score", ["exact", "group"])
@pytest.mark.parametrize("side", [0, 1])
def test_no_tensor_is_as_large_as_the_matrix(
    monkeypatch: pytest.MonkeyPatch, side: int, score: Score
) -> None:
    """At most 8 of 64 x 96 rows, P and Q are in memory at a time."""
    generator = torch.Generator().manual_seed(0)
    b, gradient_b = torch.randn(2, 64, 2, generator=generator)
    a, gradient_a = torch.randn(2, 2, 96, generator=generator)
    held = torch.randn(64, 96, generator=generator).to(torch.bfloat16)
    monkeypatch.setattr(importance, "ROWS_AT_ONCE", 8)
    with LargestTensor() as largest:
        group_importance(
            held, Factors(b, a, 1.5), Gradients(gradient_b, gradient_a), side, 1, score
        )
    assert largest.numbers <= max(8 * 96, 2 * 2 * 96, 2 * 2 * 64)

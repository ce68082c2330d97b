"""Which rank a HetLoRA client goes on with, of several matrices together."""

import math

import pytest
import torch
from torch import Tensor

from client_app.self_pruning import SelfPruning
from espalier.wire.adapters import Adapter, AdapterPlan
from espalier.wire.plan import LinearPlan
from pruning_kernels.factors import Factors
from pruning_kernels.scores import NotFiniteError


def factors_of(size: float) -> Factors:
    """Rank 4. Of the last two ranks B has four entries of size / 2, whose norm is the size, and A four of a half, of norm 1."""
    half = torch.tensor([1.0, 1.0, size / 2, size / 2])
    return Factors(torch.ones(2, 4) * half, torch.full((4, 2), 0.5), 3.0)


def test_a_client_s_decision_is_that_of_the_sum_over_its_matrices() -> None:
    """Ranks 4 and 2 with a tail from 2 on: the smaller matrix has none, and two of the larger count together."""
    linears = tuple(LinearPlan(name, name, (2, 2), "F32") for name in ("q", "k", "v"))
    ranks = {"q": 4, "k": 4, "v": 2}
    plan = AdapterPlan({0: tuple(Adapter(linear, ranks[linear.name], 3.0) for linear in linears)})
    pruning = SelfPruning(plan, 4, 0.5, 0.1)

    def tensors(*sizes: float) -> dict[str, dict[str, Tensor]]:
        factors = [(name, factors_of(size)) for name, size in zip(ranks, sizes, strict=True)]
        cut = {name: (one.b[:, : ranks[name]], one.a[: ranks[name]]) for name, one in factors}
        named = {
            f"{name}.lora_{side}": pair[side == "a"]
            for name, pair in cut.items()
            for side in ("b", "a")
        }
        return {"block-0000": named}

    assert pruning.rank_after(tensors(1.0, 0.5, 9.0), tensors(0.5, 0.75, 99.0)) == 2
    assert pruning.rank_after(tensors(1.0, 0.5, 9.0), tensors(0.5, 1.0, 9.0)) == 4
    with pytest.raises(NotFiniteError, match="NaN or infinity"):
        pruning.rank_after(tensors(1.0, 0.5, 9.0), tensors(0.5, math.nan, 9.0))

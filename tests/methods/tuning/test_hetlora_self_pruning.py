"""Rank that a HetLoRA client keeps, decided for several matrices together."""

import math

import pytest
import torch
from torch import Tensor

from client_app.methods.tuning.hetlora import SelfPruning
from espalier.models.adapters import Adapter, AdapterPlan
from espalier.models.plan import LinearPlan
from pruning_kernels.lora.factors import Factors
from pruning_kernels.selection.scores import NotFiniteError


def factors_of(size: float) -> Factors:
    """Return factors of rank 4 whose last two ranks have norm ``size`` in B and norm 1 in A."""
    half = torch.tensor([1.0, 1.0, size / 2, size / 2])
    return Factors(torch.ones(2, 4) * half, torch.full((4, 2), 0.5), 3.0)


def test_self_pruning_sums_over_all_matrices() -> None:
    """The tail starts at rank 2, and the matrices have ranks 4, 4 and 2.

    The matrix of rank 2 has no tail; the tails of the other two are added.
    """
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

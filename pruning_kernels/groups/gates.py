"""Binary gates with a gradient, and their budget (SFT-P, section 3.2 and equations 12 to 14).

A gate is 1 with probability sigmoid(z) and drawn again in every step. An estimator defines the
gradient of its logit. For inference gates are chosen deterministically, within a budget.
"""

from typing import Any

import torch
from torch import Tensor


class _ReinMaxBinary(torch.autograd.Function):
    """ReinMax for two classes with the logits (z, 0), in closed form without one-hot vectors."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, drawn: Tensor, tau: float) -> Tensor:
        ctx.save_for_backward(logits, drawn)
        ctx.tau = tau
        # A copy, because autograd must not return an input of the function as its output.
        return drawn.to(logits.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, drawn = ctx.saved_tensors
        first = torch.sigmoid(logits)
        second = (torch.sigmoid(logits / ctx.tau) + drawn) / 2
        # ReinMax: 2 p1 (1 - p1) - p0 (1 - p0) / 2, with p1 the mean of tempered probability and
        # draw.
        return gradients[0] * (2 * second * (1 - second) - first * (1 - first) / 2), None, None


def reinmax_gates(logits: Tensor, drawn: Tensor, tau: float = 1.0) -> Tensor:
    """Return ``drawn`` in the dtype of the logits, with the gradient of ReinMax (Liu et al. 2023).

    The expectation of the gradient is exact for quadratic functions. With ``tau`` below 1, as in
    table 4 of SFT-P, it can have the wrong sign: for z = 3 and (g - 0.3)^2 the true gradient is
    0.018, and that of tau = 0.4 is -0.043.

    Parameters
    ----------
    logits : any shape, floating
    drawn : same shape, bool or 0 and 1: the result of ``torch.rand_like(logits) < sigmoid(logits)``
    """
    gates: Tensor = _ReinMaxBinary.apply(logits, drawn, tau)
    return gates


def gumbel_gates(logits: Tensor, uniform: Tensor, tau: float = 0.4) -> Tensor:
    """Return gates, 0 or 1, with a straight-through gradient (Jang et al. 2017).

    The gradient is that of a sigmoid whose noise is the difference of two Gumbel variables. A gate
    is therefore 1 with probability sigmoid(z), as with ReinMax: with z = 3 in 95% of the steps. The
    code of DISP-LLM adds one Gumbel variable instead, whose mean is positive. With it a gate with z
    = 3 is almost always 1. ``uniform``, in (0, 1), has the shape of the logits.
    """
    # The difference of two Gumbel variables is logistic noise: log(u) - log(1 - u).
    soft = torch.sigmoid((logits + uniform.log() - (-uniform).log1p()) / tau)
    hard = (soft > 0.5).to(logits.dtype)
    # Straight-through: the value of ``hard``, and the gradient of ``soft``.
    return hard - soft.detach() + soft


def log_ratio(spent: Tensor, target: float) -> Tensor:
    """Return |log(spent / target)|, the deviation from a positive target (equation 14).

    Values of ``spent`` below 1 count as 1.
    """
    # Below 1 the logarithm would be infinite or its gradient huge.
    return (spent.clamp_min(1.0) / target).log().abs()


def within_budget(logits: Tensor, costs: Tensor, pools: Tensor, target: int) -> Tensor:
    """Choose gates in descending order of logit, each one whose cost still fits: (gates,), bool.

    In each pool the gate with the highest logit is chosen whatever the target. Of equal logits the
    lower index comes first. The remaining budget is less than the cost of any gate that is left
    out.

    Parameters
    ----------
    logits : (gates,), floating, not NaN
    costs : (gates,), int64, positive
    pools : (gates,), int64, from 0 without gaps: groups of gates of which at least one is chosen
    target : budget, at least the cost of one gate of each pool
    """
    # As Python numbers: the greedy choice is sequential and would synchronise with a device.
    order = torch.sort(logits.detach().cpu(), descending=True, stable=True).indices.tolist()
    cost = costs.tolist()
    pool_of = pools.tolist()
    chosen = [False] * len(cost)
    seen = set[int]()
    # 1. The best gate of every pool, even if the budget is exceeded.
    left = target
    for gate in order:
        if pool_of[gate] not in seen:
            seen.add(pool_of[gate])
            chosen[gate] = True
            left -= cost[gate]
    # 2. The others, best first; a cheaper gate may still fit after an expensive one did not.
    for gate in order:
        if not chosen[gate] and cost[gate] <= left:
            chosen[gate] = True
            left -= cost[gate]
    return torch.tensor(chosen)

"""Binary gates with a gradient, and the budget that they are held to (SFT-P, section 3.2 and equations 12 to 14).

A gate is 1 with probability sigmoid(z), drawn anew in every step; what the gradient of its logit is, an estimator says. For use
gates are chosen without chance, within a budget.
"""

from typing import Any, Literal

import torch
from torch import Tensor

Estimator = Literal["reinmax", "gumbel"]


class _ReinMaxBinary(torch.autograd.Function):
    """Two classes with the logits (z, 0) in closed form: ReinMax needs no one-hot vectors then."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, drawn: Tensor, tau: float) -> Tensor:
        ctx.save_for_backward(logits, drawn)
        ctx.tau = tau
        return drawn.to(logits.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, drawn = ctx.saved_tensors
        first = torch.sigmoid(logits)
        second = (torch.sigmoid(logits / ctx.tau) + drawn) / 2
        return gradients[0] * (2 * second * (1 - second) - first * (1 - first) / 2), None, None


def reinmax_gates(logits: Tensor, drawn: Tensor, tau: float = 1.0) -> Tensor:
    """Gates with ReinMax's gradient (Liu et al. 2023), whose expectation is exact for functions of second order.

    With ``tau`` below 1, as SFT-P's table 4 has it, it may have the wrong sign: for z = 3 and (g - 0.3)^2 the true gradient is
    0.018, that with 0.4 is -0.043.

    Parameters
    ----------
    logits : any shape, floating
    drawn : same shape, bool or 0 and 1: what ``torch.rand_like(logits) < sigmoid(logits)`` gave

    Returns
    -------
    ``drawn`` in the dtype of the logits, with a gradient
    """
    gates: Tensor = _ReinMaxBinary.apply(logits, drawn, tau)
    return gates


def gumbel_gates(logits: Tensor, uniform: Tensor, tau: float = 0.4) -> Tensor:
    """Gates with the straight-through gradient of a sigmoid with the difference of two Gumbel noises (Jang et al. 2017).

    So a gate is on with probability sigmoid(z), as with ReinMax. DISP-LLM's code adds one Gumbel noise instead of the
    difference, which is positive on average: there a gate of z = 3 is all but always on, here in 95 of 100 steps.

    Parameters
    ----------
    uniform : same shape, in (0, 1)

    Returns
    -------
    0 or 1 in the dtype of the logits
    """
    soft = torch.sigmoid((logits + uniform.log() - (-uniform).log1p()) / tau)
    hard = (soft > 0.5).to(logits.dtype)
    return hard - soft.detach() + soft


def log_ratio(spent: Tensor, target: float) -> Tensor:
    """How far a positive target is missed: |log(spent / target)| (equation 14); ``spent`` is taken as 1 at least."""
    return (spent.clamp_min(1.0) / target).log().abs()


def within_budget(logits: Tensor, costs: Tensor, pools: Tensor, target: int) -> Tensor:
    """Choose gates by descending logit, each where its cost still fits: they spend a target, or less than one gate less.

    In each pool the gate of the highest logit is chosen whatever the target. Of equal logits the lower index comes first.

    Parameters
    ----------
    logits : (gates,), floating, not NaN
    costs : (gates,), int64, positive
    pools : (gates,), int64, from 0 without gaps: of each of which one must stay
    target : what may be spent

    Returns
    -------
    (gates,), bool

    Raises
    ------
    ValueError
        A logit is NaN, or one of each pool costs more than the target.
    """
    if torch.isnan(logits).any():
        raise ValueError("a logit is NaN")
    order = torch.sort(logits.detach().cpu(), descending=True, stable=True).indices.tolist()
    own = costs.tolist()
    pool = pools.tolist()
    chosen = [False] * len(own)
    seen = set[int]()
    left = target
    for gate in order:
        if pool[gate] not in seen:
            seen.add(pool[gate])
            chosen[gate], left = True, left - own[gate]
    if left < 0:
        raise ValueError(f"one gate of each kind costs {target - left}, and {target} may be spent")
    for gate in order:
        if not chosen[gate] and own[gate] <= left:
            chosen[gate], left = True, left - own[gate]
    return torch.tensor(chosen)

"""Exact means of LoRA updates, whose rank is larger than that of the clients' adapters.

The weights of the clients are at least 0 and not all 0; a weight that is none raises
``ValueError``, and a factor with NaN or infinity ``NotFiniteError``. Sums are computed in float64,
in client order.
"""

from collections.abc import Sequence

import torch

from pruning_kernels.lora.factor_means import relative_weights
from pruning_kernels.lora.factors import Factors, as_float32, as_float64, refactorise


def residual_of_means(clients: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Return what the mean of products has beyond the product of means, exactly.

    With the weights w_i, which sum to 1, and the means B and A of the clients' factors, it is
    ``sum_i w_i B_i A_i - B A`` (FedEx-LoRA, Singhal et al. 2024). The deviations from a mean sum to
    zero, so the last client's need not be stored: the residual equals
    ``sum_(i<k) w_i (B_i - B) (A_i - A_k)``.

    Parameters
    ----------
    clients : updates of one shape, rank r and scaling

    Returns
    -------
    Factors
        float32, of rank ``(k - 1) r`` for k clients, with the clients' scaling
    """
    relative = relative_weights(weights)
    all_b = [as_float64(client.b) for client in clients]
    all_a = [as_float64(client.a) for client in clients]
    # The means are subtracted in float64, since deviations are small next to the factors.
    mean_b = sum(weight * b for weight, b in zip(relative, all_b, strict=True))
    left = [weight * (b - mean_b) for weight, b in zip(relative, all_b, strict=True)][:-1]
    right = [a - all_a[-1] for a in all_a][:-1]
    out_features, in_features = clients[0].shape
    # With one client there is no residual: the factors have rank 0.
    none_b = all_b[0].new_zeros(out_features, 0)
    none_a = all_a[0].new_zeros(0, in_features)
    return Factors(
        as_float32(torch.cat([none_b, *left], dim=1)),
        as_float32(torch.cat([none_a, *right])),
        clients[0].scaling,
    )


def stacked_update(clients: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Return the weighted mean of updates as one update, whose rank is the sum of theirs.

    The columns of ``w_i B_i`` stand next to each other, and the rows of A_i below each other
    (FLoRA, Wang et al. 2024), so the product is ``sum_i w_i B_i A_i``.

    Parameters
    ----------
    clients : updates of one shape and scaling; ranks can differ

    Returns
    -------
    Factors
        float32, with the clients' scaling
    """
    relative = relative_weights(weights)
    left = [weight * as_float64(client.b) for weight, client in zip(relative, clients, strict=True)]
    right = [as_float64(client.a) for client in clients]
    return Factors(
        as_float32(torch.cat(left, dim=1)), as_float32(torch.cat(right)), clients[0].scaling
    )


def with_update(first: Factors, second: Factors, rank: int) -> Factors:
    """Return the sum of two updates of one shape and scaling, with a given rank.

    The factors are those of the singular value decomposition of the sum (``factors.refactorise``),
    so they tell no more than the sum: the columns of single clients cannot be read from them.

    Parameters
    ----------
    rank : at least the sum of both ranks, or the smaller side of the matrix; then the result is
        exact up to rounding

    Returns
    -------
    Factors
        float32; rows and columns beyond the rank of the sum are zero
    """
    # Both have the same scaling, so it is left out of the product and restored at the end.
    b = torch.cat([as_float64(first.b), as_float64(second.b)], dim=1)
    a = torch.cat([as_float64(first.a), as_float64(second.a)])
    # ``refactorise`` needs at least one column.
    if len(a) == 0:
        b = b.new_zeros(len(b), 1)
        a = a.new_zeros(1, a.shape[1])
    factors = refactorise(b, a, rank, 1.0)
    return Factors(factors.b, factors.a, first.scaling)

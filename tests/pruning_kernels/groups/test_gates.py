"""Gates: gradients against the published estimator and enumeration, budgets against a slow loop."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pruning_kernels.groups.gates import gumbel_gates, log_ratio, reinmax_gates, within_budget


def reinmax_of_two_classes(z: Tensor, drawn: Tensor, tau: float, gradient: Tensor) -> Tensor:
    """Return the gradient of the published ReinMax algorithm on one-hot vectors, by autograd.

    Let pi_0 be the softmax and D = (softmax(l / tau) + sample) / 2. The gradient is twice the
    straight-through gradient at D minus half of the gradient at pi_0.
    """
    logits = torch.stack([z, torch.zeros_like(z)], dim=-1).requires_grad_(True)
    sample = torch.stack([drawn, 1 - drawn], dim=-1)
    at_sample = torch.stack([gradient, torch.zeros_like(gradient)], dim=-1)
    middle = ((logits / tau).softmax(-1) + sample) / 2
    as_logits = middle.detach().log().requires_grad_(True)
    (first,) = torch.autograd.grad((as_logits.softmax(-1) * at_sample).sum(), as_logits)
    (second,) = torch.autograd.grad((logits.softmax(-1) * at_sample).sum(), logits)
    return (2 * first - second / 2)[..., 0]


@pytest.mark.parametrize("tau", [1.0, 1.5])
def test_reinmax_equals_published_estimator(tau: float) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(50, generator=generator, dtype=torch.float64) * 3
    drawn = (torch.rand(50, generator=generator, dtype=torch.float64) < torch.sigmoid(z)).double()
    weights = torch.randn(50, generator=generator, dtype=torch.float64)
    asked = z.clone().requires_grad_(True)
    gates = reinmax_gates(asked, drawn, tau)
    assert torch.equal(gates, drawn)
    (gates * weights).sum().backward()
    expected = reinmax_of_two_classes(z, drawn, tau, weights)
    # At another temperature, the middle point is that of softmax(l / tau), whose own logits differ
    # from those of the model.
    torch.testing.assert_close(asked.grad, expected)


@pytest.mark.parametrize("z", [-2.0, 0.0, 0.7, 3.0])
def test_expectation_is_the_exact_gradient(z: float) -> None:
    """The function of three gates has products between them; all eight draws are enumerated."""
    values = torch.tensor([z, 0.5, -1.0], dtype=torch.float64)

    def f(g: Tensor) -> Tensor:
        return ((g - 0.3) ** 2).sum() + 0.5 * g[0] * g[1] - g[1] * g[2]

    exact = values.clone().requires_grad_(True)
    probabilities = torch.sigmoid(exact)
    total = torch.zeros((), dtype=torch.float64)
    expected = torch.zeros(3, dtype=torch.float64)
    for draw in itertools.product((0.0, 1.0), repeat=3):
        drawn = torch.tensor(draw, dtype=torch.float64)
        probability = torch.where(drawn > 0, probabilities, 1 - probabilities).prod()
        total = total + probability * f(drawn)
        asked = values.clone().requires_grad_(True)
        f(reinmax_gates(asked, drawn)).backward()
        assert asked.grad is not None
        expected += probability.detach() * asked.grad
    total.backward()
    assert exact.grad is not None
    torch.testing.assert_close(expected, exact.grad)


def test_paper_s_temperature_flips_gradient() -> None:
    """A gate is likely on but should be off; with temperature 0.4 it would move further on."""

    def mean_gradient(tau: float) -> float:
        total = 0.0
        for drawn, probability in (
            (1.0, torch.sigmoid(torch.tensor(3.0)).item()),
            (0.0, 1 - torch.sigmoid(torch.tensor(3.0)).item()),
        ):
            z = torch.tensor(3.0, requires_grad=True)
            ((reinmax_gates(z, torch.tensor(drawn), tau) - 0.3) ** 2).backward()
            assert z.grad is not None
            total += probability * z.grad.item()
        return total

    true = (
        (0.7**2 - 0.3**2)
        * torch.sigmoid(torch.tensor(3.0)).item()
        * (1 - torch.sigmoid(torch.tensor(3.0)).item())
    )
    assert mean_gradient(1.0) == pytest.approx(true, rel=1e-4)
    assert mean_gradient(1.0) > 0 > mean_gradient(0.4)


def test_gumbel_gates_are_hard_with_soft_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(200, generator=generator, dtype=torch.float64).requires_grad_(True)
    u = torch.rand(200, generator=generator, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
    gates = gumbel_gates(z, u, 0.4)
    assert set(gates.round(decimals=12).tolist()) == {0.0, 1.0}
    on = [math.log(a / (1 - a)) + b > 0 for a, b in zip(u.tolist(), z.tolist(), strict=True)]
    assert (gates.detach() > 0.5).tolist() == on
    gates.sum().backward()
    soft = torch.sigmoid((z + u.log() - (1 - u).log()) / 0.4).detach()
    torch.testing.assert_close(z.grad, soft * (1 - soft) / 0.4)


@pytest.mark.parametrize(
    ("spent", "expected"),
    [(50.0, math.log(2)), (100.0, 0.0), (200.0, math.log(2)), (0.0, math.log(100))],
)
def test_missed_budget_counts_alike_on_both_sides(spent: float, expected: float) -> None:
    assert float(log_ratio(torch.tensor(spent), 100.0)) == pytest.approx(expected)


def slow_choice(logits: list[float], costs: list[int], pools: list[int], target: int) -> list[bool]:
    """Choose gates by a loop that takes the best remaining gate in each step."""
    chosen = set[int]()
    left = target
    for pool in sorted(set(pools)):
        best = max(
            (i for i in range(len(logits)) if pools[i] == pool), key=lambda i: (logits[i], -i)
        )
        chosen.add(best)
        left -= costs[best]
    rest = set(range(len(logits))) - chosen
    while rest:
        best = max(rest, key=lambda i: (logits[i], -i))
        rest.discard(best)
        if costs[best] <= left:
            chosen.add(best)
            left -= costs[best]
    return [i in chosen for i in range(len(logits))]


@pytest.mark.parametrize("seed", range(8))
def test_gates_spend_budget_within_one_gate(seed: int) -> None:
    generator = np.random.default_rng(seed)
    number = 60
    logits = np.round(generator.normal(size=number), 1)
    pools = np.sort(generator.integers(0, 4, number))
    pools = np.unique(pools, return_inverse=True)[1]
    costs = np.array([3, 7, 5, 11])[pools]
    target = int(costs.sum() * generator.uniform(0.3, 1.1))
    found = within_budget(torch.tensor(logits), torch.tensor(costs), torch.tensor(pools), target)
    assert found.tolist() == slow_choice(logits.tolist(), costs.tolist(), pools.tolist(), target)
    spent = int(costs[found.numpy()].sum())
    assert spent <= target
    if not found.all():
        assert target - spent < costs[~found.numpy()].min()
    assert set(pools[found.numpy()].tolist()) == set(pools.tolist())

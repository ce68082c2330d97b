"""A penalty is part of every step's loss once, for any number of batches per step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from espalier.data.tasks.item import Batch
from espalier.settings.tables.training import TrainingSettings
from espalier.training.loop import Loop

pytestmark = pytest.mark.usefixtures("tests_on_device")

TOKENS = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 2, 0], [2, 0, 3, 1]])


class Bigrams(nn.Module):
    """Model in which a row of a table holds the logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def batch_of(numbers: Sequence[int]) -> Batch:
    tokens = TOKENS[list(numbers)]
    return Batch(tokens, torch.ones_like(tokens), tokens)


def after_one_step(
    model: Bigrams, accumulation: int, penalty: Callable[[], Tensor] | None
) -> Tensor:
    """Return the gradient of a step's loss as ``AdamW`` receives it; no gradient is clipped."""
    settings = TrainingSettings(batch_size=4 // accumulation, accumulation=accumulation)
    loop = Loop(model, {"table": model.table}, settings, 4, batch_of, 0, 1, penalty)
    loop = replace(loop, max_gradient_norm=math.inf)
    loop.run(0, 1)
    assert model.table.grad is not None
    return model.table.grad.clone()


def total_loss(table: Tensor, strength: float) -> float:
    """Return the mean negative log-likelihood of all next tokens plus the penalty.

    The penalty is ``strength / 2`` times the sum of squares.
    """
    table = table.double()
    losses = [
        -(table[first] - table[first].logsumexp(0))[second]
        for text in TOKENS.tolist()
        for first, second in pairwise(text)
    ]
    return float(torch.stack(losses).mean() + strength / 2 * (table**2).sum())


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_its_gradient_is_added_once_per_step(accumulation: int) -> None:
    model = Bigrams()
    strength = 0.3
    step = 1e-5
    start = model.table.detach().clone()
    found = after_one_step(model, accumulation, lambda: strength / 2 * (model.table**2).sum())
    for row in range(4):
        for column in range(4):
            up = start.double().clone()
            down = start.double().clone()
            up[row, column] += step
            down[row, column] -= step
            slope = (total_loss(up, strength) - total_loss(down, strength)) / (2 * step)
            assert float(found[row, column]) == pytest.approx(slope, abs=1e-6)


def test_without_penalty_loss_is_that_of_tokens() -> None:
    model = Bigrams()
    start = model.table.detach().clone()
    found = after_one_step(model, 2, None)
    up = start.double().clone()
    down = start.double().clone()
    up[1, 2] += 1e-5
    down[1, 2] -= 1e-5
    assert float(found[1, 2]) == pytest.approx(
        (total_loss(up, 0.0) - total_loss(down, 0.0)) / 2e-5, abs=1e-6
    )


def test_the_reported_loss_is_without_it() -> None:
    model = Bigrams()
    expected = total_loss(model.table.detach(), 0.0)
    settings = TrainingSettings(batch_size=4)
    trained = Loop(
        model, {"table": model.table}, settings, 4, batch_of, 0, 1, lambda: model.table.sum() * 100
    ).run(0, 1)
    assert trained.losses == [pytest.approx(expected, rel=1e-6)]


def test_non_finite_penalty_leaves_step_out() -> None:
    model = Bigrams()
    start = model.table.detach().clone()
    calls = list[int]()

    def infinite_at_first() -> Tensor:
        calls.append(1)
        return model.table.sum() * (float("inf") if len(calls) == 1 else 0.0)

    settings = TrainingSettings(batch_size=4, learning_rate=0.1)
    loop = Loop(model, {"table": model.table}, settings, 4, batch_of, 0, 2, infinite_at_first)
    trained = loop.run(0, 2)
    assert trained.skipped_steps == 1
    # AdamW made its first step and no other.
    assert float((model.table.detach() - start).abs().max()) == pytest.approx(0.1, rel=1e-3)

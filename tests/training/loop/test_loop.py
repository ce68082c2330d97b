"""The training loop on a model of one matrix, against slow loops that share only torch's AdamW."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from espalier.data.tasks.encoding import Encoded
from espalier.data.tasks.item import Batch, collate
from espalier.errors import EspalierError
from espalier.settings.tables.training import TrainingSettings
from espalier.training.loop import Loop
from espalier.training.loss import summed_loss
from espalier.training.sequences import sequences_of_step

pytestmark = pytest.mark.usefixtures("tests_on_device")

VOCABULARY = 7
POISON = 6
SEQUENCES = [
    Encoded((1, 2, 3, 4, 5), 4), Encoded((2, 5), 1), Encoded((0, 3, 3), 1),
    Encoded((4, 4, 1, 0, 2, 3), 2), Encoded((5, 1, 2), 2), Encoded((3, 0, 5, 5), 3),
]  # fmt: skip
"""Prompts and answers of unequal lengths."""


class Bigram(nn.Module):
    """Model in which a row of a matrix holds the logits of the next token; NaN after ``POISON``."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        logits = self.table[input_ids]
        return SimpleNamespace(
            logits=logits.masked_fill((input_ids == POISON)[..., None], math.nan)
        )


def loop_of(
    model: Bigram,
    sequences: Sequence[Encoded] = SEQUENCES,
    seed: int = 9,
    steps: int = 20,
    max_gradient_norm: float = math.inf,
    **settings: Any,
) -> Loop:
    given = {"batch_size": 2, "learning_rate": 0.05} | settings
    # ``model_copy`` skips validation, so tests can use values that a run may not have.
    chosen = TrainingSettings().model_copy(update=given)

    def batch(numbers: Sequence[int]) -> Batch:
        return collate([sequences[number] for number in numbers], 0)

    loop = Loop(model, {"table": model.table}, chosen, len(sequences), batch, seed, steps)
    loop = replace(loop, max_gradient_norm=max_gradient_norm)
    return loop


def mean_loss(table: Tensor, sequences: Sequence[Encoded]) -> Tensor:
    """Return the mean of -log p over the tokens of all answers, computed one by one."""
    losses = []
    for sequence in sequences:
        ids = sequence.token_ids
        for place in range(len(ids) - sequence.answer_tokens, len(ids)):
            row = table[ids[place - 1]]
            losses.append(row.exp().sum().log() - row[ids[place]])
    return torch.stack(losses).mean()


def by_hand(
    steps: Sequence[int], batch: int, sequences: Sequence[Encoded] = SEQUENCES, **options: Any
) -> Tensor:
    """Return the table after the given steps of AdamW."""
    table = Bigram().table
    optimizer = torch.optim.AdamW([table], **{"lr": 0.05, "weight_decay": 0.0} | options)
    for step in steps:
        chosen = [sequences[number] for number in sequences_of_step(len(sequences), batch, step, 9)]
        table.grad = torch.autograd.grad(mean_loss(table, chosen), table)[0]
        optimizer.step()
    return table.detach()


@pytest.fixture
def gradients() -> Iterator[list[Tensor]]:
    """Gradients of the first parameter that each step of the optimiser receives."""
    found: list[Tensor] = []

    def note(optimizer: Any, *_: Any) -> None:
        found.append(optimizer.param_groups[0]["params"][0].grad.clone())

    handle = register_optimizer_step_pre_hook(note)
    yield found
    handle.remove()


# ----- steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch_size", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_steps_equal_adamw_on_mean(batch_size: int, accumulation: int) -> None:
    """Any division of a step into batches gives the same result, over two epochs."""
    model = Bigram()
    loop = loop_of(model, batch_size=batch_size, accumulation=accumulation, weight_decay=0.1)
    loop = replace(loop, betas=(0.8, 0.95))
    trained = loop.run(3, 5)
    expected = by_hand(range(3, 8), 4, betas=(0.8, 0.95), weight_decay=0.1)
    torch.testing.assert_close(model.table.detach(), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected, Bigram().table, atol=0.01)
    assert trained.skipped_steps == 0
    chosen = [SEQUENCES[number] for number in sequences_of_step(6, 4, 3, 9)]
    assert trained.losses[0] == pytest.approx(mean_loss(Bigram().table, chosen).item(), rel=1e-5)
    assert len(trained.losses) == 5


@pytest.mark.slow
def test_a_compiled_model_takes_the_same_steps() -> None:
    """Batches of other shapes do not change the result."""
    model = Bigram()
    trained = loop_of(model, compile=True).run(0, 6)
    torch.testing.assert_close(model.table.detach(), by_hand(range(6), 2), rtol=1e-5, atol=1e-6)
    assert len(trained.weighed) == 6


def test_learning_rate_follows_run_s_steps(gradients: list[Tensor]) -> None:
    """AdamW's first step moves every element with a gradient by the learning rate.

    Step 5 of 20 has 3/4 of the rate.
    """
    model = Bigram()
    loop_of(model, schedule="linear").run(5, 1)
    moved = (model.table - Bigram().table).abs()[gradients[0].abs() > 1e-4]
    torch.testing.assert_close(moved, torch.full_like(moved, 0.75 * 0.05), rtol=1e-3, atol=0)


def test_a_gradient_is_clipped_to_the_norm(gradients: list[Tensor]) -> None:
    for norm in (math.inf, 1000.0, 0.1):
        loop_of(Bigram(), max_gradient_norm=norm, accumulation=2).run(0, 1)
    free, far, clipped = gradients
    assert torch.equal(free, far)
    assert free.norm() > 0.3
    assert clipped.norm().item() == pytest.approx(0.1, rel=1e-4)
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm())


def test_classes_count_an_item_each() -> None:
    batch = Batch(
        torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2, dtype=torch.int64), torch.tensor([1, 0])
    )
    logits = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])
    loss = summed_loss(lambda **_: SimpleNamespace(logits=logits), batch, logits.device)
    assert loss.item() == pytest.approx(math.log(4 / 3) + math.log(2))


def test_the_model_is_left_in_evaluation_mode() -> None:
    model = Bigram()
    seen = []
    model.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    loop_of(model).run(0, 2)
    assert seen == [True, True]
    assert not model.training


# ----- FedProx ------------------------------------------------------------------------------------


def test_the_proximal_term_by_finite_differences(gradients: list[Tensor]) -> None:
    """The gradient of step 2 is that of loss + mu / 2 ||w - w_global||^2.

    w_global is the value before step 1.
    """
    mu = 0.7
    model = Bigram()
    after_one = Bigram()
    loop_of(after_one, proximal=mu).run(0, 1)
    loop_of(model, proximal=mu).run(0, 2)
    anchor = Bigram().table.detach().double()
    at = after_one.table.detach().double()
    chosen = [SEQUENCES[number] for number in sequences_of_step(6, 2, 1, 9)]

    def objective(table: Tensor) -> float:
        return (mean_loss(table, chosen) + mu / 2 * (table - anchor).square().sum()).item()

    found = torch.zeros_like(at)
    step = 1e-5
    for place in range(at.numel()):
        offset = torch.zeros(at.numel(), dtype=torch.float64)
        offset[place] = step
        offset = offset.view_as(at)
        found.view(-1)[place] = (objective(at + offset) - objective(at - offset)) / (2 * step)
    assert (at - anchor).norm() > 0.1
    torch.testing.assert_close(gradients[-1].double(), found, rtol=1e-4, atol=1e-5)


def test_stronger_pull_ends_nearer_to_anchor() -> None:
    distances = []
    for mu in (0.0, 1.0, 100.0):
        model = Bigram()
        loop_of(model, proximal=mu, learning_rate=0.01).run(0, 60)
        distances.append((model.table - Bigram().table).norm().item())
    assert distances[0] > 2 * distances[1] > 8 * distances[2]


# ----- steps that are not finite ------------------------------------------------------------------

POISONED = [*SEQUENCES[:3], Encoded((1, POISON, 2), 2)]


def test_non_finite_step_is_left_out() -> None:
    model = Bigram()
    trained = loop_of(model, POISONED, batch_size=1).run(0, 4)
    bad = next(step for step in range(4) if sequences_of_step(4, 1, step, 9) == [3])
    assert [step for step, loss in enumerate(trained.losses) if math.isnan(loss)] == [bad]
    assert (trained.skipped_steps, trained.weighed) == (
        1,
        [step for step in range(4) if step != bad],
    )
    good = [step for step in range(4) if step != bad]
    torch.testing.assert_close(
        model.table.detach(), by_hand(good, 1, POISONED), rtol=1e-5, atol=1e-6
    )
    assert trained.moments["table"]["step"] == 3
    assert torch.isfinite(trained.moments["table"]["exp_avg_sq"]).all()


def test_step_without_gradient_weighs_nothing() -> None:
    """From step 2 on the loss has no gradient; the gradient of the proximal term does not count."""
    model = Bigram()
    seen = list[Tensor]()
    model.table.register_hook(
        lambda gradient: gradient * (not (seen.append(gradient) or len(seen) > 1))
    )
    trained = loop_of(model, proximal=0.5).run(3, 4)
    assert (trained.skipped_steps, trained.weighed) == (0, [3])


def test_penalty_makes_no_step_count() -> None:
    """HetLoRA's decay has a gradient; it does not decide which steps count as reading text."""
    model = Bigram()
    seen = list[Tensor]()

    def of_the_first_alone(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient if len(seen) == 1 else 0 * gradient

    model.register_forward_hook(
        lambda module, _, output: output.logits.register_hook(of_the_first_alone) and None
    )
    loop = replace(loop_of(model, batch_size=4), penalty=lambda: model.table.square().sum())
    trained = loop.run(3, 4)
    pulled = model.table.detach().clone()
    assert (trained.skipped_steps, trained.weighed) == (0, [3])
    loop_of(alone := Bigram(), batch_size=4).run(3, 1)
    # Every step applies the gradient of the penalty.
    assert pulled.norm() < alone.table.norm()


def test_one_bad_batch_spoils_its_step() -> None:
    """A mean over the other batches would be another step than the requested one."""
    with pytest.raises(
        EspalierError, match=r"training.learning-rate = 0.05: no step had a finite loss"
    ):
        loop_of(Bigram(), POISONED, batch_size=1, accumulation=4).run(0, 2)


def test_nothing_changes_when_no_step_is_finite() -> None:
    model = Bigram()
    with pytest.raises(EspalierError, match="lower it"):
        loop_of(model, POISONED[3:], batch_size=1, proximal=0.5, weight_decay=0.5).run(0, 3)
    assert torch.equal(model.table, Bigram().table)
    assert not model.training


def test_non_finite_gradient_is_left_out() -> None:
    model = Bigram()
    model.table.register_hook(lambda gradient: gradient / 0)
    with pytest.raises(EspalierError, match="no step had a finite loss and gradient"):
        loop_of(model).run(0, 1)


# ----- repetition ---------------------------------------------------------------------------------


def test_given_state_is_not_changed() -> None:
    first = Bigram()
    second = Bigram()
    state = loop_of(first).run(0, 3).moments
    kept = {name: value.clone() for name, value in state["table"].items()}
    loop_of(second).run(3, 2, state)
    assert all(torch.equal(value, kept[name]) for name, value in state["table"].items())


def test_the_order_of_names_does_not_matter() -> None:
    """The order matters neither within a call nor between two calls."""
    tables = []
    for names in (("a", "b"), ("b", "a")):
        model = Bigram()
        model.second = nn.Parameter(torch.zeros(3))
        loop = loop_of(model)
        loop = replace(
            loop, parameters={name: {"a": model.table, "b": model.second}[name] for name in names}
        )
        state = loop.run(0, 2).moments
        loop.run(2, 2, state)
        tables.append(model.table.detach())
    assert torch.equal(*tables)

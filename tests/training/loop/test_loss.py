"""Custom losses against slow loops: distillation from a teacher's logits, and the required form."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.data.tasks.item import Batch
from espalier.training.loss import Loss, counted_predictions, num_counted, summed_loss
from tests.training.loop.two_tensors import (
    RATE,
    SEQUENCES,
    VOCABULARY,
    Rows,
    batch_of,
    loop_of,
    mean_loss,
    predicted,
)

pytestmark = pytest.mark.usefixtures("tests_on_device")


def distillation(teacher: Rows) -> Loss:
    """Return a loss: cross entropy with the teacher's probabilities, summed over predictions."""

    def loss(model: Rows, batch: Batch, device: torch.device) -> Tensor:
        with torch.no_grad():
            wanted, _ = counted_predictions(teacher, batch, device)
        found, _ = counted_predictions(model, batch, device)
        return -(wanted.softmax(-1) * found.log_softmax(-1)).sum()

    return loss


def distilled_by_hand(teacher: Rows, steps: range) -> tuple[Rows, list[float]]:
    """Distil prediction by prediction and word by word, with four sequences per step."""
    model = Rows()
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for step in steps:
        terms = []
        for before, _ in predicted(step, 4):
            mine, theirs = (one.table[before] + one.shift for one in (model, teacher))
            normaliser = mine.exp().sum().log()
            other = theirs.detach().exp().sum().log()
            terms += [
                -(theirs[word].detach() - other).exp() * (mine[word] - normaliser)
                for word in range(VOCABULARY)
            ]
        loss = torch.stack(terms).sum() / len(predicted(step, 4))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, losses


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_distillation_equals_a_slow_loop(accumulation: int) -> None:
    """Any division of a step into batches gives the same result."""
    teacher = Rows(seed=11)
    model = Rows()
    loop = loop_of(model, batch_size=4 // accumulation, accumulation=accumulation)
    loop = replace(loop, loss=distillation(teacher))
    trained = loop.run(3, 4)
    expected, losses = distilled_by_hand(teacher, range(3, 7))
    torch.testing.assert_close(model.table, expected.table, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.shift, expected.shift, rtol=1e-5, atol=1e-6)
    assert trained.losses == pytest.approx(losses, rel=1e-5)
    assert (trained.weighed, trained.skipped_steps) == ([3, 4, 5, 6], 0)
    assert torch.equal(teacher.table, Rows(seed=11).table)


def test_a_teacher_is_learnt_from() -> None:
    teacher = Rows(seed=11)
    model = Rows()
    loop = loop_of(model, batch_size=5)
    loop = replace(loop, loss=distillation(teacher))
    loop.run(0, 300)
    seen = sorted({before for step in range(5) for before, _ in predicted(step, 5)})
    mine, theirs = ((one.table + one.shift)[seen].softmax(-1) for one in (model, teacher))
    assert (mine - theirs).abs().max() < 0.01
    assert (theirs - (Rows().table + Rows().shift)[seen].softmax(-1)).abs().max() > 0.3


def test_batch_terms_are_averaged_per_prediction() -> None:
    """A constant of 2 per sequence adds 2 x sequences / predictions to the reported loss.

    It has no gradient.
    """
    plain = Rows()
    with_term = Rows()
    first = loop_of(plain, accumulation=2).run(0, 2)
    loop = loop_of(with_term, accumulation=2)

    def with_constant(model: Any, batch: Batch, device: torch.device) -> Tensor:
        return summed_loss(model, batch, device) + 2.0 * len(batch.labels)

    loop = replace(loop, loss=with_constant)
    second = loop.run(0, 2)
    for step, (one, other) in enumerate(zip(first.losses, second.losses, strict=True)):
        assert other - one == pytest.approx(2.0 * 4 / len(predicted(step, 4)), rel=1e-4)
        assert one == pytest.approx(mean_loss(Rows(), step, 4).item(), rel=1e-4) or step
    torch.testing.assert_close(plain.table, with_term.table, rtol=1e-5, atol=1e-6)


def test_a_loss_without_a_gradient_weighs_nothing() -> None:
    """Covers a penalty that moves the parameters."""
    model = Rows()
    loop = loop_of(model)
    loop = replace(loop, loss=lambda model, batch, device: 0.0 * summed_loss(model, batch, device))
    loop = replace(loop, penalty=lambda: model.shift.square().sum())
    trained = loop.run(0, 2)
    assert (trained.weighed, trained.losses) == ([], [0.0, 0.0])
    assert torch.equal(model.table, Rows().table)
    assert model.shift.norm() < Rows().shift.norm()


def test_loss_may_draw_from_step_s_generators() -> None:
    """Random numbers of a loss depend only on seed, step and batch.

    The global generator is not advanced.
    """
    drawn: list[list[float]] = []

    def loss(model: Rows, batch: Batch, device: torch.device) -> Tensor:
        drawn[-1].append(torch.rand((), device="cpu").item())
        return summed_loss(model, batch, device)

    for state in (1, 2):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        drawn.append([])
        loop = loop_of(Rows(), accumulation=2)
        loop = replace(loop, loss=loss)
        loop.run(state, 3 - state)
        assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0][2:] == drawn[1]
    assert len(set(drawn[0])) == 4


def test_a_loss_is_one_float32_number() -> None:
    loop = loop_of(Rows())
    loop = replace(
        loop, loss=lambda model, batch, device: summed_loss(model, batch, device).to(torch.bfloat16)
    )
    with pytest.raises(
        ValueError, match=r"a loss is torch.bfloat16, \[\], and must be torch.float32, \[\]"
    ):
        loop.run(0, 1)
    loop = replace(
        loop, loss=lambda model, batch, device: counted_predictions(model, batch, device)[0].sum(0)
    )
    with pytest.raises(ValueError, match=r"a loss is torch.float32, \[6\]"):
        loop.run(0, 1)


def test_predictions_that_count_by_hand() -> None:
    """The predictions are the logits before each token of an answer, in the order of the batch."""
    model = Rows()
    batch = batch_of([2, 0])
    logits, labels = counted_predictions(model, batch, model.table.device)
    rows = [3, *SEQUENCES[0].token_ids[:-1]]
    assert torch.equal(logits, (model.table + model.shift)[rows])
    assert labels.tolist() == [3, 2, 3, 4, 5]
    assert num_counted(batch) == 5

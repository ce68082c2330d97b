"""An observer sees exactly the gradients of the mean loss and cannot change a step."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from espalier.errors import EspalierError, InputError
from tests.training.loop.two_tensors import Rows, loop_of, mean_loss

pytestmark = pytest.mark.usefixtures("tests_on_device")

Seen = list[tuple[int, Mapping[str, Tensor]]]


def seen_by(seen: Seen, step: int, gradients: Mapping[str, Tensor]) -> None:
    seen.append((step, gradients))


def slopes(step: int, batch: int) -> dict[str, Tensor]:
    """Return the gradient of the mean loss at the initial parameters.

    It is computed by finite differences in float64.
    """
    found = {}
    for name in ("table", "shift"):
        model = Rows().double()
        values = getattr(model, name).data.view(-1)
        slope = torch.empty_like(values)
        for place in range(len(values)):
            sides = []
            for offset in (1e-5, -2e-5):
                values[place] += offset
                sides.append(mean_loss(model, step, batch).item())
            values[place] += 1e-5
            slope[place] = (sides[0] - sides[1]) / 2e-5
        found[name] = slope.view_as(getattr(model, name))
    return found


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_gradients_equal_finite_differences(accumulation: int) -> None:
    """Clipping and penalties do not show; a step makes one call, for any number of batches."""
    seen: Seen = []
    loop = loop_of(
        model := Rows(),
        batch_size=4 // accumulation,
        accumulation=accumulation,
        max_gradient_norm=0.001,
    )
    loop = replace(loop, penalty=lambda: 50.0 * model.table.square().sum())
    loop = replace(loop, observer=lambda step, gradients: seen_by(seen, step, gradients))
    loop.run(7, 1)
    ((step, gradients),) = seen
    assert step == 7
    assert list(gradients) == ["table", "shift"]
    for name, slope in slopes(7, 4).items():
        torch.testing.assert_close(gradients[name].double(), slope, rtol=1e-4, atol=1e-6)
    assert gradients["table"].norm() > 0.1
    assert model.table.grad is not None
    # The gradient of the step itself was clipped.
    assert model.table.grad.norm() < 0.0011


def test_the_pull_to_the_anchor_is_not_shown() -> None:
    """Step 2 starts away from the anchor; the observer sees only the gradient of the loss there."""
    seen: Seen = []
    loop_of(after_one := Rows(), proximal=1.0).run(0, 1)
    loop = loop_of(Rows(), proximal=1.0)
    loop = replace(loop, observer=lambda step, gradients: seen_by(seen, step, gradients))
    loop.run(0, 2)
    table = torch.autograd.grad(mean_loss(after_one, 1), after_one.table)[0]
    torch.testing.assert_close(seen[1][1]["table"], table, rtol=1e-4, atol=1e-6)
    assert (after_one.table - Rows().table).abs().max() > 0.04


def test_observer_changes_nothing() -> None:
    seen: Seen = []

    def rude(step: int, gradients: Mapping[str, Tensor]) -> None:
        seen.append((step, {name: gradient.clone() for name, gradient in gradients.items()}))
        for gradient in gradients.values():
            gradient.fill_(math.nan)

    kept: Seen = []
    models = []
    for observer in (None, rude, lambda step, gradients: seen_by(kept, step, gradients)):
        loop = loop_of(model := Rows(), max_gradient_norm=0.1, accumulation=2, weight_decay=0.1)
        loop = replace(loop, observer=observer)
        models.append((model, loop.run(2, 4)))
    assert [step for step, _ in kept] == [2, 3, 4, 5]
    for (_, first), (_, second) in zip(seen, kept, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)
    for model, trained in models[1:]:
        assert torch.equal(model.table, models[0][0].table)
        assert torch.equal(model.shift, models[0][0].shift)
        assert (trained.losses, trained.weighed) == (models[0][1].losses, models[0][1].weighed)


def test_unreached_parameter_is_left_out() -> None:
    seen: Seen = []
    loop = loop_of(model := Rows())
    loop = replace(
        loop, parameters={"shift": model.shift, "unused": torch.nn.Parameter(torch.zeros(2))}
    )
    loop = replace(loop, observer=lambda step, gradients: seen_by(seen, step, gradients))
    loop.run(0, 1)
    assert [list(gradients) for _, gradients in seen] == [["shift"]]


@pytest.mark.parametrize("what", ["loss", math.inf, math.nan, 1e25])
def test_non_finite_step_shows_no_gradients(what: str | float) -> None:
    """Step 2 of three is not finite; the norm of a gradient of 1e25 exceeds float32."""
    seen: Seen = []
    model = Rows()
    calls = list[int]()

    def second_is_broken(gradient: Tensor) -> Tensor:
        return gradient * (float(what) if len(calls) == 2 else 1.0)

    def noted(module: object, inputs: object, output: SimpleNamespace) -> None:
        calls.append(1)
        if what == "loss" and len(calls) == 2:
            output.logits = output.logits * math.nan

    model.register_forward_hook(noted)
    if what != "loss":
        model.shift.register_hook(second_is_broken)
    loop = loop_of(model)
    loop = replace(loop, observer=lambda step, gradients: seen_by(seen, step, gradients))
    trained = loop.run(0, 3)
    assert ([step for step, _ in seen], trained.weighed, trained.skipped_steps) == (
        [0, 1, 2],
        [0, 2],
        1,
    )
    assert [len(gradients) for _, gradients in seen] == [2, 0, 2]
    assert all(
        bool(torch.isfinite(gradient).all())
        for _, gradients in seen
        for gradient in gradients.values()
    )


def test_observer_s_error_ends_training() -> None:
    def refuses(step: int, gradients: Mapping[str, Tensor]) -> None:
        raise InputError("no more")

    loop = loop_of(model := Rows())
    loop = replace(loop, observer=refuses)
    with pytest.raises(EspalierError, match="no more"):
        loop.run(0, 2)
    assert torch.equal(model.table, Rows().table)
    assert not model.training

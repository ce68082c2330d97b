"""Limits of client updates: no training exceeds them, and fabricated updates that do are found."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from espalier.messages.blobs.adapters import pack_adapters, unpack_adapters
from espalier.settings.tables.training import BETAS, TrainingSettings
from strategies.averaging.training_bound import Reach, largest_step


def any_training(**chosen: Any) -> TrainingSettings:
    """Return training settings without validation."""
    return TrainingSettings().model_copy(update=chosen)


def adamw(gradients: list[float], start: float = 0.0, **chosen: float) -> list[float]:
    """Return the values of one number before and after each step of torch's AdamW, float64."""
    number = nn.Parameter(torch.tensor([start], dtype=torch.float64))
    optimizer = torch.optim.AdamW(
        [number], **{"lr": 1.0, "betas": (0.9, 0.999), "weight_decay": 0.0} | chosen
    )  # type: ignore[arg-type]
    values = [start]
    for gradient in gradients:
        number.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        values.append(number.item())
    return values


def test_worst_gradients_reach_the_bound() -> None:
    """The Cauchy-Schwarz bound is tight for g_k proportional to (beta1 / beta2)^(t - k)."""
    beta1, beta2 = BETAS
    steps = 12
    gradients = [1e3 * (beta1 / beta2) ** (steps - k) for k in range(1, steps + 1)]
    values = adamw(gradients, betas=(beta1, beta2))
    assert abs(values[-1] - values[-2]) == pytest.approx(largest_step(steps), rel=1e-6)


def test_by_hand() -> None:
    assert largest_step(1) == pytest.approx(1.0)
    assert largest_step(10) == pytest.approx(1.0432, abs=1e-3)
    assert largest_step(100_000) == pytest.approx(0.1 / math.sqrt(0.001 * (1 - 0.81 / 0.999)))


@settings(max_examples=40, deadline=None)
@given(
    gradients=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12),
    start=st.floats(-5, 5),
    rate=st.floats(1e-6, 2.0),
    decay=st.floats(0, 3.0),
)
def test_no_gradients_exceed_half_the_limit(
    gradients: list[float], start: float, rate: float, decay: float
) -> None:
    """The other half of the limit is for the rounding of the wire dtype."""
    reach = Reach(any_training(learning_rate=rate, weight_decay=decay, steps=len(gradients)))
    reach.note("block-0000", {"attn.q.lora_a": torch.tensor([[start]], dtype=torch.float64)})
    end = adamw(gradients, start, lr=rate, weight_decay=decay)[-1]
    assert abs(end) <= reach.limit("block-0000", "attn.q.lora_a") / 2 * (1 + 1e-9) + 1e-12


@settings(max_examples=40, deadline=None)
@given(
    gradients=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12),
    start=st.floats(-5, 5),
    rate=st.floats(1e-6, 2.0),
    decay=st.floats(0, 3.0),
)
def test_no_difference_exceeds_half_the_limit(
    gradients: list[float], start: float, rate: float, decay: float
) -> None:
    """Differences are sent here.

    Without weight decay, the initial value has almost no effect on the limit.
    """
    training = any_training(learning_rate=rate, weight_decay=decay, steps=len(gradients))
    reach = Reach(training, differences=True)
    reach.note("block-0000", {"attn.q.lora_a": torch.tensor([[start]], dtype=torch.float64)})
    end = adamw(gradients, start, lr=rate, weight_decay=decay)[-1]
    limit = reach.limit("block-0000", "attn.q.lora_a")
    assert abs(end - start) <= limit / 2 * (1 + 1e-9) + 1e-12
    if decay == 0:
        assert limit <= 2 * (reach.distance + 12 * 2.0**-23 * abs(start))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1.9999, 250.0])
def test_rounded_difference_stays_in_the_limit(size: float) -> None:
    """Each step of 0.51 units in the last place moves a number by one unit."""
    steps = 40
    number = torch.tensor([size])
    unit = (torch.nextafter(number, torch.tensor([torch.inf])) - number).item()
    rate = 0.51 * unit
    reach = Reach(any_training(learning_rate=rate, steps=steps), differences=True)
    reach.note("head", {"x": number})
    moved = number.clone()
    for _ in range(steps):
        moved += rate
    assert (moved - number).item() > 1.5 * steps * rate
    assert (moved - number).item() * 1.18 <= reach.limit("head", "x")


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "nf4"])
def test_error_feedback_stays_within_the_slack(wire_dtype: str) -> None:
    """Covers numbers that become small after large ones, whose rounding error is sent later."""
    generator = torch.Generator().manual_seed(3)
    lost = dict[str, Tensor]()
    reach = Reach(any_training(learning_rate=1e-6, steps=1))
    for size in (1.0, 1.0, 1.0, 1e-3, 1e-6):
        trained = {"x": size * (2 * torch.rand(500, generator=generator) - 1)}
        reach.note("head", trained)
        blob, lost = pack_adapters(trained, wire_dtype, lost)  # type: ignore[arg-type]
        sent = unpack_adapters({"x": (500,)}, blob, wire_dtype)["x"]  # type: ignore[arg-type]
        assert sent.abs().max() <= reach.limit("head", "x")


def test_enormous_weight_decay_has_no_limit() -> None:
    reach = Reach(any_training(learning_rate=1.0, weight_decay=1e300, steps=5))
    reach.note("head", {"x": torch.ones(2), "y": torch.zeros(2)})
    assert reach.limit("head", "x") == math.inf
    assert not math.isnan(reach.limit("head", "y"))

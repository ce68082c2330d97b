"""Settings of the training loop that no run can use are refused by their keys."""

from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.settings.run import parse


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("base", "int8"), ("steps", 0), ("batch-size", 0), ("accumulation", 0),
        ("learning-rate", 0.0), ("schedule", "step"), ("weight-decay", -0.1), ("proximal", -0.01),
        ("learning-rate", float("nan")), ("steps", 1.5), ("learning-rate", 0.11),
        ("learning-rate", 1e30), ("proximal", 1.1),
    ],
)  # fmt: skip
def test_a_mistake_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(EspalierError) as caught:
        parse({"method": "fedpetuning", f"training.{key}": value})
    assert f"training.{key} = {value!r}: " in str(caught.value)


@pytest.mark.parametrize(("decay", "refused"), [(0.99, False), (1.01, True), (1e300, True)])
def test_a_round_does_not_forget_its_first_steps(decay: float, refused: bool) -> None:
    """The product is 0.1 times the weight decay times 10 steps."""
    given = {
        "method": "hetlora",
        "training.learning-rate": 0.1,
        "training.steps": 10,
        "training.weight-decay": decay,
    }
    if not refused:
        assert parse(given).training.weight_decay == decay
        return
    with pytest.raises(
        EspalierError,
        match=r"weight-decay = .*: learning-rate x weight-decay x steps = .* is above 1, so that",
    ):
        parse(given)


def test_method_without_training_ignores_them() -> None:
    assert "training" not in parse({"method": "fedprllm", "training.steps": 0}).nested()

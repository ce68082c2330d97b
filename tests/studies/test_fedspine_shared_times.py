"""Times of LoRA on a model that all share, by the fleet's clock."""

from pathlib import Path

import pytest
from bench import home

from benchmarks.fedspine.shared_times import seconds_of_shared
from espalier.modeling.opened import OpenedModel
from espalier.settings.run import parse
from espalier.wire.adapters import adapter_plan
from strategies.methods.refining_time import fleet_of


def test_times_of_a_shared_model_are_those_of_its_devices(tmp_path: Path) -> None:
    """Per token 4 operations for a frozen parameter, 6 for a trained one; the slowest device counts; no way down at first."""
    model = home(tmp_path).model
    settings = parse(
        {
            "method": "fedpetuning", "model": str(model), "num-clients": 3, "federation.rounds": 2, "training.steps": 5,
            "training.batch-size": 2, "data.window-tokens": 16, "lora.rank": 4,
        }
    )  # fmt: skip
    fleet = fleet_of("low")
    assert fleet is not None
    plan = OpenedModel(model).plan
    trained = adapter_plan(plan, settings.lora).num_parameters
    expected = []
    for number in (1, 2):
        seconds = []
        for client in range(3):
            conditions = fleet.drawn(settings.seed, client, number)
            computing = 5 * 2 * 16 * (4 * plan.num_parameters + 6 * trained) / conditions.operations_per_second
            seconds.append(computing + 8 * 4 * trained * number / conditions.bits_per_second)
        expected.append(sum(expected[-1:]) + max(seconds))
    assert seconds_of_shared(settings, fleet, range(3)) == pytest.approx(expected)

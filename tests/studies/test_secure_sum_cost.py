"""Measurement of the cost of secure sums, on the demo model."""

import pytest

from benchmarks.speed.secure_sum import measured, table
from espalier.environment.paths import DEMO
from espalier.hf.opening.opened_model import open_model


@pytest.mark.parametrize("method", ["pooled-pruning", "fedpetuning"])
def test_statistics_and_adapters_have_at_most_twice_the_bytes(method: str) -> None:
    found = measured(method, 3, open_model(DEMO))
    assert 1 <= found["ratio_up"] < 2
    assert len(list(table([found]))) == 3

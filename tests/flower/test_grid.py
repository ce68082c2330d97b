"""Grids of simulations: only the listed classes count."""

from unittest.mock import Mock

import pytest
from flwr.serverapp import Grid
from flwr.superlink import grid as flower_grids

from espalier.flower.shared_nodes import GRIDS, is_simulation
from tests.in_process import InProcessGrid


class UnknownGrid(Grid):
    """Grid class that a later version of Flower might add."""


def of_kind(kind: type[Grid]) -> Grid:
    """Return an object of this class without a connection."""
    return Mock(spec=kind)


def test_in_memory_grid_is_a_simulation() -> None:
    assert is_simulation(of_kind(flower_grids.InMemoryGrid))


def test_the_tests_own_grid_is_listed_by_name() -> None:
    assert GRIDS[0] is flower_grids.InMemoryGrid
    assert InProcessGrid in GRIDS
    assert {grid.__name__ for grid in GRIDS[1:]} == {"InProcessGrid"}


@pytest.mark.parametrize(
    "kind",
    [
        Grid,
        UnknownGrid,
        *(vars(flower_grids)[name] for name in flower_grids.__all__ if name != "InMemoryGrid"),
    ],
)
def test_every_other_grid_is_a_deployment_s(kind: type[Grid]) -> None:
    assert not is_simulation(of_kind(kind))

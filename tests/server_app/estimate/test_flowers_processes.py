"""Memory of a SuperLink and a SuperNode: linear interpolation between measured points."""

from itertools import pairwise

import pytest

from server_app.estimate.messages.traffic import Traffic
from server_app.estimate.work.memory import (
    DATABASE,
    IN_SUPERLINK,
    IN_SUPERNODE,
    LIBRARIES,
    MEGA,
    superlink,
    superlink_disk,
    supernode,
)


def held_by_superlink(largest: float, clients: int) -> float:
    return (
        superlink(Traffic(largest_reply=round(largest * MEGA)), clients).peak
        - LIBRARIES["SuperLink"]
    ) / MEGA


def test_between_two_points_and_beyond_the_last() -> None:
    assert held_by_superlink(0, 2) == 0
    # The blobs of two clients have 28 MB together.
    assert held_by_superlink(14, 2) == 85
    assert held_by_superlink(56.5 / 2, 2) == pytest.approx(85 + (298 - 85) / 2)
    assert held_by_superlink(42.5, 4) == held_by_superlink(85, 2) == 420
    assert held_by_superlink(384, 1) == pytest.approx(758 + 758 - 687)
    asked = Traffic(largest_reply=50 * MEGA, largest_request=100 * MEGA)
    assert superlink(asked, 1).peak - LIBRARIES["SuperLink"] == held_by_superlink(150, 1) * MEGA
    assert (supernode(42 * MEGA).peak - LIBRARIES["SuperNode"]) / MEGA == 150


@pytest.mark.parametrize("points", [IN_SUPERLINK, IN_SUPERNODE])
def test_more_is_held_for_more(points: list[tuple[float, float]]) -> None:
    assert all(x < further and y <= more for (x, y), (further, more) in pairwise(points))


def test_the_database_is_there_before_any_message() -> None:
    assert superlink_disk(0, 3) == DATABASE
    assert superlink_disk(100, 3) == DATABASE + 600

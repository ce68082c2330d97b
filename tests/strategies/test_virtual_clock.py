"""Virtual times, compared with values computed by hand."""

from espalier.settings.tables.fleet import Conditions
from strategies.fleet import DeviceTime, RoundTime, sending_seconds, training_operations

SLOW = Conditions(1e9, 2e6)


def test_on_paper() -> None:
    """20 steps of 100 tokens take 2000 * 4300 operations.

    The model has 1000 frozen and 50 trained parameters. 1 MB is 8 megabits.
    """
    assert training_operations(20 * 100, 1000, 50) == 8_600_000
    assert sending_seconds(1_000_000, SLOW) == 4
    assert training_operations(0, 1000, 50) == sending_seconds(0, SLOW) == 0


def test_waiting_on_paper() -> None:
    """Devices with times of 1, 2 and 6 seconds wait for 5, 4 and 0 seconds."""
    times = {4: DeviceTime(1.0, 0), 0: DeviceTime(2.0, 0), 2: DeviceTime(6.0, 0)}
    note = RoundTime.of(1, times)
    assert (note.seconds, note.waiting_seconds) == (6, 3)
    assert RoundTime.of(1, {}) == RoundTime(1, 0.0, 0.0, {})
    assert RoundTime.from_json(note.to_json()) == note

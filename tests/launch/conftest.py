"""What tests of the ``espalier`` command share."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def interrupts_count() -> Iterator[None]:
    """Whoever starts the tests in the background has interrupts ignored, by them and by what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def nothing_is_opened_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests here are of what comes after the look at local files, which takes a process of its own."""
    monkeypatch.setattr("espalier.launch.command.run_in_app", lambda *_: 0)


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperLink of which a test has the address only is not waited for."""
    monkeypatch.setattr("espalier.launch.superlink.await_superlink", lambda _: True)

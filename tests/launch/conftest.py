"""Fixtures of the tests of the ``espalier`` command."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def interrupts_count() -> Iterator[None]:
    """Handle SIGINT even if the tests run in the background.

    Background processes ignore SIGINT, and the processes that they start inherit this.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def nothing_is_opened_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of local files, which takes a process of its own."""
    monkeypatch.setattr("espalier.launch.run.run_in_app", lambda *_: 0)


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for SuperLinks that are only an address."""
    monkeypatch.setattr("espalier.launch.superlink.await_superlink", lambda _: True)

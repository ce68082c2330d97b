"""What tests of the ``espalier`` command share."""

import pytest


@pytest.fixture(autouse=True)
def nothing_is_opened_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests here are of what comes after the look at local files, which takes a process of its own."""
    monkeypatch.setattr("espalier.launch.command.run_in_app", lambda *_: 0)

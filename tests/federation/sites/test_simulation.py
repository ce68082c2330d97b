"""Detection of processes that play a simulated node: only a Ray actor counts."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from client_app.simulation import in_simulation, playing_a_node


def ray(initialized: bool, actor: str | None) -> Any:
    """Return a stub of Ray with its state in this process and the process's actor ID."""
    context = SimpleNamespace(get_actor_id=lambda: actor)
    return SimpleNamespace(is_initialized=lambda: initialized, get_runtime_context=lambda: context)


class Broken:
    """Stub of another library with the name ``ray``."""

    def is_initialized(self) -> bool:
        raise RuntimeError


@pytest.mark.parametrize(
    ("library", "simulated"),
    [
        (None, False),
        (ray(False, None), False),
        # Ray is imported but not started, as in flwr-clientapp.
        (ray(False, "a1"), False),
        # A Ray driver is no actor.
        (ray(True, None), False),
        (ray(True, "a1"), True),
        (Broken(), False),
        (SimpleNamespace(), False),
    ],
)
def test_only_a_ray_actor_is_simulated(
    monkeypatch: pytest.MonkeyPatch, library: Any, simulated: bool
) -> None:
    if library is None:
        monkeypatch.delitem(sys.modules, "ray", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "ray", library)
    assert in_simulation() == simulated


def test_direct_caller_of_app_plays_a_node() -> None:
    assert not in_simulation()
    with playing_a_node():
        assert in_simulation()
    assert not in_simulation()

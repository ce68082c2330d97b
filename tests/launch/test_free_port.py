"""Search for free ports on this machine."""

import socket

import pytest

from espalier.launch import addresses as module
from espalier.launch.addresses import free_port


def test_taken_and_avoided_ports_are_not_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = free_port()
    monkeypatch.setattr(module, "PORTS", range(first, first + 3))
    monkeypatch.setattr(module, "_is_free", lambda port: port != first)
    assert {free_port([first + 1]) for _ in range(20)} == {first + 2}
    with pytest.raises(OSError, match=f"no free port between {first} and {first + 2}"):
        free_port([first + 1, first + 2])


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_port_taken_at_any_address_is_taken(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        assert not module._is_free(server.getsockname()[1])

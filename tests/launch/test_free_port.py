"""Search for free ports on this machine."""

import socket

import pytest

from espalier.launch import addresses as module
from espalier.launch.addresses import free_port


def test_ports_that_somebody_has_or_that_are_to_be_avoided_are_not_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = free_port()
    monkeypatch.setattr(module, "PORTS", range(first, first + 3))
    monkeypatch.setattr(module, "_is_free", lambda port: port != first)
    assert {free_port([first + 1]) for _ in range(20)} == {first + 2}
    with pytest.raises(OSError, match=f"no free port between {first} and {first + 2}"):
        free_port([first + 1, first + 2])


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_is_taken_at_whatever_address_somebody_listens(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        assert not module._is_free(server.getsockname()[1])

"""Search for a free port for a server that is started on this machine right after."""

import socket
from collections.abc import Collection
from random import SystemRandom

PORTS = range(20000, 32768)
"""Ports below the ephemeral ports of Linux (from 32768), macOS and Windows (from 49152).

A connection of another process could otherwise get the same port before the server listens.
"""
TRIES = 1000


def free_port(avoid: Collection[int] = ()) -> int:
    """Return a port that is free at all addresses of this machine and not among ``avoid``.

    Raises
    ------
    OSError
        No free port was found in ``TRIES`` tries.
    """
    # Processes with the same seed would otherwise choose the same port.
    chance = SystemRandom()
    for _ in range(TRIES):
        port = chance.choice(PORTS)
        if port not in avoid and _is_free(port):
            return port
    raise OSError(
        f"no free port between {PORTS.start} and {PORTS.stop - 1} was found in {TRIES} tries"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True

"""A port for a server of this machine that is started a moment later."""

import socket
from collections.abc import Collection
from random import SystemRandom

PORTS = range(20000, 32768)
"""Below those that Linux (from 32768), macOS and Windows (from 49152) give to whoever asks for any port.

Until the server listens, a connection that some process opens could otherwise get the same port.
"""
TRIES = 1000


def free_port(avoid: Collection[int] = ()) -> int:
    """Return a port that nobody has at any of this machine's addresses, and that is not among ``avoid``.

    Raises
    ------
    OSError
        None was found.
    """
    chance = SystemRandom()  # processes with the same seed would choose the same port
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

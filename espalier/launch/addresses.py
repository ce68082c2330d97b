"""Addresses of servers: free ports of this machine, and a wait for a SuperLink to answer.

The same compose file may have started it.
"""

import re
import socket
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from random import SystemRandom

from espalier.errors import InputError
from espalier.flower.control_api import listens

PORTS = range(20000, 32768)
"""Ports below the ephemeral ports of Linux (from 32768), macOS and Windows (from 49152).

A connection of another process could otherwise get the same port before the server listens.
"""
TRIES = 1000
WAIT_SECONDS = 120.0
POLL_SECONDS = 0.5
ADDRESS = re.compile(r"(?:[^\s:/@\[\]]+|\[[0-9A-Za-z:.%]+\]):([0-9]{1,5})")
"""Name or IPv4 address, or IPv6 address in brackets, and port."""
MAX_PORT = 65535


def free_port(avoid: Collection[int] = ()) -> int:
    """Return a port that is free at all addresses of this machine and not among ``avoid``.

    Raises OSError if none was found in ``TRIES`` tries.
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
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("", port))
        return True
    return False


def require_address(address: str) -> None:
    """Raise InputError for text that is not ``host:port`` of a SuperLink."""
    found = ADDRESS.fullmatch(address)
    if found is None or not 1 <= int(found[1]) <= MAX_PORT:
        raise InputError(
            f"--superlink {address!r}: is not HOST:PORT; write a name or address without"
            f" http://, and a port from 1 to {MAX_PORT}, for example 127.0.0.1:9093"
        )


def await_superlink(address: str, seconds: float = WAIT_SECONDS) -> bool:
    """Wait ``seconds`` until a server listens at ``host:port``, with one line on standard error.

    Returns
    -------
    True if a server listens. If none does, callers try Flower nevertheless: a proxy may be the only
    way to the SuperLink.
    """
    end = time.monotonic() + seconds
    announced = False
    while not listens(address):
        if time.monotonic() >= end:
            return False
        if not announced:
            announced = True
            print(
                f"espalier: nothing listens at {address} yet; waiting at most {seconds:g} s for"
                " the SuperLink",
                file=sys.stderr,
            )
        time.sleep(POLL_SECONDS)
    return True

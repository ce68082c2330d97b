"""Wait for a SuperLink that was started moments ago, for instance by the same compose file."""

import socket
import sys
import time

WAIT_SECONDS = 120.0
POLL_SECONDS = 0.5
CONNECT_SECONDS = 5.0


def await_superlink(address: str, seconds: float = WAIT_SECONDS) -> bool:
    """Wait until a server listens at an address, with one line on standard error.

    Parameters
    ----------
    address : ``host:port``; without a port number Flower reports the error itself
    seconds : maximum waiting time

    Returns
    -------
    True if a server listens. If none does, callers try Flower nevertheless: a proxy may be the only
    way to the SuperLink.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return False
    end = time.monotonic() + seconds
    told = False
    while not _listens(host.strip("[]"), int(port)):
        if time.monotonic() >= end:
            return False
        if not told:
            told = True
            print(
                f"espalier: nothing listens at {address} yet; waiting for the SuperLink,"
                f" {seconds:g} s at most",
                file=sys.stderr,
            )
        time.sleep(POLL_SECONDS)
    return True


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError):
        # No server listens yet, the host is unknown so far, or the port or name is invalid.
        return False
    return True

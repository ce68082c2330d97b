"""Waiting for a SuperLink that was started a moment ago, for instance by the same compose file."""

import socket
import sys
import time

WAIT_SECONDS = 120.0
POLL_SECONDS = 0.5
CONNECT_SECONDS = 5.0


def await_superlink(address: str, seconds: float = WAIT_SECONDS) -> bool:
    """Wait until something listens at an address, and say so once on standard error.

    Parameters
    ----------
    address : ``host:port``; one without a port number is left to Flower, which says what is wrong with it
    seconds : the longest wait

    Returns
    -------
    Whether something listens. If nothing does, Flower is asked all the same: a proxy may be the only way there.
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
        # Not yet, no such host yet, or no such port or name at all.
        return False
    return True

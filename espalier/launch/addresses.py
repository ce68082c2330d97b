"""Addresses of servers: free ports, a wait for a SuperLink, and who can reach its Control API.

The Control API starts runs, sends programs to the sites and registers keys, without authentication.
So it belongs on the loopback address. From Flower 1.40 on it shares its port with the API that
sites need, so a reverse proxy has to separate them.

Covers: a Control API that listens on another address of this machine, and one that answers at the
address that a site uses.
Does not cover: traffic that networks allow between other machines.
"""

import ipaddress
import os
import pwd
import re
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from random import SystemRandom

import psutil

from espalier.environment.tcp_sockets import LISTENING, tcp_sockets
from espalier.errors import InputError, tell
from espalier.flower import control_api
from espalier.flower.programs import sites_share_port

PORTS = range(20000, 32768)
"""Ports below the ephemeral ports of Linux (from 32768), macOS and Windows (from 49152).

A connection of another process could otherwise get the same port before the server listens.
"""
TRIES = 1000
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


def await_superlink(address: str, seconds: float = 120.0) -> bool:
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
            tell(
                f"nothing listens at {address} yet; waiting at most {seconds:g} s for the SuperLink"
            )
        time.sleep(POLL_SECONDS)
    return True


def listens(address: str, seconds: float = 5.0) -> bool:
    """Return whether a server accepts connections at ``host:port`` within some seconds."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except (OSError, OverflowError, UnicodeError):
        # No server listens yet, the host is unknown so far, or the port or name is invalid.
        return False
    return True


def require_own_superlink(address: str, root_certificates: str | None) -> None:
    """Refuse a SuperLink without TLS on this machine that belongs to another user.

    Another user's SuperLink may hold the port that one's own was meant to have. Processes of root,
    such as containers, are accepted.

    Raises
    ------
    InputError
        The message names the user and the remedy.
    """
    host, _, port = address.rpartition(":")
    if root_certificates or not _is_loopback(host):
        return
    owners = _listening_users(int(port))
    if owners and not owners & {0, os.getuid()}:
        names = " and ".join(sorted(map(_user_name, owners)))
        raise InputError(
            f"--superlink {address}: the server there belongs to the user {names}; start your"
            " SuperLink at another port (--port, --fleet-api-address) and name that, or use TLS"
            " (--root-certificates), which shows whose SuperLink it is"
        )


def _listening_users(port: int) -> set[int]:
    """Return the user ids of the sockets that listen at a port."""
    return {one.user for one in tcp_sockets(LISTENING) if one.port == port}


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def listens_elsewhere(address: str) -> list[str]:
    """Return the non-loopback addresses at which the port of ``host:port`` accepts connections.

    If the host is not this machine's loopback, it is the result.
    """
    host, _, port = address.rpartition(":")
    if not _is_loopback(host):
        return [host]
    return [own for own in _own_addresses() if listens(f"{own}:{port}", control_api.SECONDS)]


def warn_of_open_control_api(address: str) -> None:
    """Print a warning if the Control API used for a run can be reached from another machine."""
    if elsewhere := listens_elsewhere(address):
        tell(
            "warning: other machines can reach the SuperLink's Control API at"
            f" {', '.join(elsewhere)}. Everyone who can reach it can start runs at all sites;"
            " start the SuperLink with"
            f" --host 127.0.0.1{_proxy_remedy()} (docs/how-to/deployment.md)"
        )


def warn_of_answering_control_api(superlink: str) -> None:
    """Print a warning if runs can be started at the address that a site uses.

    Also if nothing listens there.
    """
    if not listens(superlink, control_api.SECONDS):
        tell(
            f"warning: nothing listens at {superlink}, so whether runs can be started there was not"
            " checked; correct --superlink, or repeat this when the SuperLink is running"
        )
    elif control_api.answers(superlink):
        tell(
            f"warning: {superlink}, to which this site connects, also accepts runs"
            " from everyone who can reach it. Ask the operator of the federation to make the"
            f" Control API reachable only from their own machine{_proxy_remedy()}"
            " (docs/how-to/deployment.md)"
        )


def _proxy_remedy() -> str:
    return ", behind a reverse proxy that passes only /v1/fleet/" if sites_share_port() else ""


def _own_addresses() -> list[str]:
    """Return this machine's addresses except loopback; those of IPv6 in brackets."""
    found = {
        one.address: f"[{one.address}]" if one.family == socket.AF_INET6 else one.address
        for of in psutil.net_if_addrs().values()
        for one in of
        if one.family in (socket.AF_INET, socket.AF_INET6)
    }
    return [written for address, written in found.items() if not _is_loopback(address)]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"

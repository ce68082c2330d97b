"""A check of who can reach a SuperLink's Control API.

Whoever reaches it starts runs, sends programs to the sites, and registers keys; it asks nobody who they are. So it belongs on
the loopback address. From Flower 1.40 on it shares its port with what sites need, and a reverse proxy has to keep them apart.

Covers: a Control API that listens on another address of this machine; one that answers at the address that a site is given.
Does not cover: what networks let through between other machines.
"""

import ipaddress
import socket
import sys
from pathlib import Path

import psutil

from espalier.flower.version import sites_share_port

SECONDS = 2.0
"""Time in which a connection is made, or counts as refused."""
PATH = "/v1/control/list-runs"
REFUSED = (403, 404)
"""Statuses with which a reverse proxy, or an API that is not there, answers."""


def listens_elsewhere(address: str) -> list[str]:
    """Return addresses beside the loopback one at which somebody listens on a SuperLink's port.

    Parameters
    ----------
    address : host:port at which the SuperLink was given. A host that is not this machine's loopback is one of them by itself.
    """
    host, _, port = address.rpartition(":")
    if not _is_loopback(host):
        return [host]
    return [own for own in _own_addresses() if _listens(own, int(port))]


def answers(superlink: str, root_certificates: str | None) -> bool:
    """Return whether a Control API answers at the address that sites use.

    Parameters
    ----------
    superlink : host:port
    root_certificates : file by which its certificate is checked; None: no TLS
    """
    import httpx

    scheme, verify = (
        ("https", str(Path(root_certificates))) if root_certificates else ("http", False)
    )
    try:
        with httpx.Client(verify=verify, timeout=SECONDS, trust_env=False) as client:
            status = client.post(f"{scheme}://{superlink}{PATH}", content=b"").status_code
    except (httpx.HTTPError, OSError):  # gRPC, or nobody
        return False
    return status not in REFUSED


def warn_of_open_control_api(address: str) -> None:
    """Print a warning if the Control API to which a run is handed can be reached from another machine."""
    if elsewhere := listens_elsewhere(address):
        print(
            "espalier: warning: the SuperLink's Control API can be reached at"
            f" {', '.join(elsewhere)}, not by this machine alone. Whoever reaches it can start runs"
            f" at all sites; start the SuperLink with --host 127.0.0.1{_proxy_remedy()}"
            " (docs/deployment.md)",
            file=sys.stderr,
        )


def warn_of_answering_control_api(superlink: str, root_certificates: str | None) -> None:
    """Print a warning if runs can be started at the address that a site is given."""
    if answers(superlink, root_certificates):
        print(
            f"espalier: warning: {superlink}, where this site connects, also takes runs, from"
            " whoever reaches it. Ask whoever runs the federation to keep the Control API on their"
            f" own machine{_proxy_remedy()} (docs/deployment.md)",
            file=sys.stderr,
        )


def _proxy_remedy() -> str:
    return ", behind a reverse proxy that passes /v1/fleet/ alone" if sites_share_port() else ""


def _own_addresses() -> list[str]:
    found = [
        one.address
        for of in psutil.net_if_addrs().values()
        for one in of
        if one.family == socket.AF_INET
    ]
    return [own for own in dict.fromkeys(found) if not _is_loopback(own)]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), SECONDS):
            return True
    except OSError:
        return False

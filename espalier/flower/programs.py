"""Command lines of Flower's programs, and the environment variable with which ``flwr run`` finds a local SuperLink.

A SuperLink of ours never installs what a submitted app names (``--disable-runtime-dependency-installation``): it would ask a
package registry, and run what it got.
"""

from collections.abc import Sequence

from espalier.flower.version import sites_share_port

SUPERLINK = "flower-superlink"
SUPERNODE = "flower-supernode"
COMMAND = "flwr"
SUPERNODE_MODULE = "espalier.flower.supernode"
"""Runs ``flower-supernode`` with shorter waits."""
PORT_VARIABLE = "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"
"""Environment variable of ``flwr run``: port of the SuperLink that it looks for, or starts."""
HOST = "--host"
PORT = "--port"
"""Options of a SuperLink: place of its Control API and of what the ServerApp uses; from Flower 1.40 on of all its APIs."""
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = "8000"
NO_INSTALLATION = "--disable-runtime-dependency-installation"

SET_BY_US = (
    "--isolation", "--superexec-auth-secret-file", "--allow-runtime-dependency-installation", HOST, PORT,
    "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile", "--appio-ssl-certfile", "--appio-ssl-keyfile",
    "--appio-ssl-ca-certfile",
)  # fmt: skip
"""Options of ``flower-supernode`` that ``espalier node`` sets, or that would let a run's submitter install something."""


def simulating_superlink(port: int) -> list[str]:
    """Return options of a SuperLink that simulates, and listens on this loopback port alone."""
    return [
        "--insecure",
        "--simulation",
        "--isolation",
        "subprocess",
        NO_INSTALLATION,
        HOST,
        "127.0.0.1",
        PORT,
        str(port),
    ]


def superlink(control: int, fleet: str, flower: tuple[int, int] | None = None) -> list[str]:
    """Return options of a SuperLink for sites.

    Parameters
    ----------
    control : loopback port over which runs are started
    fleet : host:port at which SuperNodes reach it; from Flower 1.40 not used, as they reach it on ``control``
    flower : version; None: the installed one
    """
    options = [NO_INSTALLATION, HOST, "127.0.0.1", PORT, str(control)]
    return options if sites_share_port(flower) else [*options, "--fleet-api-address", fleet]


def process_supernode(words: Sequence[str], address: str, secret_file: str) -> list[str]:
    """Return options of a SuperNode whose tasks another process claims.

    Parameters
    ----------
    words : further options
    address : host:port of its Runtime API, of this machine
    secret_file : holds what both processes know
    """
    host, _, port = address.rpartition(":")
    place = [HOST, host.strip("[]"), PORT, port]
    return [*words, "--isolation", "process", *place, "--superexec-auth-secret-file", secret_file]

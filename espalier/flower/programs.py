"""Command lines of Flower's programs, and the variable with which ``flwr run`` finds a SuperLink.

Our SuperLinks never install what a submitted app names
(``--disable-runtime-dependency-installation``): that would query a package registry and run what it
returns.
"""

from collections.abc import Sequence

from espalier.flower.version import sites_share_port

SUPERLINK = "flower-superlink"
SUPERNODE = "flower-supernode"
COMMAND = "flwr"
SUPERNODE_MODULE = "espalier.flower.supernode"
"""Module that runs ``flower-supernode`` with shorter waits."""
PORT_VARIABLE = "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"
"""Environment variable of ``flwr run``: port of the SuperLink that it searches or starts."""
HOST = "--host"
PORT = "--port"
"""Options of a SuperLink for the address of its Control API and of the API for the ServerApp.

From Flower 1.40 on they apply to all its APIs.
"""
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = "8000"
NO_INSTALLATION = "--disable-runtime-dependency-installation"

SET_BY_US = (
    "--isolation", "--superexec-auth-secret-file", "--allow-runtime-dependency-installation", HOST, PORT,
    "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile", "--appio-ssl-certfile", "--appio-ssl-keyfile",
    "--appio-ssl-ca-certfile",
)  # fmt: skip
"""Options of ``flower-supernode`` that ``espalier node`` sets or does not allow.

The latter would let a run's submitter install software.
"""


def simulating_superlink(port: int) -> list[str]:
    """Return the options of a simulating SuperLink that listens only on this loopback port."""
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
    """Return the options of a SuperLink for sites.

    Parameters
    ----------
    control : loopback port of the Control API
    fleet : ``host:port`` for SuperNodes; unused from Flower 1.40 on, where they use ``control``
    flower : major and minor version; None: the installed one
    """
    options = [NO_INSTALLATION, HOST, "127.0.0.1", PORT, str(control)]
    return options if sites_share_port(flower) else [*options, "--fleet-api-address", fleet]


def process_supernode(words: Sequence[str], address: str, secret_file: str) -> list[str]:
    """Return the options of a SuperNode whose tasks another process claims.

    Parameters
    ----------
    words : further options
    address : ``host:port`` of its Runtime API on this machine
    secret_file : file with the secret that both processes share
    """
    host, _, port = address.rpartition(":")
    place = [HOST, host.strip("[]"), PORT, port]
    return [*words, "--isolation", "process", *place, "--superexec-auth-secret-file", secret_file]

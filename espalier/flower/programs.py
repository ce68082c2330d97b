"""Command lines of Flower's programs.

Our SuperLinks never install what a submitted app names: that would query a package registry and run
what it returns.
"""

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from espalier.errors import InputError

SUPERLINK = "flower-superlink"
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
NODE_CONFIG = "--node-config"
ONE_PORT = (1, 40)
"""First release in which all APIs of a SuperLink share one port, and SuperNodes use HTTP."""
PAIR = re.compile(r"\S+?=('[^']*'|\"[^\"]*\"|\S+)")
"""Pattern of what Flower takes for a key and its value; it ignores everything else."""

SET_BY_US = (
    "--isolation", "--superexec-auth-secret-file", "--allow-runtime-dependency-installation", HOST,
    PORT, "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile", "--appio-ssl-certfile",
    "--appio-ssl-keyfile", "--appio-ssl-ca-certfile",
)  # fmt: skip
"""Options of ``flower-supernode`` that ``espalier node`` sets or does not allow.

The latter would let a run's submitter install software.
"""


def sites_share_port() -> bool:
    """Return whether sites reach a SuperLink on the port of its Control API.

    Before 1.40 SuperNodes use gRPC on a separate port (``--fleet-api-address``). Since then
    everybody who reaches the sites' port also reaches the Control API, which has no authentication.
    """
    return tuple(map(int, version("flwr").split(".")[:2])) >= ONE_PORT


def simulating_superlink(port: int) -> list[str]:
    """Return the options of a simulating SuperLink that listens only on this loopback port."""
    return [
        "--insecure", "--simulation", "--isolation", "subprocess", NO_INSTALLATION,
        HOST, DEFAULT_HOST, PORT, str(port)
    ]  # fmt: skip


def process_supernode(words: Sequence[str], port: int, secret_file: str) -> list[str]:
    """Return the options of a SuperNode whose tasks another process claims.

    That process asks for them at the loopback port ``port``; both share the secret in the file.
    """
    address = [HOST, DEFAULT_HOST, PORT, str(port)]
    return [*words, "--isolation", "process", *address, "--superexec-auth-secret-file", secret_file]


def value_of(option: str, words: Sequence[str]) -> str | None:
    """Return the last value of an option, which may be abbreviated as argparse allows."""
    last_value = None
    for index, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        # ``--p`` could mean many options; two characters after the hyphens are the shortest.
        if len(name) > 2 and option.startswith(name):
            last_value = value if is_joined else "".join(words[index + 1 : index + 2])
    return last_value


def read_node_config(text: str) -> dict[str, Any]:
    """Return the keys and values of ``flower-supernode --node-config``: pairs, or a TOML file.

    Raises InputError if Flower could not read the text or would ignore a part.
    """
    from flwr.common.config import parse_config_args

    # Flower drops what does not match its pattern, without a message.
    if not text.endswith(".toml") and (ignored := PAIR.sub("", text).strip()):
        raise InputError(
            f"node-config: {ignored!r} is not key=value, and Flower would ignore it; write"
            " key=value without spaces"
        )
    try:
        return dict(parse_config_args([text]))
    except OSError as error:
        raise InputError(
            f"node-config: {text}: cannot be read ({error.strerror}); name a TOML file, or give"
            " key=value pairs"
        ) from None
    except Exception:
        # The library that Flower uses may raise any exception.
        raise InputError(
            f"node-config: {text!r}: Flower cannot read it; a value is a number, true, false or"
            " a string in quotes, for example 'site=\"hospital-a\" num-samples=16'"
        ) from None

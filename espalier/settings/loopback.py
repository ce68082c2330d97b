"""Environment that keeps the traffic of a run on this machine away from the network.

Covers: Flower's and Ray's processes of one machine talk to each other by loopback addresses. A proxy does not hand such
connections on, so loopback is excepted from proxies, in the forms that gRPC, requests and httpx read. Ray listens on all
interfaces, and lets everybody in, unless this machine's address is said to be a loopback one.
Does not cover: other accounts of this machine. They reach loopback, and neither Ray nor Flower's local SuperLink asks who they
are; a machine that strangers work on needs a container or a network namespace for each run.
"""

from collections.abc import Mapping, MutableMapping

HOSTS = ("localhost", "127.0.0.1", "::1")
NO_PROXY = ("no_proxy", "NO_PROXY")
GRPC_NO_PROXY = "no_grpc_proxy"
"""Variable that gRPC reads in place of ``no_proxy`` if it is set."""
RAY_LISTENS_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray takes the loopback address for that of its node, as it does by itself on Windows and macOS."""


def past_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that except loopback from every proxy; hosts that are excepted already stay so."""
    hosts: list[str] = []
    for name in NO_PROXY:
        hosts += [host for host in _split(environment.get(name, "")) if host not in hosts]
    added = {name: _joined(hosts) for name in NO_PROXY}
    if GRPC_NO_PROXY in environment:
        added[GRPC_NO_PROXY] = _joined(_split(environment[GRPC_NO_PROXY]))
    return added


def keep_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Except loopback from proxies, and let a Ray that is started in this environment listen there only."""
    environment.update({**past_proxies(environment), **RAY_LISTENS_ON_LOOPBACK})


def _split(hosts: str) -> list[str]:
    return [host.strip() for host in hosts.split(",") if host.strip()]


def _joined(hosts: list[str]) -> str:
    """Return the hosts with loopback added; ``*`` means all hosts only if it stands by itself."""
    return (
        "*" if "*" in hosts else ",".join([*hosts, *(host for host in HOSTS if host not in hosts)])
    )

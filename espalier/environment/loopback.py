"""Environment variables that keep a run's local traffic away from the network.

Covers: Flower's and Ray's processes on one machine communicate over loopback addresses. A proxy
cannot forward such connections, so loopback is excluded from proxies, in the forms that gRPC,
requests and httpx read. A proxy that httpx cannot use, such as SOCKS without the library socksio,
would break every connection, excluded or not, so its variable is emptied. By default Ray listens on
all interfaces and accepts every connection; it stays on loopback only if this machine's address is
declared to be a loopback one.
Does not cover: other accounts on this machine. They can reach loopback, and neither Ray nor
Flower's local SuperLink authenticates them. A machine with untrusted users needs a container or a
network namespace per run.
"""

from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec

HOSTS = ("localhost", "127.0.0.1", "::1")
NO_PROXY = ("no_proxy", "NO_PROXY")
GRPC_NO_PROXY = "no_grpc_proxy"
"""Variable that gRPC reads in place of ``no_proxy`` if it is set."""
PROXY = "_proxy"
"""Suffix of the variables that name a proxy."""
EXCEPTIONS = ("no_proxy", GRPC_NO_PROXY)
"""Variables with this suffix that name no proxy, in lower case."""
SCHEMES = ("http", "https")
"""Schemes of proxies that httpx can use."""
SOCKS = ("socks5", "socks5h")
"""Schemes that it can use if the library socksio is installed."""
RAY_LISTENS_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Setting that makes Ray use the loopback address, as it does on Windows and macOS."""


def past_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that exclude loopback from all proxies; existing exclusions are kept.

    Variables of proxies that cannot be used are empty, which means no proxy.
    """
    hosts: list[str] = []
    for name in NO_PROXY:
        hosts += [host for host in _split(environment.get(name, "")) if host not in hosts]
    variables = {name: _joined(hosts) for name in NO_PROXY}
    if GRPC_NO_PROXY in environment:
        variables[GRPC_NO_PROXY] = _joined(_split(environment[GRPC_NO_PROXY]))
    proxies = {name: value for name, value in environment.items() if name.lower().endswith(PROXY)}
    unusable = (
        name
        for name, value in proxies.items()
        if name.lower() not in EXCEPTIONS and not _is_usable(value)
    )
    return variables | dict.fromkeys(unusable, "")


def keep_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Exclude loopback from proxies, and keep a Ray started in this environment on loopback."""
    environment.update({**past_proxies(environment), **RAY_LISTENS_ON_LOOPBACK})


def _split(hosts: str) -> list[str]:
    return [host.strip() for host in hosts.split(",") if host.strip()]


def _joined(hosts: list[str]) -> str:
    """Return the hosts with loopback added; ``*`` means all hosts only if it is the whole value."""
    return (
        "*" if "*" in hosts else ",".join([*hosts, *(host for host in HOSTS if host not in hosts)])
    )


def _is_usable(proxy: str) -> bool:
    """Return whether httpx can use a proxy with this address, which may be empty."""
    scheme, is_named, _ = proxy.strip().lower().partition("://")
    if not is_named or scheme in SCHEMES:
        return True
    return scheme in SOCKS and find_spec("socksio") is not None

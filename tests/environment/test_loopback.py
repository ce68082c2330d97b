"""Environment of a run on one machine: its processes use no proxy, and Ray listens on loopback."""

import os
import socket

import httpx
import pytest

from espalier.environment import loopback
from espalier.environment.loopback import keep_on_loopback, past_proxies

LOOPBACK = "localhost,127.0.0.1,::1"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, LOOPBACK),
        ({"no_proxy": ""}, LOOPBACK),
        ({"no_proxy": "hub.example, .lan"}, f"hub.example,.lan,{LOOPBACK}"),
        ({"NO_PROXY": "hub.example"}, f"hub.example,{LOOPBACK}"),
        ({"no_proxy": "a", "NO_PROXY": "b,a"}, f"a,b,{LOOPBACK}"),
        ({"no_proxy": "127.0.0.1,a"}, "127.0.0.1,a,localhost,::1"),
        ({"no_proxy": LOOPBACK}, LOOPBACK),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_loopback_is_added_to_proxy_exceptions(before: dict[str, str], after: str) -> None:
    """Programs read one spelling or the other, so both are set to the same value."""
    assert past_proxies({**before, "http_proxy": "http://127.0.0.1:9"}) == {
        "no_proxy": after,
        "NO_PROXY": after,
    }


def test_grpc_s_own_exceptions_are_extended() -> None:
    assert past_proxies({"no_grpc_proxy": "a", "no_proxy": "b"}) == {
        "no_grpc_proxy": f"a,{LOOPBACK}",
        "no_proxy": f"b,{LOOPBACK}",
        "NO_PROXY": f"b,{LOOPBACK}",
    }


@pytest.mark.parametrize("installed", [False, True])
def test_proxies_unusable_by_httpx_are_left_out(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """httpx looks at them all before it connects anywhere; an empty variable is none."""
    monkeypatch.setattr(
        loopback, "find_spec", lambda name: object() if installed and name == "socksio" else None
    )
    usable = {
        "http_proxy": "http://p:1",
        "HTTPS_PROXY": "HTTPS://p:2",
        "ftp_proxy": "p:3",
        "grpc_proxy": "",
    }
    socks = {"ALL_PROXY": "socks5://p:4", "all_proxy": "SOCKS5H://p:5"}
    never = {"https_proxy": "socks4://p:6", "HTTP_PROXY": "socks://p:7"}
    added = past_proxies(
        {**usable, **socks, **never, "no_grpc_proxy": "socks5://a", "proxy": "socks5://b"}
    )
    left_out = never if installed else {**socks, **never}
    assert {
        name: value for name, value in added.items() if "no_" not in name.lower()
    } == dict.fromkeys(left_out, "")


@pytest.mark.parametrize("name", ["all_proxy", "ALL_PROXY", "http_proxy", "https_proxy"])
def test_httpx_reaches_loopback_despite_proxies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in [known for known in os.environ if known.lower().endswith("_proxy")]:
        monkeypatch.delenv(other)
    for proxy in (
        "http://127.0.0.1:9",
        "socks4://127.0.0.1:9",
        "socks5://127.0.0.1:9",
        "socks5h://127.0.0.1:9",
    ):
        monkeypatch.setenv(name, proxy)
        for variable, value in past_proxies(os.environ).items():
            monkeypatch.setenv(variable, value)
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            httpx.Client() as client,
            pytest.raises(httpx.ReadTimeout),
        ):
            client.get(f"http://127.0.0.1:{server.getsockname()[1]}/", timeout=0.01)


def test_environment_change_is_idempotent() -> None:
    environment = {"PATH": "/bin", "https_proxy": "http://127.0.0.1:9"}
    keep_on_loopback(environment)
    once = dict(environment)
    keep_on_loopback(environment)
    assert environment == once
    assert environment.keys() == {
        "PATH",
        "https_proxy",
        "no_proxy",
        "NO_PROXY",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    }

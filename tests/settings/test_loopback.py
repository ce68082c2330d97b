"""Environment of a run on one machine: its processes use no proxy, and Ray listens on loopback."""

import pytest

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
def test_loopback_is_excepted_and_what_was_excepted_stays_so(
    before: dict[str, str], after: str
) -> None:
    """Programs read one spelling or the other, so both are set to the same value."""
    assert past_proxies({**before, "http_proxy": "http://127.0.0.1:9"}) == {
        "no_proxy": after,
        "NO_PROXY": after,
    }


def test_what_grpc_reads_first_is_extended_where_it_is_there() -> None:
    assert past_proxies({"no_grpc_proxy": "a", "no_proxy": "b"}) == {
        "no_grpc_proxy": f"a,{LOOPBACK}",
        "no_proxy": f"b,{LOOPBACK}",
        "NO_PROXY": f"b,{LOOPBACK}",
    }


def test_nothing_else_of_an_environment_changes_and_twice_is_as_once() -> None:
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

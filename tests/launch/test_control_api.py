"""Addresses at which a SuperLink's Control API can be reached."""

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from espalier.cli.keys import make_keys
from espalier.errors import InputError
from espalier.flower.control_api import PATH, answers
from espalier.launch import addresses
from espalier.launch.addresses import (
    listens_elsewhere,
    require_own_superlink,
    warn_of_answering_control_api,
    warn_of_open_control_api,
)


@contextmanager
def serving(status: int, certificate: Path | None = None) -> Iterator[str]:
    """Run an HTTP server that answers the Control API's path with ``status``, others with 200.

    ``certificate`` is the folder of ``server.pem`` and ``server.key``; None: no TLS.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status if self.path == PATH else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate / "server.pem", certificate / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "found"),
    [(200, True), (400, True), (401, True), (500, True), (403, False), (404, False)],
)
def test_server_refusing_nobody_is_a_control_api(status: int, found: bool) -> None:
    with serving(status) as address:
        assert answers(address) == found


@pytest.mark.parametrize(("status", "found"), [(200, True), (403, False)])
def test_server_with_tls_is_found_whoever_signed_its_certificate(
    tmp_path: Path, status: int, found: bool
) -> None:
    list(make_keys(tmp_path, ["localhost"], ["a"], 30))
    with serving(status, tmp_path / "server") as address:
        assert answers(address) == found


def test_silent_and_non_http_are_no_control_api() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def hang_up() -> None:
            # One connection without TLS, and one with it.
            for _ in range(2):
                connection, _ = server.accept()
                connection.recv(10)
                connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert not answers(f"127.0.0.1:{port}")
        thread.join()
    assert not answers(f"127.0.0.1:{port}")


def test_warning_says_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(403) as address:
        warn_of_answering_control_api(address)
        assert capsys.readouterr().err == ""
    warn_of_answering_control_api(address)
    assert f"warning: nothing listens at {address}, so" in capsys.readouterr().err
    with serving(200) as address:
        warn_of_answering_control_api(address)
        assert "also accepts runs from everyone" in capsys.readouterr().err


def test_other_addresses_of_machine_are_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The address 127.0.0.2, which every Linux has, stands for another address."""
    monkeypatch.setattr(addresses, "_own_addresses", lambda: ["127.0.0.2"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert listens_elsewhere(address) == []
        warn_of_open_control_api(address)
        assert capsys.readouterr().err == ""
    with socket.create_server(("0.0.0.0", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        assert listens_elsewhere(address) == ["127.0.0.2"]
        warn_of_open_control_api(address)
        assert (
            "other machines can reach the SuperLink's Control API at 127.0.0.2."
            in capsys.readouterr().err
        )


def test_addresses_of_both_ip_versions_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "lo": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
        "eth0": [
            (socket.AF_INET, "192.0.2.7"),
            (socket.AF_INET6, "2001:db8::7"),
            (socket.AF_INET6, "fe80::7%eth0"),
            (psutil.AF_LINK, "00:00:5e:00:53:07"),
        ],
    }
    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {
            card: [SimpleNamespace(family=family, address=address) for family, address in all_of]
            for card, all_of in found.items()
        },
    )
    tried = []
    monkeypatch.setattr(addresses, "listens", lambda address, _: tried.append(address))
    assert listens_elsewhere("127.0.0.1:9093") == []
    assert tried == ["192.0.2.7:9093", "[2001:db8::7]:9093", "[fe80::7%eth0]:9093"]


def test_port_open_at_an_ipv6_address_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_own_addresses", lambda: ["[::1]"])
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        assert listens_elsewhere(f"127.0.0.1:{server.getsockname()[1]}") == ["[::1]"]


def test_remote_superlink_is_reachable() -> None:
    assert listens_elsewhere("server.example.org:9093") == ["server.example.org"]
    assert listens_elsewhere("[::1]:9") == []


def test_another_user_s_superlink_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TLS the port on this machine must be one's own or root's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        address = f"127.0.0.1:{port}"
        assert addresses._listening_users(port) == {os.getuid()}
        require_own_superlink(address, None)
    for owners, refused in (({0}, False), ({4_000_000}, True), (set(), False)):
        monkeypatch.setattr(addresses, "_listening_users", lambda _, found=owners: found)
        require_own_superlink(address, "ca.crt")
        require_own_superlink(f"192.0.2.1:{port}", None)
        if refused:
            with pytest.raises(InputError, match=r"belongs to the user 4000000; start your"):
                require_own_superlink(address, None)
        else:
            require_own_superlink(address, None)

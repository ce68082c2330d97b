"""Waiting for a SuperLink that is not up yet, its limit, and addresses that are refused."""

import socket
from pathlib import Path
from threading import Event

import pytest

from espalier.cli.command import main
from espalier.errors import InputError
from espalier.launch import addresses
from espalier.launch.addresses import await_superlink, free_port, require_address
from espalier.launch.superlink import running_superlink

APP = Path(__file__).parent.parent.parent


class Clock:
    """Clock that advances when code sleeps, with actions at given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.slept = Event()
        self.later: list[tuple[float, socket.socket]] = []
        monkeypatch.setattr(addresses, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.set()
        for when, server in self.later:
            if when <= self.now:
                server.listen()


def test_one_that_is_up_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert await_superlink(f"127.0.0.1:{server.getsockname()[1]}")
    assert not clock.slept.is_set()
    assert capsys.readouterr().err == ""


def test_starting_superlink_is_awaited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    port = free_port()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        clock.later.append((17.0, server))
        assert await_superlink(f"127.0.0.1:{port}")
    assert clock.now == 17.0
    said = capsys.readouterr().err
    assert (
        said == f"espalier: nothing listens at 127.0.0.1:{port} yet; waiting at most 120 s for"
        " the SuperLink\n"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "no-such-host.invalid", "x" * 70, "a..b"])
def test_the_wait_has_an_end(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert not await_superlink(f"{host}:{free_port()}", 3.0)
    assert clock.now == 3.0


@pytest.mark.parametrize(
    "address",
    [
        "somewhere",
        "host:",
        "host:http",
        "",
        "127.0.0.1:0",
        "h:65536",
        "h:-1",
        "http://h:9093",
        "h:9093/",
        "a b:1",
        "::1:9",
        "a@b:1",
    ],
)
@pytest.mark.parametrize("command", [["run", "two-sites"], ["check-node", 'site="a"']])
def test_invalid_address_is_refused_at_once(
    address: str,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock(monkeypatch)
    assert main([*command, f"--superlink={address}", "--app", str(APP)]) == 2
    assert capsys.readouterr().err.startswith(
        f"espalier: --superlink {address!r}: is not HOST:PORT; write a name or address"
    )
    assert not clock.slept.is_set()


@pytest.mark.parametrize(
    "address", ["h:1", "127.0.0.1:9093", "[::1]:65535", "superlink.example.org:443", "super_link:1"]
)
def test_addresses_have_a_host_and_a_port(address: str) -> None:
    require_address(address)


def test_a_run_elsewhere_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("espalier.launch.superlink.await_superlink", asked.append)
    with running_superlink("127.0.0.1:9093", None):
        assert asked == ["127.0.0.1:9093"]


def test_a_missing_certificate_is_told_before_waiting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("espalier.launch.superlink.await_superlink", pytest.fail)
    with (
        pytest.raises(InputError, match=r"--root-certificates .*ca.crt: cannot be read \(No such"),
        running_superlink("127.0.0.1:9093", str(tmp_path / "ca.crt")),
    ):
        pass

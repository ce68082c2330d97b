"""Tests of the question whether the Hugging Face hub can be reached."""

import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from espalier.environment.hub_access import OFFLINE, use_cache_if_unreachable


class _Refusing(BaseHTTPRequestHandler):
    """A hub that answers every question with an error."""

    def do_HEAD(self) -> None:
        self.send_error(503)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFFLINE, "")
    monkeypatch.delenv(OFFLINE)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_unreachable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # it does not listen
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        use_cache_if_unreachable()
    assert os.environ[OFFLINE] == "1"
    told = capsys.readouterr().err
    assert endpoint in told
    assert "Connection refused" in told
    # What is set is not asked again.
    use_cache_if_unreachable()
    assert not capsys.readouterr().err


def test_no_address(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "hub")
    use_cache_if_unreachable()
    assert os.environ[OFFLINE] == "1"
    assert "(hub) cannot be reached" in capsys.readouterr().err


def test_an_answer_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with HTTPServer(("127.0.0.1", 0), _Refusing) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        use_cache_if_unreachable()
        thread.join()
    assert OFFLINE not in os.environ
    assert not capsys.readouterr().err

"""Registration of a node's key by the containers, without a container engine."""

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.containers.test_docker import program


def flwr_that_says(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, *answers: dict[str, Any]
) -> list[str]:
    """Replace the command ``flwr``; return a list that collects the keys that it gets."""
    left = list(answers)
    given = list[str]()

    def run(command: list[str], **_: Any) -> Any:
        given.append(Path(command[3]).read_text())
        return SimpleNamespace(stdout=json.dumps(left.pop(0)), stderr="", returncode=0)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run))
    return given


@pytest.fixture
def register(tmp_path: Path) -> Any:
    """Return a server's register with empty folders, and its module."""
    module = program("superlink")
    for folder in ("public", "sites/a"):
        (tmp_path / folder).mkdir(parents=True)
    return module.Register("127.0.0.1:1", tmp_path / "public", tmp_path / "sites"), module


KNOWN = {"success": False, "error-message": "Public key already in use."}


def test_key_is_registered_once_and_shown_to_all(
    register: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, module = register
    given = flwr_that_says(monkeypatch, module, {"success": True, "node-id": 1})
    book.look("a", 0.0)
    # The site has not submitted a key yet.
    assert given == []
    (tmp_path / "sites/a/a.key.pub").write_text("first")
    book.look("a", 0.0)
    book.look("a", 0.0)
    assert given == ["first"]
    assert (tmp_path / "public/sites/a.key.pub").read_text() == "first"


def test_a_key_that_flower_knows_is_no_failure(
    register: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, module = register
    flwr_that_says(monkeypatch, module, KNOWN)
    (tmp_path / "sites/a/a.key.pub").write_text("first")
    book.look("a", 0.0)
    assert (tmp_path / "public/sites/a.key.pub").read_text() == "first"


def test_another_key_under_a_name_is_refused(
    register: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    book, module = register
    given = flwr_that_says(monkeypatch, module, {"success": True})
    for key in ("first", "second", "second"):
        (tmp_path / "sites/a/a.key.pub").write_text(key)
        book.look("a", 0.0)
    assert given == ["first"]
    assert (tmp_path / "public/sites/a.key.pub").read_text() == "first"
    assert (
        capsys.readouterr().err.count("a handed in another key than before, which is refused") == 1
    )


def test_unregistered_key_is_retried_and_hidden(
    register: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Attempts follow after 1, 2 and 4 seconds; another key is tried at once.

    The reason is printed once.
    """
    book, module = register
    down = {"success": False, "error-message": "no connection"}
    given = flwr_that_says(monkeypatch, module, down, down, down, down, {"success": True})
    (tmp_path / "sites/a/a.key.pub").write_text("bad")
    for now, tries in (
        (0.0, 1),
        (0.9, 1),
        (1.0, 2),
        (2.9, 2),
        (3.0, 3),
        (6.9, 3),
        (7.0, 4),
        (7.1, 4),
    ):
        book.look("a", now)
        assert len(given) == tries
    assert not (tmp_path / "public/sites").exists()
    (tmp_path / "sites/a/a.key.pub").write_text("good")
    book.look("a", 7.2)
    assert capsys.readouterr().err.splitlines() == [
        "espalier: the key of a was not registered: no connection",
        "espalier: the key of a is registered",
    ]
    assert (tmp_path / "public/sites/a.key.pub").read_text() == "good"

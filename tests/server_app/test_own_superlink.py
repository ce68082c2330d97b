"""Owner of the SuperLink that took a run: compared with this process and real connections."""

import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from espalier.errors import EspalierError
from espalier.flower.processes import LocalSuperLink, Submitter, submitters
from espalier.flower.shared_nodes import GRIDS
from server_app import entry_point, own_superlink
from server_app.own_superlink import (
    ROOMS,
    SHARED,
    Surroundings,
    difference,
    require_own_superlink,
    surroundings,
)

ROOT = Path(__file__).parent.parent.parent
ME = os.getuid()
STRANGER = 64_999
SUPERLINK = "flower-superlink"


def checkout(folder: Path, program: str = "one") -> Path:
    """Create a directory that looks like a checkout with this program."""
    for room in ROOMS:
        (folder / room).mkdir(parents=True)
        (folder / room / "__init__.py").write_text(f"# {program}\n")
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Surroundings:
    """Surroundings of a run that ``flwr run .`` in ``mine`` gave to its own SuperLink."""
    mine = checkout(tmp_path / "mine")
    return Surroundings(ME, tmp_path / "venv", mine, checkout(tmp_path / "apps"), mine)


@pytest.fixture
def superlink(tmp_path: Path) -> LocalSuperLink:
    return LocalSuperLink(17, 39093, tmp_path / "venv" / "bin" / SUPERLINK)


def changed(here: Surroundings, **values: object) -> Surroundings:
    return Surroundings(**{**vars(here), **values})  # type: ignore[arg-type]


# ----- comparison ---------------------------------------------------------------------------------


def test_one_s_own_superlink_is(here: Surroundings, superlink: LocalSuperLink) -> None:
    mine = Submitter(ME, here.folder, superlink.program)
    assert difference(here, superlink, [mine]) == ""
    assert difference(here, superlink, []) == ""
    # A stranger may only be looking at a log.
    assert difference(here, superlink, [Submitter(STRANGER), mine]) == ""
    assert difference(here, superlink, [Submitter(ME, None, None)]) == ""


def test_superlink_started_elsewhere_is_accepted(
    here: Surroundings, superlink: LocalSuperLink, tmp_path: Path
) -> None:
    elsewhere = changed(here, folder=tmp_path)
    assert difference(elsewhere, superlink, [Submitter(ME, here.folder, superlink.program)]) == ""
    assert difference(elsewhere, superlink, []) == ""


def test_another_user_s_superlink_is_refused(here: Surroundings, superlink: LocalSuperLink) -> None:
    told = difference(here, superlink, [Submitter(STRANGER)])
    assert (
        told
        == f"it belongs to user {pwd.getpwuid(ME).pw_name}, but user {STRANGER} submitted the run"
    )


def test_another_environment_s_is_not(
    here: Surroundings, superlink: LocalSuperLink, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "bin" / SUPERLINK
    assert (
        difference(here, superlink, [Submitter(ME, here.folder, other)])
        == f"the run comes from the environment of {other}"
    )


def test_another_checkout_s_is_not(
    here: Surroundings, superlink: LocalSuperLink, tmp_path: Path
) -> None:
    """The results would be written there even if its program is the same."""
    twin = checkout(tmp_path / "twin")
    assert (
        difference(here, superlink, [Submitter(ME, twin, superlink.program)])
        == f"the run comes from {twin}"
    )
    both = [Submitter(ME, twin, superlink.program), Submitter(ME, here.folder, superlink.program)]
    assert difference(here, superlink, both) == ""


def test_environment_without_espalier_is_refused(
    here: Surroundings, superlink: LocalSuperLink
) -> None:
    assert "no Espalier is installed" in difference(changed(here, installed=None), superlink, [])


def test_programs_are_compared_without_submitter(
    here: Surroundings, superlink: LocalSuperLink, tmp_path: Path
) -> None:
    newer = checkout(tmp_path / "newer", "two")
    assert "another program" in difference(changed(here, installed=newer), superlink, [])
    assert "another program" in difference(changed(here, folder=newer), superlink, [])
    assert (
        difference(changed(here, folder=newer, bundle=newer, installed=newer), superlink, []) == ""
    )


# ----- detection ----------------------------------------------------------------------------------


def script(file: Path, text: str) -> Path:
    """Write a Python program with this name; process tables show it as they show Flower's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!{sys.executable}\n{text}")
    file.chmod(0o700)
    return file


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[str]:
    """Run a program until the end of the block and yield the first line that it prints."""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


CHILD = (
    "from espalier.flower.processes import local_superlink as f; x = f(); print(x and (x.port,"
    " x.program.name))"
)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--simulation", "--host", "127.0.0.1", "--port", "39091"], (39091, SUPERLINK)),
        (["--host=localhost", "--port=41"], (41, SUPERLINK)),
        (["--host", "::1", "--port", "42"], (42, SUPERLINK)),
        # The SuperLink is open to other machines on purpose.
        (["--host", "0.0.0.0", "--port", "39091"], None),
        # Flower's default host and port.
        (["--simulation"], (8000, SUPERLINK)),
    ],
)
def test_superlink_is_a_local_ancestor(tmp_path: Path, options: list[str], found: object) -> None:
    start = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}],"
        " check=True)\nsys.stdin.read()\n"
    )
    program = script(tmp_path / "bin" / SUPERLINK, start)
    with running([str(program), *options], tmp_path) as line:
        assert line == str(found)


def test_without_a_superlink_nothing_is_compared() -> None:
    require_own_superlink()


CONNECT = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", {}))
print("on", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("words", "app"),
    [
        (["run", ".", "--stream"], "."),
        (["run", "--stream"], "."),
        (["run", "--run-config", "seed=1", "-c", "x=2", "--stream", "sub", "local"], "sub"),
        (["run", "@somebody/app"], None),
    ],
)
def test_who_submits_is_found_by_its_connection(
    tmp_path: Path, words: list[str], app: str | None
) -> None:
    script(tmp_path / "venv" / "bin" / SUPERLINK, "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = script(tmp_path / "venv" / "bin" / "flwr", CONNECT.format(port))
        with running([str(command), *words], tmp_path) as line:
            assert line == "on"
            (found,) = submitters(LocalSuperLink(1, port, tmp_path))
    assert found.user == ME
    assert found.app == (None if app is None else (tmp_path / app).resolve())
    assert found.superlink == tmp_path / "venv" / "bin" / SUPERLINK


def test_other_connections_are_no_submitters(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = script(tmp_path / "flwr", CONNECT.format(port))
        with running([str(command), "log"], tmp_path) as line:
            assert line == "on"
            assert submitters(LocalSuperLink(1, port, tmp_path)) == []


@pytest.mark.skipif(
    ME != 0 or shutil.which("setpriv") is None, reason="needs root, to work as another user"
)
def test_other_user_is_known_by_its_connection(tmp_path: Path) -> None:
    as_stranger = [
        "setpriv",
        f"--reuid={STRANGER}",
        f"--regid={STRANGER}",
        "--clear-groups",
        "bash",
        "-c",
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with running(
            [*as_stranger, f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo on; read"], Path("/")
        ) as line:
            assert line == "on"
            assert submitters(LocalSuperLink(1, port, tmp_path)) == [Submitter(STRANGER)]


# ----- the entry point ----------------------------------------------------------------------------


def test_this_process_is_described_as_it_is() -> None:
    here = surroundings()
    assert (here.user, here.prefix, here.bundle, here.folder) == (
        ME,
        Path(sys.prefix),
        ROOT,
        Path.cwd(),
    )
    assert here.installed is not None
    assert all((here.installed / room).is_dir() for room in ROOMS)


@pytest.fixture
def strange(monkeypatch: pytest.MonkeyPatch, superlink: LocalSuperLink) -> None:
    """Put this process into a user's SuperLink to which another user submitted a run."""
    monkeypatch.delenv(SHARED, raising=False)
    monkeypatch.setattr(own_superlink, "local_superlink", lambda: superlink)
    monkeypatch.setattr(own_superlink, "submitters", lambda _: [Submitter(STRANGER)])


@pytest.mark.usefixtures("strange")
def test_sentence_names_superlink_and_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The check runs before the settings are read and before the ServerApp is imported."""
    grid = object.__new__(GRIDS[0])
    with pytest.raises(
        EspalierError,
        match=(
            "this SuperLink does not belong to the checkout from which the run comes:"
            " it belongs to "
        ),
    ):
        entry_point.main(grid, None)  # type: ignore[arg-type]
    told = capsys.readouterr().out
    for words in (
        "process 17 of user ",
        f"started in {Path.cwd()}",
        "Use `espalier run`",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT",
        "kill 17",
    ):
        assert words in told


@pytest.mark.usefixtures("strange")
def test_deployed_superlink_may_be_anybody_s(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("server_app.app.main", lambda *given: asked.append(given))
    entry_point.main("a grid of real nodes", None)  # type: ignore[arg-type]
    assert len(asked) == 1


@pytest.mark.usefixtures("strange")
def test_an_owner_may_let_everybody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED, "1")
    require_own_superlink()

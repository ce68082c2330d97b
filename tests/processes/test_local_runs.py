"""Runs on this machine: their listeners, proxies in the environment, and their SuperLinks."""

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from espalier.flower.load_faults import unshared_app
from espalier.flower.programs import PORT_VARIABLE, SUPERLINK, simulating_superlink
from espalier.flower.run_command import RAY_DID_NOT_START
from espalier.launch.run import RAY_STARTS
from tests.bench import private_text
from tests.flower.flower_parts import build_fab_from_disk
from tests.processes.deployment import (
    BIN,
    environment,
    espalier,
    free_ports,
    process,
    wait_for_port,
)
from tests.tiny_model import save_tiny_llama

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
NOBODY = "http://127.0.0.1:9"
"""Proxy address that does not answer."""
PROXIES = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOBODY),
    **dict.fromkeys(("all_proxy", "ALL_PROXY"), "socks5://127.0.0.1:9"),
}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, object]:
    """Return the configuration of a run of two clients that takes a few seconds."""
    save_tiny_llama(tmp_path / "model")
    for name, seed in (("clients", 1), ("public", 2)):
        (tmp_path / f"{name}.txt").write_text(private_text(seed) * 4)
    return {
        "model": str(tmp_path / "model"),
        "data.source": "files",
        "data.path": str(tmp_path / "clients.txt"),
        "data.num-samples": 2,
        "data.sequence-length": 16,
        "evaluation.texts": f"public={tmp_path}/public.txt",
        "evaluation.sequence-length": 32,
        "evaluation.max-samples": 2,
        "evaluation.centralized": "off",
        "evaluation.local-baseline": False,
        "num-clients": 2,
        "threads": 1,
    }


def words(config: Mapping[str, object]) -> list[str]:
    """Return the configuration as arguments of ``espalier run``."""
    return [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in config.items()]


def written(config: Mapping[str, object], file: Path) -> str:
    """Write the configuration to a file for ``flwr run --run-config``; return its path."""
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items()))
    return str(file)


def listening(pid: int) -> set[tuple[str, str]]:
    """Return (program, address) of each listening socket of a process and its descendants."""
    found = set()
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for one in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error):
                sockets = one.net_connections("tcp")
                found |= {
                    (one.name(), socket.laddr.ip)
                    for socket in sockets
                    if socket.status == psutil.CONN_LISTEN
                }
    return found


def listeners_of(started: "subprocess.Popen[bytes]", pid: int) -> set[tuple[str, str]]:
    """Return all listening sockets of a process and its descendants until a command ends."""
    found: set[tuple[str, str]] = set()
    while started.poll() is None:
        found |= listening(pid)
        time.sleep(0.1)
    return found


def require_loopback(found: set[tuple[str, str]]) -> None:
    assert {"gcs_server", "raylet"} <= {program for program, _ in found}
    assert {address for _, address in found} <= set(LOOPBACK)


@contextmanager
def simulating(folder: Path, port: int, home: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a SuperLink in simulation mode, as ``flwr run`` starts one, in a directory."""
    command = [str(BIN / SUPERLINK), *simulating_superlink(port)]
    with process(command, folder, "superlink", environment(home)) as link:
        wait_for_port(port, link)
        yield link


@pytest.mark.slow
def test_local_run_ignores_others_and_proxies(tmp_path: Path, config: dict[str, object]) -> None:
    odd = (
        tmp_path
        / "a directory for temporary files, with blanks and too long a name for Ray's sockets"
    )
    odd.mkdir()
    env = {
        **environment(tmp_path / "home"),
        **PROXIES,
        "no_proxy": "hub.example",
        "TMPDIR": str(odd),
        "RAY_ADDRESS": "192.0.2.1:6379",
    }
    command = [str(BIN / "espalier"), "run", *words(config), "--app", str(ROOT)]
    with open(tmp_path / "log", "wb") as log:
        started = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        found = listeners_of(started, started.pid)
    finally:
        started.kill()
    assert started.wait() == 0, (tmp_path / "log").read_text()
    require_loopback(found)
    assert list((tmp_path / "runs").glob("*/summary.json"))


def flwr_run(folder: Path, port: int, config: str) -> tuple[list[str], dict[str, str]]:
    """Return a plain ``flwr run`` of this checkout, and its environment.

    The command looks for a local SuperLink on this port.
    """
    options = ["--stream", "--federation-config", "num-supernodes=2", "--run-config", config]
    return [str(BIN / "flwr"), "run", str(ROOT), *options], {
        **environment(folder / "command"),
        PORT_VARIABLE: str(port),
    }


@pytest.mark.slow
def test_plain_flwr_run_is_not_reached_either(tmp_path: Path, config: dict[str, object]) -> None:
    (port,) = free_ports(1)
    own = tmp_path / "own"
    own.mkdir()
    file = written(config, tmp_path / "run.toml")
    command, env = flwr_run(tmp_path, port, file)
    with simulating(own, port, tmp_path / "home") as link:
        started = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        found = listeners_of(started, link.pid)
    require_loopback(found)
    assert len(list(own.glob("runs/*/model/model.safetensors"))) == 1


@pytest.mark.slow
def test_other_checkout_s_superlink_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    """The other SuperLink has the same program and environment; only its directory differs."""
    (port,) = free_ports(1)
    stranger = unshared_app(ROOT, tmp_path)
    file = written(config, tmp_path / "run.toml")
    with simulating(stranger, port, tmp_path / "home") as link:
        command, env = flwr_run(tmp_path, port, file)
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert (
            "this SuperLink does not belong to the checkout from which the run comes:"
            f" the run comes from {ROOT}" in done.stdout
        )
        assert f"process {link.pid} of user" in done.stdout
    assert not (stranger / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("there", [(), ("server_app",), ("server_app", "client_app")])
def test_incomplete_bundle_is_installed_again(
    tmp_path: Path, config: dict[str, object], there: tuple[str, ...]
) -> None:
    """An incomplete package contains only its ``__init__``."""
    name = f"espalier.espalier.0.1.0.{hashlib.sha256(build_fab_from_disk(ROOT)).hexdigest()[:8]}"
    folder = tmp_path / "home" / "apps" / name
    folder.mkdir(parents=True)
    for part in there:
        shutil.copy(ROOT / "pyproject.toml", folder)
        (folder / part).mkdir()
        (folder / part / "__init__.py").touch()
    (port,) = free_ports(1)
    own = tmp_path / "own"
    with simulating(own, port, tmp_path / "home"):
        # On a busy machine Ray sometimes does not start, and the directory is left unchanged.
        for _ in range(RAY_STARTS):
            done = espalier(
                tmp_path,
                "run",
                *words(config),
                "--app",
                str(ROOT),
                "--superlink",
                f"127.0.0.1:{port}",
            )
            if done.returncode == 0 or not RAY_DID_NOT_START.search(done.stdout):
                break
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(own.glob("runs/*/model/model.safetensors"))) == 1
    assert "the run's program was incomplete" in done.stderr
    assert "/apps/espalier.espalier." in done.stderr or "apps/espalier.espalier.*" in done.stderr

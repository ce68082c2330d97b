"""A SuperLink and SuperNodes as processes of their own, on free loopback ports, stopped by their process ids."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

BIN = Path(sys.executable).parent
PORT_POLLS = 300


def environment(home: Path) -> dict[str, str]:
    """An environment that keeps Flower's files in ``home`` and calls nobody."""
    home.mkdir(parents=True, exist_ok=True)
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**os.environ, **quiet, "FLWR_HOME": str(home), "PATH": path, "ESPALIER_STATE_DIR": str(home / "state")}


def free_ports(number: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for entry in sockets:
            entry.bind(("127.0.0.1", 0))
        return [entry.getsockname()[1] for entry in sockets]


@contextmanager
def process(command: Sequence[str], folder: Path, name: str, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with its output in ``<name>.log``, and stop it at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.log", "wb") as log:
        started = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def wait_for_port(port: int, started: subprocess.Popen[bytes]) -> None:
    """Return when somebody listens on the port; fail if the process ends first."""
    for _ in range(PORT_POLLS):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        try:
            code = started.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the process ended with {code} before it listened on port {port}")
    raise AssertionError(f"nobody listens on port {port}")


@contextmanager
def federation(folder: Path, node_configs: Sequence[str]) -> Iterator[str]:
    """A SuperLink with one SuperNode per node configuration; yields the address of its Control API."""
    env = environment(folder / "flower")
    serverappio, fleet, control, *nodes = free_ports(3 + len(node_configs))
    superlink = [
        str(BIN / "flower-superlink"), "--insecure", "--serverappio-api-address", f"127.0.0.1:{serverappio}",
        "--fleet-api-address", f"127.0.0.1:{fleet}", "--control-api-address", f"127.0.0.1:{control}",
    ]  # fmt: skip
    with ExitStack() as stack:
        wait_for_port(control, stack.enter_context(process(superlink, folder, "superlink", env)))
        for port, config in zip(nodes, node_configs, strict=True):
            supernode = [
                str(BIN / "flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{fleet}",
                "--clientappio-api-address", f"127.0.0.1:{port}", "--node-config", config,
            ]  # fmt: skip
            stack.enter_context(process(supernode, folder, f"supernode-{port}", env))
        yield f"127.0.0.1:{control}"


def espalier(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Give the ``espalier`` command."""
    command = [str(BIN / "espalier"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment(folder / "command"), capture_output=True, text=True, timeout=400)

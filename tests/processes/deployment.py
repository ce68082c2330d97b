"""SuperLink and SuperNodes as separate processes on free loopback ports.

The processes are stopped by their process IDs.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from typer.testing import CliRunner

from espalier.flower import programs
from espalier.flower.programs import sites_share_port
from espalier.launch.addresses import free_port
from tests.flower.flower_parts import flwr_command

BIN = Path(sys.executable).parent
PORT_POLLS = 1200


def superlink_options(control: int, fleet: str) -> list[str]:
    """Return the options of a SuperLink for sites.

    From Flower 1.40 on, SuperNodes use the port ``control`` in place of the address ``fleet``.
    """
    options = ["--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port"]
    options.append(str(control))
    return options if sites_share_port() else [*options, "--fleet-api-address", fleet]


def secured_superlink(own: Path, database: Path, control: int, fleet: str) -> list[str]:
    """Return the command of a SuperLink with TLS and node authentication.

    ``own`` is the folder ``server`` that ``espalier keys`` makes.
    """
    return [
        str(BIN / programs.SUPERLINK), *superlink_options(control, fleet),
        "--enable-supernode-auth", "--database", str(database),
        "--ssl-ca-certfile", str(own / "ca.crt"), "--ssl-certfile", str(own / "server.pem"),
        "--ssl-keyfile", str(own / "server.key"),
    ]  # fmt: skip


def environment(home: Path) -> dict[str, str]:
    """Return an environment that keeps Flower's files in ``home`` and disables telemetry."""
    home.mkdir(parents=True, exist_ok=True)
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {
        **os.environ,
        **quiet,
        "FLWR_HOME": str(home),
        "PATH": path,
        "ESPALIER_STATE_DIR": str(home / "state"),
    }


def free_ports(number: int) -> list[int]:
    """Return different ports that were free a moment ago."""
    found: list[int] = []
    while len(found) < number:
        found.append(free_port(found))
    return found


@contextmanager
def process(
    command: Sequence[str], folder: Path, name: str, env: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with its output in ``<name>.log``, and stop it at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.log", "wb") as log:
        started = subprocess.Popen(
            command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT
        )
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
    """Wait until a process listens on the port; fail if ``started`` ends first."""
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


@dataclass
class Federation:
    """SuperLink and its SuperNodes by site name, with functions that start them again."""

    folder: Path
    control: str
    superlink: subprocess.Popen[bytes]
    nodes: dict[str, subprocess.Popen[bytes]]
    start_node: Callable[[str], subprocess.Popen[bytes]]
    start_superlink: Callable[[], subprocess.Popen[bytes]]
    """Function that starts the SuperLink again with the same addresses and database."""
    tap: "Tap"
    """Recorder of the traffic of the tapped site."""

    def processes(self, program: str, site: str = "") -> list[int]:
        """Return the IDs of the processes of a Flower program in this federation, or at one site.

        Indirectly started processes count too.
        """
        own = {self.superlink.pid, *(node.pid for node in self.nodes.values())}
        if site:
            own = {self.nodes[site].pid}
        found = []
        for status in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if program.encode() in status.read_bytes() and own & set(
                    _ancestors(int(status.parent.name))
                ):
                    found.append(int(status.parent.name))
        return found


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return


@contextmanager
def federation(
    folder: Path,
    sites: Sequence[str],
    more: Mapping[str, str] | None = None,
    warm: Sequence[str] = (),
    at_once: Sequence[str] | None = None,
    tapped_site: str = "",
    warm_words: Sequence[str] = (),
) -> Iterator[Federation]:
    """Start a SuperLink with one SuperNode per site.

    Parameters
    ----------
    more : further node-config of each site, next to its state directory ``<folder>/<site>``
    warm : sites that run ``espalier node``
    warm_words : further arguments of ``espalier node``
    at_once : sites that are started now; None starts all
    tapped_site : site whose traffic is recorded

    The sites answer runs with little text, which keeps tests and measurements small.
    """
    env = environment(folder / "flower")
    fleet, control, *nodes = free_ports(2 + len(sites))
    # Flower 1.40 and later serves sites at the Control API's port.
    fleet = control if sites_share_port() else fleet
    ports = dict(zip(sites, nodes, strict=True))
    superlink = [
        str(BIN / "flower-superlink"), "--insecure", "--database", str(folder / "superlink.db"),
        *superlink_options(control, f"127.0.0.1:{fleet}"),
    ]  # fmt: skip
    with ExitStack() as stack:

        def start_superlink() -> subprocess.Popen[bytes]:
            link = stack.enter_context(process(superlink, folder, "superlink", env))
            wait_for_port(control, link)
            return link

        link = start_superlink()
        tap = stack.enter_context(tapped(fleet))

        def start_node(site: str) -> subprocess.Popen[bytes]:
            program = (
                [str(BIN / "espalier"), "node", *warm_words]
                if site in warm
                else [str(BIN / "flower-supernode")]
            )
            supernode = [
                *program, "--insecure",
                "--superlink", f"127.0.0.1:{tap.port if site == tapped_site else fleet}",
                "--port", str(ports[site]),
                "--node-config",
                (
                    f'site="{site}" state-dir="{folder / site}" min-tokens=1'
                    f' {(more or {}).get(site, "")}'
                ),
            ]  # fmt: skip
            return stack.enter_context(process(supernode, folder, f"supernode-{site}", env))

        started = {site: start_node(site) for site in (sites if at_once is None else at_once)}
        yield Federation(
            folder, f"127.0.0.1:{control}", link, started, start_node, start_superlink, tap
        )


def espalier_command(folder: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the ``espalier`` command and its environment."""
    return [str(BIN / "espalier"), *arguments], environment(folder / "command")


def espalier(
    folder: Path, *arguments: str, seconds: float = 1800
) -> subprocess.CompletedProcess[str]:
    """Run the ``espalier`` command for at most ``seconds`` and return its result."""
    command, env = espalier_command(folder, *arguments)
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds
    )


def submit(app: Path, running: Federation, config: Mapping[str, Any]) -> None:
    """Submit a run with Flower's own ``flwr run`` in this process; the SuperLink executes it."""
    folder = running.folder / "submitted"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(
        f'[superlink.own]\naddress = "{running.control}"\ninsecure = true\n'
    )
    (folder / "run.toml").write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
    )
    flwr(folder, "run", str(app), "own", "--run-config", str(folder / "run.toml"))


def flwr(home: Path, *words: str) -> str:
    """Run Flower's own command in this process and return its output.

    ``home`` contains its ``config.toml``.
    """
    done = CliRunner(env={**environment(home), "COLUMNS": "200"}).invoke(flwr_command, list(words))
    assert done.exit_code == 0, done.output
    return str(done.output)


def eventually(what: Callable[[], bool], seconds: float = 1800) -> None:
    """Wait until a condition is true; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@dataclass(frozen=True)
class Tap:
    """TCP forwarder on a loopback port, with the bytes of each connection and direction."""

    port: int
    captured: list[bytearray]

    def num_bytes(self) -> int:
        """Return the number of recorded bytes."""
        return sum(map(len, self.captured))

    def readable(self, names: Iterable[str]) -> set[str]:
        """Return the names that occur in the recorded bytes."""
        return {name for name in names if any(name.encode() in data for data in self.captured)}


@contextmanager
def tapped(port: int) -> Iterator[Tap]:
    """Forward connections to a loopback port and record their bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        tap = Tap(server.getsockname()[1], [])
        Thread(target=_forward, args=(server, port, tap), daemon=True).start()
        yield tap
        # No further connection is accepted.
        server.shutdown(socket.SHUT_RDWR)


def _forward(server: socket.socket, port: int, tap: Tap) -> None:
    with suppress(OSError):
        while True:
            near, _ = server.accept()
            try:
                far = socket.create_connection(("127.0.0.1", port))
            except OSError:
                near.close()
                continue
            for source, target in ((near, far), (far, near)):
                # One recorder per direction keeps the byte streams apart.
                tap.captured.append(bytearray())
                Thread(target=_pump, args=(source, target, tap.captured[-1]), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            kept += data
            target.sendall(data)
    # The other direction of the connection may still carry data.
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def tensor_names(egress_log: Path) -> set[str]:
    """Return the names of all tensors that left a site."""
    entries = [json.loads(line) for line in egress_log.read_text().splitlines()]
    return {name for entry in entries for blob in entry["blobs"] for name in blob["tensors"]}

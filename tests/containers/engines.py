"""Container engine for tests: a running one, or one of the test's own that leaves nothing behind.

Environment variables:

    ESPALIER_CONTAINER_ENGINE     docker or podman; default: docker, then podman
    ESPALIER_BASE_ARCHIVE         tar of a root file system with Python 3.11 and pip, imported as
    base image
    ESPALIER_BUILD_OPTIONS        further options of `docker build`
    ESPALIER_INSTALL_ENGINE       0: never install an engine with apt-get
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import IO

import pytest

ROOT = Path(__file__).parent.parent.parent
COMPOSE_FILE = ROOT / "docker" / "compose.yaml"
DOCKERFILE = ROOT / "docker" / "Dockerfile"
START_SECONDS = 120.0
STOP_SECONDS = 60.0
BUILD_SECONDS = 3600.0
LABEL = "com.docker.compose"


@dataclass
class Engine:
    """Container engine with its compose command and with names that no user uses.

    Parameters
    ----------
    command : the engine's own command
    compose : the command of its compose
    environment : environment variables for both commands
    builds_with : options of `build` that this engine needs
    """

    command: list[str]
    compose_command: list[str]
    environment: dict[str, str]
    builds_with: list[str] = field(default_factory=list)
    project: str = field(default_factory=lambda: f"espalier-test-{token_hex(4)}")
    files: list[Path] = field(default_factory=lambda: [COMPOSE_FILE])
    """Compose files: the project's, and the changes that a test makes."""

    @property
    def image(self) -> str:
        """Name of the image that the compose file uses."""
        return self.project

    def run(
        self, *words: str, seconds: float = 600.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the engine."""
        return self._run([*self.command, *words], seconds, check)

    def compose_words(self, *words: str) -> list[str]:
        """Return a compose command for the project's files."""
        files = [word for file in self.files for word in ("-f", str(file))]
        return [*self.compose_command, "-p", self.project, *files, *words]

    def compose(
        self, *words: str, seconds: float = 600.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a compose command."""
        return self._run(self.compose_words(*words), seconds, check)

    def _run(
        self, command: list[str], seconds: float, check: bool
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
        assert not check or done.returncode == 0, (
            f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def container(self, service: str) -> str:
        """Return the ID of a service's container."""
        filters = (f"label={LABEL}.project={self.project}", f"label={LABEL}.service={service}")
        options = [word for given in filters for word in ("--filter", given)]
        (found,) = self.run("ps", "--quiet", *options).stdout.split()
        return found

    def inspect(self, kind: str, name: str, form: str) -> str:
        """Return a property of a container or an image."""
        return self.run(kind, "inspect", "--format", form, name).stdout.strip()

    def python(self, service: str, program: str) -> str:
        """Run a Python program in a service's container and return its output."""
        return self.run("exec", self.container(service), "python", "-c", program).stdout.strip()

    def build(self) -> float:
        """Build the image and return the duration in seconds."""
        given = shlex.split(os.environ.get("ESPALIER_BUILD_OPTIONS", ""))
        base = self._base(given)
        began = time.monotonic()
        options = [*self.builds_with, "--build-arg", f"BASE={base}", *given]
        self.run(
            "build",
            *options,
            "--file",
            str(DOCKERFILE),
            "--tag",
            self.image,
            str(ROOT),
            seconds=BUILD_SECONDS,
        )
        return time.monotonic() - began

    def _base(self, given: list[str]) -> str:
        if archive := os.environ.get("ESPALIER_BASE_ARCHIVE"):
            self.run("import", archive, f"{self.project}-base:1")
            return f"{self.project}-base:1"
        found = re.search(r"^ARG BASE=(\S+)", DOCKERFILE.read_text(), re.MULTILINE)
        assert found is not None
        # As with ``docker build``, the last ``--build-arg`` counts.
        named = [word.removeprefix("BASE=") for word in given if word.startswith("BASE=")]
        base = named[-1] if named else found[1]
        if self.run("image", "inspect", base, check=False).returncode != 0:
            done = self.run("pull", base, check=False)
            if done.returncode != 0:
                pytest.skip(
                    f"the base image {base} cannot be pulled ({_end(done.stderr)}); name a local"
                    f" one: see {Path(__file__).relative_to(ROOT)}"
                )
        return base

    def remove(self) -> None:
        """Remove containers, volumes, networks and images of the project."""
        self.compose("down", "--volumes", check=False)
        for image in (self.image, f"{self.project}-base:1"):
            self.run("rmi", "--force", image, check=False)


@contextmanager
def engine() -> Iterator[Engine]:
    """Yield an engine; skip the test if none runs and none can be started."""
    wanted = os.environ.get("ESPALIER_CONTAINER_ENGINE", "")
    with _found(wanted) as found:
        found.environment["ESPALIER_IMAGE"] = found.image
        try:
            yield found
        finally:
            found.remove()


@contextmanager
def _found(wanted: str) -> Iterator[Engine]:
    if wanted in ("", "docker") and _answers(["docker", "info"]):
        yield _docker(dict(os.environ))
    elif (
        wanted in ("", "podman") and _answers(["podman", "info"]) and shutil.which("podman-compose")
    ):
        yield Engine(["podman"], ["podman-compose"], dict(os.environ), ["--network=host"])
    elif wanted in ("", "docker"):
        with _own_daemon() as address:
            # The test's own daemon runs without a bridge network.
            yield _docker({**os.environ, "DOCKER_HOST": address}, ["--network=host"])
    else:
        pytest.skip(
            f"ESPALIER_CONTAINER_ENGINE={wanted}: no such engine and its compose answer here"
        )


def _docker(environment: dict[str, str], builds_with: list[str] | None = None) -> Engine:
    # Older installations have compose only as a separate program.
    for compose in (["docker", "compose"], ["docker-compose"]):
        if _answers([*compose, "version"]):
            return Engine(["docker"], compose, environment, builds_with or [])
    pytest.skip(
        "Docker is here without compose: neither `docker compose` nor `docker-compose` answers"
    )


@contextmanager
def _own_daemon() -> Iterator[str]:
    """Start a Docker daemon and yield its address.

    The daemon keeps its files in one directory and does not change the firewall.
    """
    if os.geteuid() != 0:
        pytest.skip("no container engine answers, and only root can start one")
    if shutil.which("dockerd") is None:
        _install()
    # The path of a Unix socket must be short, so pytest's temporary directory does not do.
    folder = Path(tempfile.mkdtemp(prefix="espalier-docker-", dir="/tmp"))
    try:
        with open(folder / "log", "wb") as log, _daemon(folder, log) as socket:
            yield socket
    finally:
        # A test that is skipped here leaves nothing either.
        _unmount(folder)
        shutil.rmtree(folder)


@contextmanager
def _daemon(folder: Path, log: IO[bytes]) -> Iterator[str]:
    """Start a daemon whose files are in ``folder``, yield its address and end it."""
    socket = f"unix://{folder}/docker.sock"
    command = [
        "dockerd",
        "--data-root",
        f"{folder}/data",
        "--exec-root",
        f"{folder}/exec",
        "--pidfile",
        f"{folder}/pid",
    ]
    # Without a firewall and a bridge the daemon leaves the machine's network unchanged.
    command += ["--host", socket, "--iptables=false", "--ip6tables=false", "--bridge=none"]
    with subprocess.Popen(command, stdout=log, stderr=log) as daemon:
        try:
            end = time.monotonic() + START_SECONDS
            while not _answers(["docker", "--host", socket, "info"]):
                if daemon.poll() is not None or time.monotonic() > end:
                    pytest.skip(
                        f"a Docker daemon does not start here: {_end((folder / 'log').read_text())}"
                    )
                time.sleep(0.5)
            yield socket
        finally:
            daemon.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(STOP_SECONDS)
            daemon.kill()


def _unmount(folder: Path) -> None:
    """Unmount everything below a folder, innermost mounts first.

    A Docker daemon leaves its directory mounted on itself.
    """
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in sorted(
        (place for place in places if place.startswith(f"{folder}/")), key=len, reverse=True
    ):
        subprocess.run(["umount", place], check=False)


def _install() -> None:
    """Install Docker with apt-get; skip the test if that is impossible or not allowed."""
    if os.environ.get("ESPALIER_INSTALL_ENGINE") == "0" or shutil.which("apt-get") is None:
        pytest.skip(
            "there is no container engine here, and none may be installed or could be with apt-get"
        )
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    packages = ["--no-install-recommends", "docker.io", "docker-compose", "iptables"]
    for words in (["update"], ["install", "--yes", *packages]):
        done = subprocess.run(
            ["apt-get", *words], env=quiet, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(
                f"apt-get {words[0]} could not install a container engine: {_end(done.stderr)}"
            )


def _answers(command: list[str]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return (
        subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
        ).returncode
        == 0
    )


def _end(told: str) -> str:
    return " ".join(told.split())[-300:]

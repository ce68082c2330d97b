"""A SuperLink, and Flower's command line spoken to through it: one of one's own for a simulated run, or a running one.

One's own is started in an empty directory: Ray puts the SuperLink's working directory first on the clients' import path, and
a SuperLink that was started in another copy of the project would run that copy's clients.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.flower.programs import COMMAND, SUPERLINK, simulating_superlink
from espalier.launch.free_port import free_port
from espalier.launch.kept import kept
from espalier.launch.reachability import await_superlink
from espalier.settings.loopback import keep_on_loopback
from espalier.settings.mistakes import Mistake

CONNECTION = "espalier"
LOG = "superlink.log"
START_SECONDS = 600
"""A busy machine takes its time; a SuperLink that fails to start ends, and is not waited for."""
STOP_SECONDS = 120
BY_SIGNAL = 128
SHARED = "ESPALIER_SHARED_SUPERLINK"
"""Tells the ServerApp (``server_app.own_superlink``) that it need not ask whose SuperLink this is."""
MOST_TMPDIR = 38
"""Bytes: Ray makes sockets below TMPDIR, and a socket's path has at most 107."""
SHORT_TMPDIR = "/tmp"
LOG_END = 2000
"""Characters of a SuperLink's log that are quoted."""

CERTIFICATES = (
    " A SuperLink with certificates says the same to whoever comes without: give their authority's"
    " with --root-certificates, and reach the SuperLink by a name that they hold."
)
"""What Flower does not say when a Control API cannot be reached."""

RAY_DID_NOT_START = re.compile(r"raybackend\.py\W+line \d+, in init_ray")
"""What the log of a run holds when Ray, and not the run, failed to start.

Ray waits half a minute for processes of its own that now and then do not come up, and gives several messages for it; Flower
starts Ray in this one function, so it is in the traceback of all of them.
"""


class SuperLinkLost(RuntimeError):
    """The SuperLink does not answer any more; its message says what is known of it, and what to do before the run goes on."""


@dataclass
class SuperLink:
    """A SuperLink that can be reached, and the environment in which ``flwr`` finds it."""

    environment: dict[str, str]
    folder: Path
    address: str
    """``host:port`` of its Control API."""
    process: subprocess.Popen[bytes] | None = None
    """One's own: the process that keeps it (see ``kept``)."""

    def start_run(self, app: Path, config_file: Path, *options: str) -> str:
        """Submit a run and return Flower's run id.

        Raises
        ------
        Mistake
            Flower refused it; its words are quoted.
        """
        answer = self._flwr(
            "run",
            str(app),
            CONNECTION,
            "--format",
            "json",
            "--run-config",
            str(config_file),
            *options,
        )
        if not answer.get("success"):
            said = " ".join(str(answer.get("error-message", answer)).split())
            raise Mistake(
                "Flower did not start the run:"
                f" {said}{CERTIFICATES if 'unavailable' in said else ''}"
            )
        return str(answer["run-id"])

    def stream_log(self, run_id: str) -> Generator[str, None, None]:
        """Yield the run's log, line by line, until the run ends."""
        with kept(
            [_program(COMMAND), "log", run_id, CONNECTION, "--stream"], self.folder, self.environment, self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            yield from process.stdout

    def status(self, run_id: str) -> tuple[str, str]:
        """Flower's status of a run, for instance ``finished:completed``, and its details.

        Raises
        ------
        SuperLinkLost
            It does not answer, or does not know the run.
        """
        answer: dict[str, Any] = {}
        try:
            answer = self._flwr("ls", CONNECTION, "--run-id", run_id, "--format", "json")
            run = answer["runs"][0]
        except (Mistake, KeyError, IndexError) as error:
            raise SuperLinkLost(
                self._what_became_of_it(str(answer.get("error-message", error)))
            ) from None
        return str(run["status"]), str(run.get("status-details", ""))

    def _what_became_of_it(self, answer: str) -> str:
        told = " ".join(answer.split())
        if self.process is None:
            return (
                f"the SuperLink at {self.address} does not answer, or lost the run: {told}\nif it"
                " was killed, start it again with the same --database; its nodes come back by"
                " themselves"
            )
        if (code := self._exit_code(self.process)) is None:
            return f"the SuperLink of this run does not answer: {told}"
        if code > BY_SIGNAL:
            return (
                f"the SuperLink of this run was killed (signal {code - BY_SIGNAL}) before the run"
                " had ended"
            )
        end = (self.folder / LOG).read_text(errors="replace")[-LOG_END:]
        return (
            f"the SuperLink of this run ended with exit code {code} before the run had; the end of"
            f" its log:\n{end}"
        )

    def _exit_code(self, process: subprocess.Popen[bytes]) -> int | None:
        """Return the exit code of our own SuperLink; None if it still listens or has not ended."""
        host, _, port = self.address.rpartition(":")
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return None
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def stop_run(self, run_id: str) -> None:
        """End a run."""
        self._flwr("stop", run_id, CONNECTION, "--format", "json")

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [_program(COMMAND), *arguments], env=self.environment, cwd=self.folder, capture_output=True, text=True,
            start_new_session=True,  # Ctrl-C comes to the command alone, which decides
        )  # fmt: skip
        start = done.stdout.find("{")
        try:
            answer: dict[str, Any] = json.loads(done.stdout[start:])
        except ValueError:
            raise Mistake(f"flwr {arguments[0]} failed:\n{done.stdout}{done.stderr}") from None
        return answer


@contextmanager
def running_superlink(address: str, root_certificates: str | None) -> Iterator[SuperLink]:
    """Reach a SuperLink that somebody else runs, at ``host:port`` of its Control API, by TLS if certificates are given.

    One that is not up yet is waited for.
    """
    await_superlink(address)
    secure = (
        f'root-certificates = "{Path(root_certificates).absolute()}"'
        if root_certificates
        else "insecure = true"
    )
    folder = _flower_home(f'address = "{address}"\n{secure}\n')
    try:
        yield SuperLink(_environment(folder), folder, address)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def own_superlink() -> Iterator[SuperLink]:
    """Start a SuperLink in simulation mode on free loopback ports; it and what it started do not outlive the block.

    Raises
    ------
    Mistake
        It did not start; the end of its log is quoted.
    """
    control = free_port()
    folder = _flower_home(f'address = "127.0.0.1:{control}"\ninsecure = true\n')
    empty = folder / "empty"
    log = folder / LOG
    empty.mkdir()
    # `--app` may name another checkout than the installed one.
    environment = {**_environment(folder), SHARED: "1"}
    command = [_program(SUPERLINK), *simulating_superlink(control)]
    try:
        with (
            open(log, "wb") as output,
            kept(command, folder, environment, empty, stdout=output, stderr=output) as process,
        ):
            _wait_for_port(control, process, log)
            yield SuperLink(environment, folder, f"127.0.0.1:{control}", process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flower_home(connection: str) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="espalier-flower-"))
    except OSError as error:
        raise Mistake(
            f"no temporary directory can be made ({error.strerror}); set TMPDIR to one that you can"
            " write"
        ) from None
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{connection}'
    )
    return folder


def _environment(flower_home: Path) -> dict[str, str]:
    """This process's environment, with Flower's and Ray's calls home switched off unless it says otherwise.

    A cluster that ``RAY_ADDRESS`` names is not used: clients are processes of this machine.
    """
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment = {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **quiet,
        **os.environ,
        "FLWR_HOME": str(flower_home),
    }
    keep_on_loopback(environment)
    environment.pop("RAY_ADDRESS", None)
    if len(os.fsencode(environment.get("TMPDIR", ""))) > MOST_TMPDIR:
        environment.setdefault("RAY_TMPDIR", SHORT_TMPDIR)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    return environment


def _wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(START_SECONDS * 5):
        if process.poll() is not None:
            break
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    raise Mistake(f"flower-superlink did not start:\n{log.read_text(errors='replace')[-LOG_END:]}")


def _program(name: str) -> str:
    """Return the path of a program, the one beside this Python if there is one."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise Mistake(
            f"{name} is not installed; install Espalier again, which brings Flower along (README,"
            " 'Set up and run')"
        )
    return found

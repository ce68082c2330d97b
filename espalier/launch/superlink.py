"""SuperLinks for the ``flwr`` command: our own one for a simulation, or a running one.

Our own SuperLink is started in an empty directory. Ray puts the SuperLink's working directory first
on the clients' import path, so a SuperLink started in another copy of the project would run that
copy's clients.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from espalier.environment.loopback import keep_on_loopback
from espalier.errors import InputError
from espalier.flower.programs import SUPERLINK, simulating_superlink
from espalier.flower.run_command import (
    NoAnswerError,
    RunCommand,
    installed_program,
    write_connection,
)
from espalier.launch.addresses import (
    await_superlink,
    free_port,
    listens,
    require_own_superlink,
)
from espalier.launch.child_processes import kept

LOG = "superlink.log"
START_SECONDS = 600
"""Maximum wait for the start on a busy machine; a SuperLink that fails to start ends earlier."""
STOP_SECONDS = 120
SHARED = "ESPALIER_SHARED_SUPERLINK"
"""Variable that tells ``server_app.own_superlink`` not to check who started the SuperLink."""
MAX_TMPDIR = 38
"""Maximum length of TMPDIR in bytes.

Ray creates sockets below TMPDIR, and the path of a socket has at most 107 bytes.
"""
LOG_END = 2000
"""Number of characters at the end of a SuperLink's log that errors quote."""

CERTIFICATES = (
    " A SuperLink with TLS gives the same error to a client without certificates: name the"
    " authority's certificate with --root-certificates, and use a host name that the"
    " SuperLink's certificate contains."
)
"""Hint that is added to Flower's error if a Control API cannot be reached."""


class SuperLinkLost(RuntimeError):
    """Error for a SuperLink that no longer answers.

    The message says what is known about it and what to do before the run can continue.
    """


@dataclass
class SuperLink:
    """Reachable SuperLink and the environment in which ``flwr`` finds it."""

    environment: dict[str, str]
    folder: Path
    address: str
    """``host:port`` of its Control API."""
    process: subprocess.Popen[bytes] | None = None
    """Keeper process of our own SuperLink (see ``kept``); None for one that others run."""

    def start_run(self, app: Path, config_file: Path, *options: str) -> str:
        """Submit a run and return Flower's run id.

        InputError quotes Flower if it refused the run, or if our own SuperLink did not start.
        """
        if self.process is not None:
            self._await_start(self.process)
        try:
            return self._command.start(app, config_file, *options)
        except NoAnswerError as error:
            raise InputError(f"{error}{CERTIFICATES}") from None

    @property
    def _command(self) -> RunCommand:
        return RunCommand(self.environment, self.folder)

    def _await_start(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until our own SuperLink listens."""
        end = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < end:
            if listens(self.address):
                return
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        raise InputError(f"flower-superlink did not start:\n{self._end_of_log()}")

    def stream_log(self, run_id: str) -> Generator[str, None, None]:
        """Yield the run's log line by line until the run ends."""
        with kept(
            self._command.log_words(run_id), self.folder, self.environment, self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", errors="replace", bufsize=1,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            yield from process.stdout

    def status(self, run_id: str) -> tuple[str, str]:
        """Return Flower's status of a run, such as ``finished:completed``, and its details.

        Raises SuperLinkLost if the SuperLink does not answer or does not know the run.
        """
        try:
            return self._command.status(run_id)
        except NoAnswerError as error:
            raise SuperLinkLost(self._failure_reason(str(error))) from None

    def _failure_reason(self, answer: str) -> str:
        reason = " ".join(answer.split())
        if self.process is None:
            return (
                f"the SuperLink at {self.address} does not answer, or lost the run: {reason}\nif"
                " it was killed, start it again with the same --database; its nodes reconnect"
                " by themselves"
            )
        code = None
        if not listens(self.address):
            with suppress(subprocess.TimeoutExpired):
                code = self.process.wait(STOP_SECONDS)
        if code is None:
            return f"the SuperLink of this run does not answer: {reason}"
        # The keeper reports a signal as 128 plus its number.
        if code > 128:
            return (
                f"the SuperLink of this run was killed (signal {code - 128}) before the"
                " run had ended"
            )
        return (
            f"the SuperLink of this run ended with exit code {code} before the run did; the end"
            f" of its log:\n{self._end_of_log()}"
        )

    def _end_of_log(self) -> str:
        return (self.folder / LOG).read_text(errors="replace")[-LOG_END:]

    def stop_run(self, run_id: str) -> None:
        """Stop a run."""
        self._command.stop(run_id)


@contextmanager
def running_superlink(address: str, root_certificates: str | None) -> Iterator[SuperLink]:
    """Yield a SuperLink that somebody else runs, at ``host:port`` of its Control API.

    Certificates switch TLS on. A SuperLink that does not listen yet is waited for.
    """
    if root_certificates:
        _require_readable(root_certificates)
    await_superlink(address)
    require_own_superlink(address, root_certificates)
    folder = _flower_home(address, root_certificates)
    try:
        yield SuperLink(_environment(folder), folder, address)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def own_superlink() -> Iterator[SuperLink]:
    """Start a SuperLink in simulation mode on a free loopback port, for the duration of the block.

    It is waited for only when a run is submitted.
    """
    control = free_port()
    folder = _flower_home(f"127.0.0.1:{control}", None)
    empty = folder / "empty"
    empty.mkdir()
    # ``--app`` may name another checkout than the installed one, which the ServerApp would refuse.
    environment = {**_environment(folder), SHARED: "1"}
    command = [installed_program(SUPERLINK), *simulating_superlink(control)]
    try:
        with (
            open(folder / LOG, "wb") as output,
            kept(command, folder, environment, empty, stdout=output, stderr=output) as process,
        ):
            yield SuperLink(environment, folder, f"127.0.0.1:{control}", process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require_readable(certificates: str) -> None:
    try:
        Path(certificates).read_bytes()
    except OSError as error:
        raise InputError(
            f"--root-certificates {certificates}: cannot be read ({error.strerror}); name the file"
            " with the certificate of the SuperLink's authority (ca.crt)"
        ) from None


def _flower_home(address: str, root_certificates: str | None) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="espalier-flower-"))
    except OSError as error:
        raise InputError(
            f"no temporary directory can be created ({error.strerror}); set TMPDIR to a writable"
            " directory"
        ) from None
    write_connection(folder, address, root_certificates)
    return folder


def _environment(flower_home: Path) -> dict[str, str]:
    """Return this process's environment with usage reports of Flower and Ray switched off.

    Variables that are already set keep their values. ``RAY_ADDRESS`` is removed, because clients
    must be processes of this machine and not of a cluster.
    """
    environment = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray's default is 15: clients would stand still beside other programs of a busy machine.
        "RAY_worker_niceness": "0",
        **os.environ,
        "FLWR_HOME": str(flower_home),
        # The lines of a run have characters that the encoding of a terminal may lack.
        "PYTHONIOENCODING": "utf-8",
    }
    keep_on_loopback(environment)
    environment.pop("RAY_ADDRESS", None)
    if len(os.fsencode(environment.get("TMPDIR", ""))) > MAX_TMPDIR:
        environment.setdefault("RAY_TMPDIR", "/tmp")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    return environment

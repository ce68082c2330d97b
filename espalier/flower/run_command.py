"""Runs on a SuperLink, started and watched through Flower's ``flwr`` command."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.errors import InputError

PROGRAM = "flwr"
CONNECTION = "espalier"
COMPLETED = "finished:completed"
"""Flower's status of a run that ended without an error."""
FINISHED = "finished"
"""Beginning of Flower's status of a run that has ended."""
UNREACHABLE = "unavailable"
"""Word in Flower's error for a Control API that cannot be reached."""

RAY_DID_NOT_START = re.compile(r"raybackend\.py\W+line \d+, in init_ray")
"""Pattern in the log of a run in which Ray itself failed to start.

Ray waits half a minute for its own processes, which occasionally do not start, and reports that in
several ways. Flower starts Ray in this one function, so it is in the traceback of all of them.
"""


class NoAnswerError(RuntimeError):
    """Error for a SuperLink that does not answer, or does not know a run."""


@dataclass(frozen=True)
class RunCommand:
    """``flwr`` command for one SuperLink.

    Parameters
    ----------
    environment : environment variables of the command; ``FLWR_HOME`` names ``folder``
    folder : directory of Flower's configuration (``write_connection``)
    """

    environment: dict[str, str]
    folder: Path

    def start(self, app: Path, config_file: Path, *options: str) -> str:
        """Submit a run and return Flower's run id.

        Raises
        ------
        NoAnswerError
            The SuperLink cannot be reached.
        InputError
            Flower refused the run.
        """
        run_config = ("--run-config", str(config_file))
        # Flower's answer is JSON; its exit code says little.
        answer = self._ask("run", str(app), CONNECTION, *run_config, *options)
        if answer.get("success"):
            return str(answer["run-id"])
        message = f"Flower did not start the run: {_error_message(answer)}"
        if UNREACHABLE in message:
            raise NoAnswerError(message)
        raise InputError(message)

    def status(self, run_id: str) -> tuple[str, str]:
        """Return Flower's status of a run, such as ``finished:completed``, and its details.

        Raises NoAnswerError if the SuperLink does not answer or does not know the run.
        """
        try:
            answer = self._ask("ls", CONNECTION, "--run-id", run_id)
        except InputError as error:
            raise NoAnswerError(str(error)) from None
        try:
            run = answer["runs"][0]
            # A run that was just submitted may have no details yet.
            return str(run["status"]), str(run.get("status-details", ""))
        except (KeyError, IndexError):
            raise NoAnswerError(_error_message(answer)) from None

    def stop(self, run_id: str) -> None:
        """Stop a run."""
        self._ask("stop", run_id, CONNECTION)

    def log_words(self, run_id: str) -> list[str]:
        """Return the command that prints a run's log until the run ends."""
        return [installed_program(PROGRAM), "log", run_id, CONNECTION, "--stream"]

    def _ask(self, *words: str) -> dict[str, Any]:
        process = subprocess.run(
            [installed_program(PROGRAM), *words, "--format", "json"],
            env=self.environment, cwd=self.folder, capture_output=True,
            encoding="utf-8", errors="replace",
            # Ctrl-C reaches only the caller, which decides what to stop.
            start_new_session=True,
        )  # fmt: skip
        # Flower may print other lines before its JSON answer.
        start = process.stdout.find("{")
        try:
            answer: dict[str, Any] = json.loads(process.stdout[start:])
        except ValueError:
            raise InputError(f"flwr {words[0]} failed:\n{process.stdout}{process.stderr}") from None
        return answer


def write_connection(folder: Path, address: str, root_certificates: str | None) -> None:
    """Write Flower's configuration for a SuperLink; certificates switch TLS on.

    ``address`` is ``host:port`` of its Control API.
    """
    secure = (
        f'root-certificates = "{Path(root_certificates).absolute()}"'
        if root_certificates
        else "insecure = true"
    )
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{address}"\n{secure}\n'
    )


def has_ended(status: str) -> bool:
    """Return whether a run with this status of Flower's has ended."""
    return status.startswith(FINISHED)


def installed_program(name: str) -> str:
    """Return the path of a program, preferably of the one next to this Python.

    Raises InputError if it is not installed.
    """
    installed = Path(sys.executable).parent / name
    path = str(installed) if installed.exists() else shutil.which(name)
    if path is None:
        raise InputError(
            f"{name} is not installed; install Espalier again, which also installs Flower"
            " (README, 'Set up and run')"
        )
    return path


def _error_message(answer: dict[str, Any]) -> str:
    return " ".join(str(answer.get("error-message", answer)).split())

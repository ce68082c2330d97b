"""A run as ``espalier run`` and ``espalier sweep`` request it, and its exit code."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.errors import RunError, RunInterrupted, tell
from espalier.launch.addresses import require_address
from espalier.launch.app import find_app, run_in_app
from espalier.launch.child_processes import take_interrupts
from espalier.launch.configuration import configuration
from espalier.launch.run import WatchedRun, simulate, submit
from espalier.launch.run_output import run_output


@dataclass(frozen=True)
class RunRequest:
    """Request of a run, as ``espalier run`` and ``espalier sweep`` make it.

    Parameters
    ----------
    arguments : words of the command line from ``run`` on, for the command that resumes the run
    words : preset and settings among them
    app : directory or file of the app; None for the installed one
    gpus_per_client : fraction of a GPU for each simulated client
    superlink : address of a running SuperLink's Control API; None for a simulation
    root_certificates : file with the root certificates of that SuperLink; None for no TLS
    measures : whether models are measured at the end of a simulation
    """

    arguments: Sequence[str]
    words: Sequence[str]
    app: str | None
    gpus_per_client: float
    superlink: str | None = None
    root_certificates: str | None = None
    measures: bool = False


def run(request: RunRequest) -> int:
    """Run the app and return the exit code of the command."""
    return run_to_end(request)[0]


def run_to_end(request: RunRequest) -> tuple[int, str]:
    """Run the app, and return the exit code and the run directory.

    The directory is that on the SuperLink's machine, and empty if the run did not start.
    """
    take_interrupts()
    watched = WatchedRun("give the same command again", lambda path: _resuming(request, path))
    return _exit_code(request, watched), watched.directory


def _exit_code(request: RunRequest, watched: WatchedRun) -> int:
    """Run the app, report why it did not complete, and return the exit code."""
    try:
        return _run(request, watched)
    except RunError as error:
        for part in error.parts:
            tell(part)
        return 1
    except RunInterrupted as interrupted:
        print(f"\nespalier: interrupted; {interrupted.resume_hint}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print(f"\nespalier: interrupted; {watched.resume_hint()}", file=sys.stderr)
        return 130


def _run(request: RunRequest, watched: WatchedRun) -> int:
    """Run the app and return 0, or 130 after an interrupt of the measurement after the run."""
    if request.superlink is not None:
        require_address(request.superlink)
    app = find_app(request.app)
    config, settings = configuration(app, request.words, on_this_machine=request.superlink is None)
    with run_output(settings.method) as watched.say:
        if request.superlink is None:
            simulate(watched, app, config, settings, request.gpus_per_client)
        else:
            submit(watched, app, config, request.superlink, request.root_certificates)
    # The result of a run on a SuperLink is on that machine.
    measures = request.measures and request.superlink is None
    if not measures or watched.interrupted or not watched.directory:
        return 0
    return _measured(app, watched.directory)


def _measured(app: Path, directory: str) -> int:
    """Measure the models of a finished run in a process of its own, and return an exit code.

    It is 0 also if the measurement failed, because the run is complete.
    """
    try:
        if run_in_app(app, "espalier.results.report.after_run", {"directory": directory}):
            tell("the run is complete; memory and speed of its models were not measured")
        return 0
    except KeyboardInterrupt:
        command = shlex.join(["espalier", "report", directory, "--measure"])
        tell(f"interrupted; the run is complete, and `{command}` measures its models")
        return 130


def _resuming(request: RunRequest, directory: str) -> str:
    words = [word for word in request.arguments if not word.startswith("resume-from=")]
    return shlex.join(["espalier", *words, f"resume-from={directory}"])

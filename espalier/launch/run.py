"""One run, watched until its end: a simulation on this machine, or a run on a SuperLink."""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from signal import SIGKILL
from typing import Any

import tomli_w

from espalier.environment.hub_models import download_model, has_some_weights, is_on_hub
from espalier.errors import (
    FLOWER_REPORTS_IT_TOO,
    RUN_DIRECTORY,
    EspalierError,
    InputError,
    RunError,
    RunInterrupted,
    tell,
)
from espalier.flower.load_faults import is_incomplete, unshared_app, where_to_mend
from espalier.flower.run_command import COMPLETED, RAY_DID_NOT_START, has_ended
from espalier.launch.addresses import warn_of_open_control_api
from espalier.launch.app import run_in_app
from espalier.launch.child_processes import interrupted_later, uninterrupted
from espalier.launch.run_output import Say, be_silent, show
from espalier.launch.superlink import (
    SuperLink,
    SuperLinkLost,
    own_superlink,
    running_superlink,
)
from espalier.settings.run import RunSettings

BEFORE_START = "server_app.preflight"
"""Module of the app that opens all that a simulation reads."""
RAY_STARTS = 3
"""Maximum number of starts of a simulation, if Ray fails to start."""
NO_RAY = (
    "Ray is not installed here, and simulated clients need it: `pip install -e .` installs it"
    " (README, 'Set up and run'); container images do not contain it. With espalier run --superlink"
    " a run uses the sites that are connected there"
)
FAILED = "the run failed: "
"""Beginning of the line with which the ServerApp reports why the run failed."""
PREFIX = "espalier: "
"""Beginning of the program's messages on standard error."""


def is_completed(run: Path) -> bool:
    """Return whether the summary of a run says that it is completed."""
    try:
        return bool(json.loads((run / "summary.json").read_text())["status"] == "completed")
    except (OSError, ValueError, KeyError, TypeError):
        return False


@dataclass
class WatchedRun:
    """Run as seen in its log and by its SuperLink."""

    again: str
    """Advice for a run that had not started."""
    resuming: Callable[[str], str]
    """Function of the run directory: the command or call that resumes the run."""
    say: Say = show
    """Function that receives each line of the log, with its line break."""
    directory: str = ""
    """Run directory on the SuperLink's machine; empty until the ServerApp has created it."""
    status: str = ""
    """Flower's status; empty until the run has ended."""
    reason_reported: bool = False
    """True if the ServerApp reported why the run failed."""
    interrupted: bool = False
    """True if an interrupt arrived after the run was completed."""

    def note(self, line: str) -> None:
        """Process a line of the log."""
        if line.startswith(RUN_DIRECTORY):
            self.directory = line.removeprefix(RUN_DIRECTORY).strip()
        self.reason_reported = self.reason_reported or line.startswith(FLOWER_REPORTS_IT_TOO)

    @property
    def completed(self) -> bool:
        """True if the run is completed.

        Flower reports it, or, if the run was stopped before that, the summary in the run directory
        does.
        """
        return self.status == COMPLETED or (self.path is not None and is_completed(self.path))

    def resume_hint(self) -> str:
        """Return how to resume the run, in a message for the user."""
        if not self.directory:
            return f"the run had not started; {self.again}"
        return (
            f"finished rounds are in {self.directory}; to resume after the last one:\n"
            f"  {self.resuming(self.directory)}"
        )

    @property
    def path(self) -> Path | None:
        """Run directory on the SuperLink's machine; None until the ServerApp has created it."""
        return Path(self.directory) if self.directory else None


def simulate(
    watched: WatchedRun,
    app: Path,
    config: dict[str, Any],
    settings: RunSettings,
    gpus_per_client: float = 0.0,
) -> None:
    """Simulate a run on this machine, and return when it is completed.

    Parameters
    ----------
    watched : the run, not started yet
    app : directory of the app
    config : flat configuration
    settings : the same settings, parsed
    gpus_per_client : fraction of a GPU for each simulated client

    Raises
    ------
    InputError
        Ray is missing, or the model or the clients' data cannot be used.
    RunError
        The run failed.
    RunInterrupted
        The run was interrupted before its end.
    """
    if find_spec("ray") is None:
        # Images for sites have no Ray.
        raise InputError(NO_RAY)
    cpus = min(settings.threads, os.cpu_count() or 1)
    federation = (
        f"num-supernodes={settings.num_clients} client-resources-num-cpus={cpus} "
        f"client-resources-num-gpus={gpus_per_client}"
    )
    _to_the_end(watched, lambda: _simulate(watched, app, config, federation))


def submit(
    watched: WatchedRun,
    app: Path,
    config: dict[str, Any],
    address: str,
    root_certificates: str | None,
) -> None:
    """Start a run on a SuperLink, and return when it is completed.

    ``address`` is ``host:port`` of its Control API. Other parameters and errors are those of
    ``simulate``. InputError: the SuperLink cannot be reached or refuses the run.
    """
    warn_of_open_control_api(address)

    def work() -> None:
        with running_superlink(address, root_certificates) as superlink:
            _require_completed(watched, *_run_whole(superlink, watched, app, config))

    _to_the_end(watched, work)


def _to_the_end(watched: WatchedRun, work: Callable[[], None]) -> None:
    """Do the work of a run; a lost SuperLink and an interrupt become documented errors."""
    try:
        work()
    except SuperLinkLost as lost:
        raise RunError([str(lost), watched.resume_hint()], watched.path) from None
    except KeyboardInterrupt:
        if not watched.completed:
            raise RunInterrupted(watched.resume_hint(), watched.path) from None
        watched.interrupted = True


def _require_inputs(watched: WatchedRun, app: Path, config: dict[str, Any]) -> None:
    """Open model and data in a process of the app, and download the weights of a model of the hub.

    Raises InputError if they cannot be used; without a copy of the weights, before the download.
    """
    watched.say("opening the model and the clients' data\n")
    name = str(config["model"])
    if is_on_hub(name):
        if not has_some_weights(name):
            _check_inputs(watched, app, config)
            watched.say(f"downloading the weights of {name}\n")
        download_model(name)
    _check_inputs(watched, app, config)


def _check_inputs(watched: WatchedRun, app: Path, config: dict[str, Any]) -> None:
    lines = _LinesOfCheck(watched.say is not be_silent)
    code = run_in_app(app, BEFORE_START, config, lines.take)
    if code < 0:
        why = (
            "the machine may have too little memory"
            if -code == SIGKILL
            else "a library crashed, for which a damaged file of model or data is the usual reason"
        )
        raise RunError([f"the check of model and data was ended by signal {-code}; {why}"], None)
    if code:
        raise InputError(lines.message())
    lines.show_held()


class _LinesOfCheck:
    """Lines on standard error of the check; the program's last message is held for an error."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._held: list[str] = []

    def take(self, line: str) -> None:
        """Show a line, or hold it if it may belong to the last message."""
        if line.startswith(PREFIX):
            self.show_held()
        if self._held or not self._shown or line.startswith(PREFIX):
            self._held.append(line)
        else:
            _to_stderr(line)

    def show_held(self) -> None:
        """Show the held lines, and hold none."""
        if self._shown:
            _to_stderr("".join(self._held))
        self._held = []

    def message(self) -> str:
        """Return the last message without its prefix; it may have several lines."""
        text = "".join(self._held).removeprefix(PREFIX).strip()
        return text or "the check of model and data failed; the lines above say how"


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _simulate(watched: WatchedRun, app: Path, config: dict[str, Any], federation: str) -> None:
    """Check model and data, run a simulation, and repeat it if Ray did not start.

    The SuperLink starts while model and data are checked.
    """
    for start in range(1, RAY_STARTS + 1):
        with own_superlink() as superlink:
            if start == 1:
                _require_inputs(watched, app, config)
            status, details, log = _run(
                superlink, watched, app, config, "--federation-config", federation
            )
        if status == COMPLETED or FLOWER_REPORTS_IT_TOO in log or not RAY_DID_NOT_START.search(log):
            break
        if start < RAY_STARTS:
            tell(f"Ray did not start; trying again ({start} of {RAY_STARTS - 1})")
    _require_completed(watched, status, details, log)


def _run_whole(
    superlink: SuperLink, watched: WatchedRun, app: Path, config: dict[str, Any]
) -> tuple[str, str, str]:
    """Run on a shared SuperLink.

    If the program was installed only in part, the run is repeated once in a bundle of its own.
    """
    status, details, log = _run(superlink, watched, app, config)
    if status == COMPLETED or not is_incomplete(text := f"{log}\n{details}"):
        return status, details, log
    tell(
        "the run's program was incomplete: another run was installing it, or an"
        " installation was interrupted. Trying again with a new bundle. Other runs need a complete"
        f" bundle: while no run works, remove {where_to_mend(text)}"
    )
    return _run(superlink, watched, unshared_app(app, superlink.folder), config)


def _require_completed(watched: WatchedRun, status: str, details: str, log: str) -> None:
    """Raise RunError for a run that has ended without being completed."""
    if status == COMPLETED:
        return
    parts = [f"the run ended as {status}"]
    if FLOWER_REPORTS_IT_TOO in log:
        raise RunError(parts, watched.path, _reported_reason(log))
    raise RunError([*parts, details, watched.resume_hint()], watched.path)


def _reported_reason(log: str) -> str:
    """Return why the run failed, as the ServerApp reported it in the log."""
    return log.partition(FLOWER_REPORTS_IT_TOO)[0].rpartition(FAILED)[2].strip()


def _run(
    superlink: SuperLink, watched: WatchedRun, app: Path, config: dict[str, Any], *options: str
) -> tuple[str, str, str]:
    """Submit the run, show its log while it works, and return its status, details and log."""
    config_file = superlink.folder / "run-config.toml"
    # The keys are dotted, as Flower makes them from a file with tables.
    config_file.write_text(tomli_w.dumps(config))
    watched.directory = ""
    watched.status = ""
    watched.reason_reported = False
    run_id, interrupted = _submit(superlink, app, config_file, *options)
    lines: list[str] = []
    try:
        if interrupted:
            raise KeyboardInterrupt
        with closing(superlink.stream_log(run_id)) as log:
            for line in log:
                lines.append(line)
                watched.note(line)
                if not watched.reason_reported:
                    watched.say(line)
        while not has_ended((status := superlink.status(run_id))[0]):
            time.sleep(0.2)
        watched.status = status[0]
    except KeyboardInterrupt:
        _break_off(superlink, watched, run_id)
        raise
    return *status, "".join(lines)


def _submit(superlink: SuperLink, app: Path, config_file: Path, *options: str) -> tuple[str, bool]:
    """Submit a run; return its id and whether an interrupt arrived meanwhile.

    An interrupt during the submission would leave a run without a known id, so it is postponed.
    """
    # Our own SuperLink ends with all its runs, so that an interrupt does no harm.
    if superlink.process is not None:
        return superlink.start_run(app, config_file, *options), False
    try:
        with interrupted_later() as noted:
            return superlink.start_run(app, config_file, *options), bool(noted)
    except KeyboardInterrupt:
        print(
            "\nespalier: interrupted before the SuperLink confirmed the run; flwr ls shows its"
            " runs, flwr stop ends one",
            file=sys.stderr,
        )
        raise


def _break_off(superlink: SuperLink, watched: WatchedRun, run_id: str) -> None:
    """Stop a run on a shared SuperLink, unless it has ended; our own ends with all its runs."""
    if superlink.process is not None or watched.status:
        return
    with uninterrupted(), suppress(EspalierError, SuperLinkLost):
        superlink.stop_run(run_id)
        watched.status = superlink.status(run_id)[0]

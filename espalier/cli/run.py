"""``espalier run``: simulate a federation here, or start a run on a SuperLink."""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli_w

from espalier.cli.app_commands import add_root_certificates, add_words
from espalier.errors import FLOWER_REPORTS_IT_TOO, RUN_DIRECTORY, EspalierError, InputError, tell
from espalier.flower.load_faults import is_incomplete, unshared_app, where_to_mend
from espalier.launch.addresses import require_address, warn_of_open_control_api
from espalier.launch.app import find_app, run_in_app
from espalier.launch.child_processes import interrupted_later, take_interrupts, uninterrupted
from espalier.launch.configuration import configuration
from espalier.launch.superlink import (
    RAY_DID_NOT_START,
    SuperLink,
    SuperLinkLost,
    own_superlink,
    running_superlink,
)

BEFORE_START = "server_app.preflight"
"""Module of the app that opens all that a simulation reads."""
RAY_STARTS = 3
"""Maximum number of starts of a simulation, if Ray fails to start."""
COMPLETED = "finished:completed"
NO_RAY = (
    "Ray is not installed here, and simulated clients need it: `pip install -e .` installs it"
    " (README, 'Set up and run'); container images do not contain it. With espalier run --superlink"
    " a run uses the sites that are connected there"
)


@dataclass
class WatchedRun:
    """Run as seen in its log and by its SuperLink."""

    arguments: Sequence[str]
    """Arguments of the command."""
    directory: str = ""
    """Run directory on the SuperLink's machine; empty until the ServerApp has created it."""
    status: str = ""
    """Flower's status; empty until the run has ended."""
    said_why: bool = False
    """True if the ServerApp reported why the run failed."""

    def note(self, line: str) -> None:
        """Process a line of the log."""
        if line.startswith(RUN_DIRECTORY):
            self.directory = line.removeprefix(RUN_DIRECTORY).strip()
        self.said_why = self.said_why or line.startswith(FLOWER_REPORTS_IT_TOO)

    @property
    def completed(self) -> bool:
        """True if the run is completed.

        Flower reports it, or, if the run was stopped before that, the summary in the run directory
        does.
        """
        if self.status == COMPLETED:
            return True
        if not self.directory:
            return False
        try:
            summary = json.loads((Path(self.directory) / "summary.json").read_text())
            return bool(summary["status"] == "completed")
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def how_to_go_on(self) -> str:
        """Return the command that resumes the run, in a message for the user."""
        if not self.directory:
            return "the run had not started; give the same command again"
        words = [word for word in self.arguments if not word.startswith("resume-from=")]
        command = shlex.join(["espalier", *words, f"resume-from={self.directory}"])
        return (
            f"finished rounds are in {self.directory}; to resume after the last one:\n  {command}"
        )


def add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "run",
        help="simulate a federation on this machine, or start a run on a SuperLink",
        epilog=(
            'Presets are the files in conf/ of the app: ls "$(espalier app)/conf". Keys are listed'
            " in docs/settings.md; after an unknown key the command names similar ones."
        ),
    )
    add_words(parser, "a preset in conf/, and settings that differ from it")
    add_gpus(parser)
    parser.add_argument(
        "--superlink",
        metavar="HOST:PORT",
        help="Control API of a running SuperLink; default: a simulation",
    )
    add_root_certificates(parser)
    parser.set_defaults(execute=run)


def add_gpus(parser: argparse.ArgumentParser) -> None:
    """Add ``--gpus-per-client``."""
    parser.add_argument(
        "--gpus-per-client",
        type=float,
        default=0.0,
        help="fraction of a GPU for each simulated client",
    )


def run(given: argparse.Namespace) -> int:
    """Run the app and return the exit code of the command."""
    take_interrupts()
    watched = WatchedRun(given.arguments)
    try:
        if given.superlink is not None:
            require_address(given.superlink)
        app = find_app(given.app)
        config, settings = configuration(app, given.words, on_this_machine=given.superlink is None)
        if given.superlink is not None:
            warn_of_open_control_api(given.superlink)
            with running_superlink(given.superlink, given.root_certificates) as superlink:
                return _report(watched, *_run_whole(superlink, watched, app, config))
        if find_spec("ray") is None:
            # Images for sites have no Ray.
            raise InputError(NO_RAY)
        cpus = min(settings.threads, os.cpu_count() or 1)
        federation = (
            f"num-supernodes={settings.num_clients} client-resources-num-cpus={cpus} "
            f"client-resources-num-gpus={given.gpus_per_client}"
        )
        return _simulate(watched, app, config, federation)
    except SuperLinkLost as lost:
        tell(lost)
        tell(watched.how_to_go_on())
        return 1
    except KeyboardInterrupt:
        if watched.completed:
            return 0
        print(f"\nespalier: interrupted; {watched.how_to_go_on()}", file=sys.stderr)
        return 130


def _refused_before_start(app: Path, config: dict[str, Any]) -> int:
    """Open model and data in a process of the app; return its exit code, 0 if all is well."""
    print("opening the model and the clients' data", flush=True)
    refused = run_in_app(app, BEFORE_START, config)
    if refused < 0:
        tell(
            f"the check of model and data was ended by signal {-refused}; the machine may"
            " have too little memory"
        )
        return 1
    return refused


def _simulate(watched: WatchedRun, app: Path, config: dict[str, Any], federation: str) -> int:
    """Check model and data, run a simulation, and repeat it if Ray did not start.

    The SuperLink starts while model and data are checked.
    """
    for start in range(1, RAY_STARTS + 1):
        with own_superlink() as superlink:
            if start == 1 and (refused := _refused_before_start(app, config)):
                return refused
            status, details, log = _run(
                superlink, watched, app, config, "--federation-config", federation
            )
        if status == COMPLETED or FLOWER_REPORTS_IT_TOO in log or not RAY_DID_NOT_START.search(log):
            break
        if start < RAY_STARTS:
            tell(f"Ray did not start; trying again ({start} of {RAY_STARTS - 1})")
    return _report(watched, status, details, log)


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


def _report(watched: WatchedRun, status: str, details: str, log: str) -> int:
    """Return the exit code of a run that has ended, and print why it failed."""
    if status == COMPLETED:
        return 0
    tell(f"the run ended as {status}")
    if FLOWER_REPORTS_IT_TOO not in log:
        tell(details)
        tell(watched.how_to_go_on())
    return 1


def _run(
    superlink: SuperLink, watched: WatchedRun, app: Path, config: dict[str, Any], *options: str
) -> tuple[str, str, str]:
    """Submit the run, show its log while it works, and return its status, details and log."""
    config_file = superlink.folder / "run-config.toml"
    # The keys are dotted, as Flower makes them from a file with tables.
    config_file.write_text(tomli_w.dumps(config))
    watched.directory = ""
    watched.status = ""
    watched.said_why = False
    run_id, interrupted = _submit(superlink, app, config_file, *options)
    lines: list[str] = []
    try:
        if interrupted:
            raise KeyboardInterrupt
        with closing(superlink.stream_log(run_id)) as log:
            for line in log:
                lines.append(line)
                watched.note(line)
                if not watched.said_why:
                    sys.stdout.write(line)
                    sys.stdout.flush()
        while not (status := superlink.status(run_id))[0].startswith("finished"):
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
            "\nespalier: interrupted before the SuperLink confirmed the run; flwr ls shows its runs,"
            " flwr stop ends one",
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

"""Check that a simulation's SuperLink belongs to the checkout that the run comes from.

``flwr run .`` sends its run to any SuperLink that answers on a fixed port of this machine. It may
belong to another user, or another copy of the project may have started it. The ServerApp then works
in that SuperLink's environment and directory and leaves its results there, and Flower's command
still ends with 0. The ServerApp therefore begins with this check.

Covers: a SuperLink of another user; one of another environment; one that was started in another
checkout; one whose Espalier is another program than the bundle. The submitter is known from the
``flwr run`` process that stays connected to the SuperLink with ``--stream``.

Does not cover: without ``--stream`` the command has already ended, and a SuperLink with exactly the
same program is accepted. Deployments are not checked, because their SuperLink is on another machine
and may belong to another user. A SuperLink is not checked either if its owner has set
``ESPALIER_SHARED_SUPERLINK``.

Only Python's standard library and packages of this app are imported, since the environment may lack
all others. ``espalier.flower.processes`` contains the knowledge about Flower's processes.
"""

import hashlib
import os
import pwd
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from espalier.errors import InputError
from espalier.flower.processes import LocalSuperLink, Submitter, local_superlink, submitters
from espalier.flower.programs import PORT_VARIABLE

SHARED = "ESPALIER_SHARED_SUPERLINK"
"""Environment variable of a SuperLink that permits runs of all users; their results stay there."""
ROOMS = ("client_app", "espalier", "pruning_kernels", "server_app", "strategies")
"""Packages in a bundle."""


@dataclass(frozen=True)
class Surroundings:
    """Environment of this process, inherited from the SuperLink that started it."""

    user: int
    prefix: Path
    """Directory of the Python environment."""
    folder: Path
    """Current directory, to which ``out-dir`` is relative."""
    bundle: Path
    """Directory of the submitted program."""
    installed: Path | None
    """Directory of the Espalier that is installed in the environment; None if there is none."""


def require_own_superlink() -> None:
    """Check this process's SuperLink.

    Raises InputError if it belongs to another user, environment or checkout.
    """
    if os.environ.get(SHARED):
        return
    superlink = local_superlink()
    if superlink is None:
        return
    # Nothing but the standard library is imported up to here.
    here = surroundings()
    if reason := difference(here, superlink, submitters(superlink)):
        raise InputError(_message(reason, here, superlink))


def surroundings() -> Surroundings:
    """Return the environment of this process."""
    # All other packages are in the bundle too, which comes first on the path.
    spec = find_spec("espalier_assets")
    installed = Path(spec.origin).parent.parent if spec is not None and spec.origin else None
    # An installed wheel has the app in a folder of its own.
    if installed is not None and (installed / "espalier_assets" / "app").is_dir():
        installed = installed / "espalier_assets" / "app"
    return Surroundings(
        os.getuid(), Path(sys.prefix), Path.cwd(), Path(__file__).parent.parent, installed
    )


def difference(here: Surroundings, superlink: LocalSuperLink, found: Sequence[Submitter]) -> str:
    """Return a difference between this process and the submitter's, empty if none is known.

    Parameters
    ----------
    here : environment of the process that the SuperLink started
    superlink : the SuperLink itself
    found : users connected to the SuperLink with ``flwr run``; if there are several, one of them
        submitted this run
    """
    # Without an installed Espalier Ray's clients cannot import it.
    if here.installed is None:
        return "no Espalier is installed in its environment"
    others = {submitter.user for submitter in found if submitter.user != here.user}
    same_user = [submitter for submitter in found if submitter.user == here.user]
    if others and not same_user:
        return f"it belongs to {_name(here.user)}, but {_name(min(others))} submitted the run"
    # One match is enough: several may be connected, and only one of them submitted this run.
    reasons = [
        _unlike(here, superlink, submitter) for submitter in same_user if submitter.app is not None
    ]
    if "" in reasons:
        return ""
    return reasons[0] if reasons else _another_program(here)


def _unlike(here: Surroundings, superlink: LocalSuperLink, submitter: Submitter) -> str:
    """Return how a submitter of the same user differs, empty if it does not."""
    environment = submitter.superlink
    # Programs of different environments differ, even if their versions agree.
    if (
        environment is not None
        and superlink.program.is_absolute()
        and not _same(environment, superlink.program)
    ):
        return f"the run comes from the environment of {environment}"
    if (
        _is_checkout(here.folder)
        and submitter.app is not None
        and not _same(here.folder, submitter.app)
    ):
        return f"the run comes from {submitter.app}"
    return ""


def _another_program(here: Surroundings) -> str:
    """Return a difference between programs, used if no submitter is known.

    The current directory matters because Ray's clients import from it.
    """
    # Nobody is connected: compare the programs themselves.
    sent = program_sha256(here.bundle)
    if _is_checkout(here.folder) and program_sha256(here.folder) != sent:
        return "the checkout in which it was started has another program than the run"
    if here.installed is not None and program_sha256(here.installed) != sent:
        return (
            f"the Espalier of its environment ({here.installed}) is another program than the run's"
        )
    return ""


def program_sha256(folder: Path) -> str:
    """Return the hash of names and contents of all Python files of the app in this directory."""
    digest = hashlib.sha256()
    # Names count too: a moved file is another program.
    for file in sorted(file for room in ROOMS for file in (folder / room).rglob("*.py")):
        digest.update(hashlib.sha256(file.relative_to(folder).as_posix().encode()).digest())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _is_checkout(folder: Path) -> bool:
    return all((folder / room / "__init__.py").is_file() for room in ROOMS)


def _same(first: Path, second: Path) -> bool:
    return first.resolve() == second.resolve()


def _name(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"


def _message(reason: str, here: Surroundings, superlink: LocalSuperLink) -> str:
    return (
        f"this SuperLink does not belong to the checkout from which the run comes: {reason}. It"
        f" is process {superlink.pid} of {_name(here.user)}, with the environment {here.prefix},"
        f" started in {here.folder}, where the results would be written. Use `espalier run`,"
        f" which starts its own SuperLink; or set {PORT_VARIABLE} to a free port for `flwr run`;"
        f" or end that SuperLink, if it is yours and no longer needed: kill {superlink.pid}"
    )

"""A check that a simulation's SuperLink belongs to the checkout that the run comes from.

``flwr run .`` hands its run to whatever SuperLink answers on a fixed port of this machine: another user's, or one that another
copy of the project started. The ServerApp then works in that SuperLink's environment and directory, and leaves its results
there, and Flower's command still ends with 0. So the ServerApp begins by comparing.

Covers: a SuperLink of another user; one of another environment; one that was started in another checkout; one whose Espalier is
another program than the bundle. Who submitted the run is learnt from the ``flwr run`` that is connected to the SuperLink, as
``--stream`` keeps it.
Does not cover: without ``--stream`` the command has ended by then, and a SuperLink of the very same program cannot be told
apart. Deployments are not asked: there the SuperLink is another machine, and rightly another user's. A SuperLink whose owner
has set ``ESPALIER_SHARED_SUPERLINK`` is not asked either.

Nothing but Python's own library is imported, since the environment may lack all others. What is known of Flower's processes is
in ``espalier.flower.processes``.
"""

import hashlib
import os
import pwd
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from espalier.flower.processes import LocalSuperLink, Submitter, local_superlink, submitters
from espalier.flower.programs import PORT_VARIABLE
from espalier.settings.mistakes import Mistake

SHARED = "ESPALIER_SHARED_SUPERLINK"
"""Set in a SuperLink's environment, it lets everybody submit runs, whose results lie in its directory."""
ROOMS = ("client_app", "espalier", "pruning_kernels", "server_app", "strategies")
"""Packages that a bundle holds."""


@dataclass(frozen=True)
class Surroundings:
    """Surroundings of this process, which it has from the SuperLink that started it."""

    user: int
    prefix: Path
    """Directory of the Python environment."""
    folder: Path
    """Current directory, from which a relative ``out-dir`` counts."""
    bundle: Path
    """Directory of the program that was submitted."""
    installed: Path | None
    """Directory of the Espalier that is installed in the environment; None: there is none."""


def require_own_superlink() -> None:
    """Check this process's SuperLink.

    Raises
    ------
    Mistake
        It is another user's, environment's or checkout's.
    """
    if os.environ.get(SHARED):
        return
    superlink = local_superlink()
    if superlink is None:
        return
    here = surroundings()
    if reason := difference(here, superlink, submitters(superlink)):
        raise Mistake(_told(reason, here, superlink))


def surroundings() -> Surroundings:
    """Describe this process."""
    # The bundle has the other packages, and comes first on the path.
    spec = find_spec("espalier_assets")
    installed = Path(spec.origin).parent.parent if spec is not None and spec.origin else None
    if installed is not None and (installed / "espalier_assets" / "app").is_dir():
        installed = installed / "espalier_assets" / "app"
    return Surroundings(
        os.getuid(), Path(sys.prefix), Path.cwd(), Path(__file__).parent.parent, installed
    )


def difference(here: Surroundings, superlink: LocalSuperLink, found: Sequence[Submitter]) -> str:
    """Return what of this process is not the submitter's; empty if nothing is known to differ.

    Parameters
    ----------
    here : the process that the SuperLink started
    superlink : the SuperLink itself
    found : who is connected to the SuperLink with ``flwr run``; several may be, one of them has submitted this run
    """
    if here.installed is None:
        return "no Espalier is installed in its environment"
    others = {one.user for one in found if one.user != here.user}
    own = [one for one in found if one.user == here.user]
    if others and not own:
        return f"it belongs to {_name(here.user)}, and {_name(min(others))} submitted the run"
    reasons = [_unlike(here, superlink, one) for one in own if one.app is not None]
    if "" in reasons:
        return ""
    return reasons[0] if reasons else _another_program(here)


def _unlike(here: Surroundings, superlink: LocalSuperLink, submitter: Submitter) -> str:
    """Return how the surroundings of a submitter of the same user differ; empty if they agree."""
    own = submitter.superlink
    if own is not None and superlink.program.is_absolute() and not _same(own, superlink.program):
        return f"the run comes from the environment of {own}"
    if (
        _is_checkout(here.folder)
        and submitter.app is not None
        and not _same(here.folder, submitter.app)
    ):
        return f"the run comes from {submitter.app}"
    return ""


def _another_program(here: Surroundings) -> str:
    """Compare programs if no submitter is known; Ray's clients import from the current directory."""
    sent = program_sha256(here.bundle)
    if _is_checkout(here.folder) and program_sha256(here.folder) != sent:
        return "the checkout in which it was started has another program than the run"
    if here.installed is not None and program_sha256(here.installed) != sent:
        return (
            f"the Espalier of its environment ({here.installed}) is another program than the run's"
        )
    return ""


def program_sha256(folder: Path) -> str:
    """Hash names and bytes of all Python files of the app in this directory."""
    digest = hashlib.sha256()
    for file in sorted(file for room in ROOMS for file in (folder / room).rglob("*.py")):
        digest.update(hashlib.sha256(file.relative_to(folder).as_posix().encode()).digest())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _is_checkout(folder: Path) -> bool:
    return all((folder / room / "__init__.py").is_file() for room in ROOMS)


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _name(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"


def _told(reason: str, here: Surroundings, superlink: LocalSuperLink) -> str:
    return (
        f"this SuperLink is not of the checkout that the run comes from: {reason}. It is process"
        f" {superlink.pid} of {_name(here.user)}, with the environment {here.prefix}, started in"
        f" {here.folder}, where the results would lie. Use `espalier run`, which starts a SuperLink"
        f" of its own; or set {PORT_VARIABLE} to a free port for `flwr run`; or end that SuperLink,"
        f" if it is yours and no longer needed: kill {superlink.pid}"
    )

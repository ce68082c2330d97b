"""Flower's processes on this machine: the SuperLink that started this one, and its submitters.

The information comes from ``/proc`` on Linux. It has the command line of every process and the user
of every connection, and for processes of the same user also the directory, the environment and the
sockets. On other systems nothing is found.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from espalier.environment.tcp_sockets import ESTABLISHED, tcp_sockets
from espalier.flower.programs import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    HOST,
    PORT,
    SUPERLINK,
    value_of,
)
from espalier.flower.run_command import PROGRAM

LOOPBACK = ("127.0.0.1", "localhost", "::1")
OPTIONS_WITH_VALUE = ("--run-config", "-c", "--federation-config", "--federation", "--format")
"""Options of ``flwr run`` that take a value."""

PROC = Path("/proc")
LOOPBACK_ENDS = ("0100007F", "01000000")
"""Ends of loopback addresses in the connection tables: 127.0.0.1, its IPv6 form, and ::1."""


@dataclass(frozen=True)
class LocalSuperLink:
    """SuperLink that listens only on the loopback address."""

    pid: int
    port: int
    """Port of its Control API."""
    program: Path
    """Executable that runs it."""


@dataclass(frozen=True)
class Submitter:
    """Process with a connection to a SuperLink's Control API."""

    user: int
    app: Path | None = None
    """Directory of the app that its ``flwr run`` names; None if unknown.

    It is unknown for processes of other users.
    """
    superlink: Path | None = None
    """Path of ``flower-superlink`` in its environment; None if unknown."""


def local_superlink() -> LocalSuperLink | None:
    """Return the SuperLink among the ancestors of this process.

    The result is None without such a SuperLink, or if it also listens to other machines.
    """
    pid = os.getpid()
    # Walk up the process tree until a SuperLink is found.
    while pid > 1:
        args = _words(pid)
        for arg in args[:2]:
            if Path(arg).name == SUPERLINK:
                host = value_of(HOST, args) or DEFAULT_HOST
                port = value_of(PORT, args) or DEFAULT_PORT
                if host in LOOPBACK and port.isdigit():
                    return LocalSuperLink(pid, int(port), Path(arg))
                return None
        pid = _parent(pid)
    return None


def submitters(superlink: LocalSuperLink) -> list[Submitter]:
    """Return the processes that are connected to a SuperLink's Control API."""
    connections = dict(_connections(superlink.port))
    # Another user's connection shows only that somebody else uses the SuperLink.
    other_users = {user: Submitter(user) for user in connections.values() if user != os.getuid()}
    return [*other_users.values(), *_own_commands(set(connections))]


def _own_commands(inodes: set[str]) -> Iterator[Submitter]:
    """Yield the ``flwr run`` processes of this user that have one of these sockets open."""
    for entry in PROC.glob("[0-9]*"):
        args = _words(int(entry.name))
        # ``flwr`` may be started by a Python interpreter, so the first two words are compared.
        if PROGRAM not in [Path(arg).name for arg in args[:2]] or "run" not in args:
            continue
        # The process may have ended, or belong to another user.
        with suppress(OSError):
            if inodes.isdisjoint(_sockets(entry)):
                continue
            folder = (entry / "cwd").resolve(strict=True)
            yield Submitter(os.getuid(), _app_of(args, folder), _superlink_of(entry, args))


def _app_of(args: Sequence[str], folder: Path) -> Path | None:
    """Return the directory given to ``flwr run``; None for an app from another source."""
    remaining = list(args[args.index("run") + 1 :])
    app = "."
    # The first word that is neither an option nor its value.
    while remaining:
        arg = remaining.pop(0)
        if arg in OPTIONS_WITH_VALUE:
            remaining = remaining[1:]
        elif not arg.startswith("-"):
            app = arg
            break
    return None if app.startswith("@") else (folder / Path(app).expanduser()).resolve()


def _superlink_of(entry: Path, args: Sequence[str]) -> Path | None:
    """Return the ``flower-superlink`` that this ``flwr`` would start; None if there is none."""
    # ``flwr`` starts the SuperLink that is installed next to it, else the one on its PATH.
    installed = next(Path(arg) for arg in args[:2] if Path(arg).name == PROGRAM).with_name(
        SUPERLINK
    )
    if installed.is_absolute() and installed.exists():
        return installed
    variables = dict(
        line.split("=", 1) for line in (entry / "environ").read_text().split("\0") if "=" in line
    )
    program = shutil.which(SUPERLINK, path=variables.get("PATH", ""))
    return Path(program) if program else None


def _connections(port: int) -> Iterator[tuple[str, int]]:
    """Yield (inode, user) of each established connection to a loopback port, client side."""
    for socket in tcp_sockets(ESTABLISHED):
        if socket.remote_port == port and socket.remote_address.endswith(LOOPBACK_ENDS):
            yield socket.inode, socket.user


def _sockets(entry: Path) -> set[str]:
    inodes = set()
    for descriptor in (entry / "fd").iterdir():
        with suppress(OSError):
            if (name := os.readlink(descriptor)).startswith("socket:["):
                inodes.add(name[len("socket:[") : -1])
    return inodes


def _words(pid: int) -> list[str]:
    try:
        line = (PROC / str(pid) / "cmdline").read_text(errors="replace")
    except OSError:
        return []
    return line.rstrip("\0").split("\0")


def _parent(pid: int) -> int:
    try:
        # The name in parentheses may contain blanks, so the text after the last one is split.
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0

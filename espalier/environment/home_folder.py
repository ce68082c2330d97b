"""Expansion of paths that begin with ``~``."""

from pathlib import Path

from espalier.errors import InputError


def at_home(path: str) -> Path:
    """Return a path with ``~`` or ``~user`` replaced by the home directory.

    Raises
    ------
    InputError
        No such user has a home directory on this machine.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        who = Path(path).parts[0]
        raise InputError(
            f"{path!r}: {who} has no home directory on this machine; write an absolute path"
        ) from None

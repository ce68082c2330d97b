"""Paths that begin with ``~``."""

from pathlib import Path

from espalier.settings.mistakes import Mistake


def at_home(path: str) -> Path:
    """A path with the home directory that ``~`` or ``~somebody`` stands for.

    Raises
    ------
    Mistake
        Nobody of that name has a home directory on this machine.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        who = Path(path).parts[0]
        raise Mistake(
            f"{path!r}: {who} has no home directory on this machine; write the path from / on"
        ) from None

"""Paths in settings: ``~``, and Hugging Face names that are given in place of a path."""

import re
from pathlib import Path

from espalier.errors import InputError


def at_home(path: str) -> Path:
    """Return a path with the home directory for ``~``; raise InputError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise InputError(
            f"{path!r}: {user} has no home directory on this machine; write an absolute path"
        ) from None


DEMO = "demo"
"""Name of the model that is installed with Espalier."""
OF_A_DATASET = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def require_model(name: str) -> None:
    """Refuse an address, and a name without a slash if no such directory exists.

    InputError explains how to name a model of the hub.
    """
    if "://" in name:
        raise InputError(
            f"model = {name!r}: is an address; name a directory, or a model of the Hugging Face hub"
            " as OWNER/NAME[@REVISION]"
        )
    if name != DEMO and re.fullmatch(r"[\w-][\w.-]*", name) and not Path(name).exists():
        raise InputError(
            f"model = {name!r}: there is no directory {Path(name).absolute()}. If this is a model"
            f" of the Hugging Face hub, name it with its owner (model=OWNER/{name})"
        )


def is_dataset_name(path: str) -> bool:
    """Return whether a text can be the name of a dataset on the hub, and is no local path."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None and not Path(path).exists()


def require_data(source: str, path: str) -> None:
    """Refuse an address, and ``owner/name`` as the path of a file that does not exist.

    InputError explains how to use a dataset of the hub.
    """
    if "://" in path:
        raise InputError(
            f"data.path = {path!r}: is an address; download the data and name the file, or name a"
            " dataset of the Hugging Face hub as OWNER/NAME with data.source = 'hub'"
        )
    if source == "files" and OF_A_DATASET.fullmatch(path) and not Path(path).exists():
        raise InputError(
            f"data.path = {path!r}: there is no file or directory {Path(path).absolute()}, but"
            f" data.source = {source!r} needs one. If this is the name of a dataset on the"
            " Hugging Face hub, set data.source = 'hub'"
        )

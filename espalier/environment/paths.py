"""Paths in settings: ``~``, and Hugging Face names that are given in place of a path."""

import re
from pathlib import Path

from espalier.errors import InputError


def at_home(path: str) -> Path:
    """Return a path with the home directory for ``~``; raise InputError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        who = Path(path).parts[0]
        raise InputError(
            f"{path!r}: {who} has no home directory on this machine; write an absolute path"
        ) from None


DEMO = "demo"
"""Name of the model that is installed with Espalier."""
OF_A_MODEL = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
"""Pattern of a model's name; some old models, such as ``gpt2``, have no owner."""
OF_A_DATASET = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def require_model(name: str) -> None:
    """Refuse a model's hub name if no such directory exists; models are only read from disk.

    InputError explains how to download the model.
    """
    if name != DEMO and OF_A_MODEL.fullmatch(name) and not Path(name).exists():
        folder = name.rpartition("/")[2]
        raise InputError(
            f"model = {name!r}: there is no directory {Path(name).absolute()}. If this is the"
            f" name of a model on the Hugging Face hub, download it first (hf download {name}"
            f" --local-dir {folder}) and name its directory (model={folder})"
        )


def require_data(source: str, path: str) -> None:
    """Refuse ``owner/name`` as the path of a file that does not exist.

    InputError explains how to use a dataset of the hub.
    """
    if source == "files" and OF_A_DATASET.fullmatch(path) and not Path(path).exists():
        raise InputError(
            f"data.path = {path!r}: there is no file or directory {Path(path).absolute()}, but"
            f" data.source = {source!r} needs one. If this is the name of a dataset on the"
            " Hugging Face hub, set data.source = 'hub'"
        )

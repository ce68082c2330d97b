"""What is often given where a directory or file is meant: the name of a model or dataset on the Hugging Face hub."""

import re
from pathlib import Path

from espalier.settings.mistakes import Mistake

DEMO = "demo"
"""The model that is installed with Espalier."""
OF_A_MODEL = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
"""Some old models have no owner: ``gpt2``."""
OF_A_DATASET = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def require_model(name: str) -> None:
    """Refuse a name where there is no such directory: models are read from disk, never fetched.

    Raises
    ------
    Mistake
        It says how such a model is downloaded.
    """
    if name != DEMO and OF_A_MODEL.fullmatch(name) and not Path(name).exists():
        folder = name.rpartition("/")[2]
        raise Mistake(
            f"model = {name!r}: there is no directory {Path(name).absolute()}. If it is the name of"
            f" a model on the Hugging Face hub, download it first (hf download {name} --local-dir"
            f" {folder}) and give its directory (model={folder})"
        )


def require_data(source: str, path: str) -> None:
    """Refuse ``owner/name`` as the path of a file that does not exist.

    Raises
    ------
    Mistake
        It says how a dataset of the hub is asked for.
    """
    if source in ("text", "jsonl") and OF_A_DATASET.fullmatch(path) and not Path(path).exists():
        raise Mistake(
            f"data.path = {path!r}: there is no file or directory {Path(path).absolute()}, and"
            f" data.source = {source!r} reads one. If it is the name of a dataset on the Hugging"
            " Face hub, set data.source = 'hub'"
        )

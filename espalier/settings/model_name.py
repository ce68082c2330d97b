"""Names of models: ``demo``, a directory, and what is often taken for one, the name of a model on the Hugging Face hub."""

import re
from pathlib import Path

from espalier.settings.mistakes import Mistake

OWNER_AND_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def require_on_disk(name: str) -> None:
    """Refuse ``owner/name`` where there is no such directory: models are read from disk, never fetched.

    Raises
    ------
    Mistake
        It says how such a model is downloaded.
    """
    if OWNER_AND_NAME.fullmatch(name) and not Path(name).exists():
        folder = name.rpartition("/")[2]
        raise Mistake(
            f"model = {name!r}: there is no directory {Path(name).absolute()}. If it is the name of a model on the Hugging "
            f"Face hub, download it first (hf download {name} --local-dir {folder}) and give its directory (model={folder})"
        )

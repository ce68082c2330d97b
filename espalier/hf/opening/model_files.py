"""Files of a model directory that belong to the model, in addition to its weights; and its name."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.environment.hub_models import FURTHER_TEMPLATES, KNOWN

LICENCE = re.compile(
    r"(licen[cs]e([-_](apache|mit|bsd|code|model|agreement)([-_]?[0-9.]*[0-9])?)?"
    r"|notice|copying|(acceptable[-_])?use[-_]policy)"
    r"(\.(txt|md|rst|pdf))?",
    re.IGNORECASE,
)
"""Complete names of licence files; other names that begin with these words may be private files."""

ON_THE_HUB = r"([\w.-]+/)?[\w.-]+"
"""Pattern of a model's name on the Hugging Face hub; a few old models have no owner."""


def copy_other_files(source: Path, target: Path, left_out: tuple[str, ...] = ()) -> None:
    """Copy the files that belong to a model, except its weights.

    These are configuration, tokenizer, chat templates and licence. Other files are not copied:
    notes, texts and training data must not be passed on by accident, and a model card describes the
    original model.

    Parameters
    ----------
    source, target : directories
    left_out : names of files that are not copied
    """
    # Only known names: other files may be private.
    for file in other_files(source, left_out):
        shutil.copyfile(file, target / file.name)
    for file in sorted((source / FURTHER_TEMPLATES).glob("*.jinja")):
        (target / FURTHER_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(file, target / FURTHER_TEMPLATES / file.name)


def other_files(source: Path, left_out: tuple[str, ...] = ()) -> list[Path]:
    """Return the files that belong to a model, sorted by name.

    Weights and further chat templates are not included.
    """
    return [
        file
        for file in sorted(source.iterdir())
        if file.is_file()
        and file.name not in left_out
        and (file.name in KNOWN or LICENCE.fullmatch(file.name))
    ]


def public_name(directory: Path, config: Mapping[str, Any]) -> str:
    """Return the name by which others know a model, never a local path.

    The result is ``owner/name`` on the Hugging Face hub if that is known: from a snapshot directory
    in the hub's cache, or from ``config.json`` if it names a model like the directory.
    ``config.json`` is not sufficient on its own, because tuned models often still name the model
    they were made from. Otherwise the result is the name of the directory.
    """
    # Directory of a model in the hub's cache: ``models--owner--name``.
    cached = "/".join(directory.parent.parent.name.split("--")[1:])
    if commit_of(directory) and re.fullmatch(ON_THE_HUB, cached):
        return cached
    name = str(config.get("_name_or_path"))
    # A tuned model often names its base here, so the name of the directory must agree.
    if re.fullmatch(ON_THE_HUB, name) and name.split("/")[-1] == directory.name:
        return name
    return directory.name


def loadable_name(directory: Path, config: Mapping[str, Any]) -> str:
    """Return the name by which ``from_pretrained`` finds a model from any working directory.

    The result is ``owner/name`` for a snapshot in the hub's cache, together with ``commit_of``, and
    otherwise the absolute path of the directory, which only this machine knows.
    """
    is_snapshot = commit_of(directory) is not None
    return public_name(directory, config) if is_snapshot else str(directory.absolute())


def commit_of(directory: Path) -> str | None:
    """Return the commit of a model in the hub's cache; None for another directory."""
    # The cache has directories such as models--owner--name/snapshots/<commit>.
    kind = directory.parent.parent.name.split("--")[0]
    return directory.name if directory.parent.name == "snapshots" and kind == "models" else None

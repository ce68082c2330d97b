"""Which files of a model's directory belong to the model, beside its weights, and what the model is called."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.hf.files.checkpoint import INDEX

KNOWN = {
    "config.json",
    "structure.json",
    "modeling_structured.py",
    "modeling_sliced.py",
    "generation_config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
}
"""Configuration, tokenizers and chat template, as transformers names them, and what a smaller model has beside them."""

LICENCE = re.compile(
    r"(licen[cs]e([-_](apache|mit|bsd|code|model|agreement)([-_]?[0-9.]*[0-9])?)?|notice|copying|(acceptable[-_])?use[-_]policy)"
    r"(\.(txt|md|rst|pdf))?",
    re.IGNORECASE,
)
"""Names of licences in full: whatever else begins with these words is somebody's own."""

ON_THE_HUB = r"([\w.-]+/)?[\w.-]+"
"""Owner and name of a model there; a few old ones have no owner."""

CHAT_TEMPLATES = "additional_chat_templates"
"""Directory of further chat templates, ``*.jinja``."""


def copy_beside(source: Path, target: Path, left_out: tuple[str, ...] = ()) -> None:
    """Copy what belongs to a model but for its weights: configuration, tokenizer, chat templates, licence.

    Whatever else lies in the directory stays there: notes, texts and training data are no part of what is passed on, and a card
    is about the model as it was.
    """
    for file in beside(source, left_out):
        shutil.copyfile(file, target / file.name)
    for file in sorted((source / CHAT_TEMPLATES).glob("*.jinja")):
        (target / CHAT_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(file, target / CHAT_TEMPLATES / file.name)


def beside(source: Path, left_out: tuple[str, ...] = ()) -> list[Path]:
    """The files of a directory that belong to a model but for its weights and further chat templates, by name."""
    return [
        file
        for file in sorted(source.iterdir())
        if file.is_file() and file.name not in left_out and _belongs(file)
    ]


def _belongs(file: Path) -> bool:
    return file.name in KNOWN or LICENCE.fullmatch(file.name) is not None


def public_name(directory: Path, config: Mapping[str, Any]) -> str:
    """What others call a model, never a path of this machine: ``owner/name`` on the Hugging Face hub where that is known.

    It is known of a snapshot in the hub's cache, and where ``config.json`` names a model like the directory. ``config.json``
    alone is not believed: a model that was tuned often still names the one that it was made from.
    """
    kind, *parts = directory.parent.parent.name.split("--")
    if (
        directory.parent.name == "snapshots"
        and kind == "models"
        and re.fullmatch(ON_THE_HUB, cached := "/".join(parts))
    ):
        return cached
    named = config.get("_name_or_path")
    if (
        isinstance(named, str)
        and re.fullmatch(ON_THE_HUB, named)
        and named.split("/")[-1] == directory.name
    ):
        return named
    return directory.name

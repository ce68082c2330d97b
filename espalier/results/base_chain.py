"""Chain of models from which a result was made, down to a model that no run made.

A run may tune what another run pruned. Each link of the chain is a base model, with the run that
made it. The chain is in ``summary.json`` under ``base``, the direct base first. An export has it in
``espalier.json``, without local paths, so that a run on the export continues the chain.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import read_json_object
from espalier.environment.json_form import Form, require_form
from espalier.errors import EspalierError
from espalier.hf.opening.model_files import commit_of, loadable_name, public_name
from espalier.hf.opening.opened_model import OpenedModel
from espalier.storage.atomic import write_json

KEY = "base"
"""Key of ``summary.json`` with the chain."""
RUN_FILES = ("summary.json", "settings.toml")
"""Files by which a run directory is recognised."""


EXPORT_FILE = "espalier.json"
"""File of an exported model: the hash of the model, the run that made it, and the chain."""


@dataclass(frozen=True)
class Base:
    """One link of a chain: a model, and the run that made it."""

    model: str
    """Name of the model without a local path."""
    revision: str | None
    """Commit on the Hugging Face hub; None for a local model."""
    sha256: str
    """Hash of its weights and tokenizer."""
    path: str
    """Name for ``from_pretrained``: ``owner/name`` on the hub, otherwise an absolute path."""
    run: str | None = None
    """Absolute path of the directory of the run that made it; None if no run did.

    Only its name if the model was exported.
    """
    method: str | None = None
    """Method of that run."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def run_of(directory: Path) -> Path | None:
    """Return the run directory in which a result lies, directly or in ``clients/``, or None."""
    for folder in list(directory.absolute().parents)[:2]:
        if all((folder / name).is_file() for name in RUN_FILES):
            return folder
    return None


def model_name(model: OpenedModel) -> str:
    """Return the name of a model in tables and cards, without a local path.

    That of a run's result is the name of its base model with the method, ``demo, flap``, because
    the directories of all results are called alike; a client's own model has the client too.
    """
    run = run_of(model.directory)
    summary = _summary(run)
    base, method = summary.get("model"), summary.get("method")
    if not base or not method:
        return public_name(model.directory, model.config)
    is_clients = model.directory.absolute().parent != run
    return ", ".join([str(base), str(method), *([model.directory.name] if is_clients else [])])


def chain_of(model: OpenedModel) -> list[Base]:
    """Return the chain of a run's base model: the model itself, and what it was made from.

    A run directory that cannot be read ends the chain.
    """
    directory = model.directory
    run = run_of(directory)
    summary = _summary(run)
    if run is None and (exported := _exported(model)):
        return exported
    own = Base(
        model_name(model),
        commit_of(directory),
        model.sha256,
        loadable_name(directory, model.config),
        str(run) if summary else None,
        summary.get("method"),
    )
    return [own, *read_chain(summary.get(KEY) or ())]


def title_of(chain: Sequence[Base]) -> str:
    """Return what tables call the base of a run; one that another run made is not dense."""
    if not chain or chain[0].run is None:
        return "dense"
    return f"base ({chain[0].method})"


def write_chain(directory: Path, model_sha256: str, run: str, made: Mapping[str, Any]) -> None:
    """Write the chain of a result into its export.

    Parameters
    ----------
    directory : directory of the export
    model_sha256 : hash of the exported model
    run : name of the run that made it
    made : contents of the run's ``summary.json``
    """
    links = [_without_paths(link).to_json() for link in read_chain(made.get(KEY) or ())]
    document = {"sha256": model_sha256, "run": run, "method": made.get("method"), KEY: links}
    write_json(directory / EXPORT_FILE, document)


def _without_paths(link: Base) -> Base:
    run = None if link.run is None else Path(link.run).name
    return replace(link, path=link.model, run=run)


def _exported(model: OpenedModel) -> list[Base]:
    """Return the chain of an exported model; empty without one, or if the model was changed."""
    file = model.directory / EXPORT_FILE
    if not file.is_file():
        return []
    document = read_json_object(file)
    require_form(_Export, document, str(file), "restore it, or remove it to begin a new chain")
    if document["sha256"] != model.sha256:
        return []
    own = Base(
        public_name(model.directory, model.config),
        commit_of(model.directory),
        model.sha256,
        loadable_name(model.directory, model.config),
        document["run"],
        document["method"],
    )
    return [own, *read_chain(document[KEY])]


class _Link(Form):
    model: str
    revision: str | None
    sha256: str
    path: str
    run: str | None = None
    method: str | None = None


class _Export(Form):
    sha256: str
    run: str
    method: str
    base: list[_Link]


def _summary(run: Path | None) -> Mapping[str, Any]:
    if run is None:
        return {}
    try:
        return read_json_object(run / RUN_FILES[0])
    except EspalierError:
        return {}


def read_chain(links: Sequence[Mapping[str, Any]]) -> list[Base]:
    """Return a chain from its JSON form; unknown keys are ignored."""
    return [
        Base(*(link.get(key) for key in Base.__dataclass_fields__))  # type: ignore[arg-type]
        for link in links
    ]


def printable(name: str) -> str:
    """Return the name of a model for Markdown, with ``_`` for characters that would be markup."""
    return re.sub(r"[^\w.,/ -]", "_", name)


def in_words(chain: Sequence[Base]) -> str:
    """Return a chain as a line of Markdown, without local paths; empty if no run made the base."""
    if not chain or chain[0].run is None:
        return ""
    parts = []
    for base in reversed(chain):
        made = (
            f"`{base.method}` in run `{Path(base.run).name}`"
            if base.run is not None
            else f"`{printable(base.model)}`"
        )
        commit = f" at commit `{base.revision}`" if base.revision else ""
        parts.append(f"{made}{commit} (SHA-256 `{base.sha256}`)")
    return ", then ".join(parts)

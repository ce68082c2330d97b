"""Models that a run directory offers: its result, the clients' models, and the base model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.environment.hub_models import download_model, is_on_hub
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError, tell
from espalier.hf.opening.opened_model import OpenedModel, open_model, opened_in
from espalier.results.base_chain import Base, read_chain
from espalier.results.finished_run import FinishedRun, open_run
from espalier.results.model_chain import has_original_base, moved_base, runs_behind
from espalier.results.run_status import COMPLETED, run_status

if TYPE_CHECKING:
    from torch import Tensor

    from espalier.hf.export.peft_files import Adapted
    from espalier.hf.stream.edits import Edits

RESULT = "result"
"""Name of the federated result."""
BASE = "base"
"""Name of the base model."""
ORIGINAL = "original"
"""Name of the model with which a chain of runs began."""


@dataclass(frozen=True)
class Source:
    """Files of one model: a directory, and possibly an adapter over it.

    Parameters
    ----------
    name : ``result``, ``base``, ``original``, or the name of a client
    directory : directory of the model, in Hugging Face format
    adapter : directory of the adapter, in PEFT's format; None if there is none
    run : run that made it; None for the base model, or a model directory
    """

    name: str
    directory: Path
    adapter: Path | None = None
    run: FinishedRun | None = None

    @cached_property
    def model(self) -> OpenedModel:
        """The model, or the base model of the adapter."""
        return opened_in(self.directory)

    @property
    def folder(self) -> Path:
        """Directory of the result, with its card."""
        return self.adapter or self.directory

    @property
    def title(self) -> str:
        """Name for files and cards, without a local path."""
        return self.folder.name if self.run is None else self.run.name

    @property
    def chain(self) -> list[Base]:
        """Models from which the result was made, the direct base first."""
        return [] if self.run is None else read_chain(self.run.summary.get("base") or ())

    @cached_property
    def adapted(self) -> "Adapted":
        """Factors of the adapter, by block and matrix.

        Raises InputError if there is none, or it trains more than LoRA matrices.
        """
        # The report also imports this module, and it works without torch.
        from espalier.hf.export.peft_files import read_adapter

        return read_adapter(self.folder, self.model)

    @property
    def head(self) -> "dict[str, Tensor]":
        """Tensors of an encoder's classification head by canonical name, from the adapter."""
        from espalier.hf.export.peft_files import read_head

        return read_head(self.folder, self.model)

    @property
    def edits(self) -> "Edits":
        """Edits that merge the adapter; none for a model."""
        from espalier.hf.export.peft_files import edits_of
        from espalier.hf.stream.edits import dense

        return dense if self.adapter is None else edits_of(self.adapted)


def model_directory(path: str) -> Source | None:
    """Return the model in a directory that is not a run directory; None if it is another one."""
    folder = at_home(path).absolute()
    is_model = (folder / "config.json").is_file() and not (folder / "summary.json").is_file()
    return Source(RESULT, folder) if is_model else None


def open_source(path: str, *, adapter: bool, client: str, base: str | None = None) -> Source:
    """Open the result of a run, or a model directory.

    Parameters
    ----------
    path : run directory, or model directory
    adapter : take the adapter of a run that also has a merged model
    client : name of a client whose own model is taken; empty for the federated result
    base : name of the base model of an adapter; None takes the one of the run's settings

    Raises
    ------
    InputError
        The directory is neither, the run did not complete, or it has no such result; or its base
        model has changed.
    """
    if (model := model_directory(path)) is not None:
        if adapter or client or base:
            raise InputError(
                f"{path}: is a model directory; --adapter, --client and --base need a run"
            )
        return model
    run = open_run(path)
    status, reason = run_status(run.path)
    if status != COMPLETED:
        told = f" ({reason})" if reason else ""
        raise InputError(
            f"{path}: the run is {status}{told}; only results of completed runs are exported"
        )
    if client:
        return client_of(run, client)
    if run.model is not None and not adapter:
        if base:
            require_adapter_for_base(run, base, "--base")
        return result_of(run)
    # The base may have left the hub's cache since the run.
    name = base if base is not None else str(run.setting("model"))
    if run.adapter is not None and is_on_hub(name):
        download_model(name)
    return adapter_of(run, base, same=True) if adapter else result_of(run, base, same=True)


def result_of(run: FinishedRun, base: str | None = None, *, same: bool = False) -> Source:
    """Return the federated result: a model, or an adapter over the base model.

    Parameters
    ----------
    base : name of the base model; None takes the one of the run's settings
    same : require the hash of the base model that the run recorded, which a named one must always
        have

    Raises
    ------
    InputError
        The run has no such result, or each of its clients has its own; or the base model is not
        there any more, or is another one.
    """
    if run.model is not None:
        return Source(RESULT, run.model, run=run)
    if clients := run.client_models:
        raise InputError(
            f"{run.path}: each client has its own model; name one with --client (in Python:"
            f" client=): {', '.join(clients)}"
        )
    if run.adapter is None:
        status, _ = run_status(run.path)
        raise InputError(
            f"{run.path}: has neither model/config.json nor adapter/adapter_config.json (its status"
            f" is {status!r}); name a completed run that wrote one"
        )
    return adapter_of(run, base, same=same)


def require_adapter_for_base(run: FinishedRun, base: str, option: str) -> None:
    """Raise InputError if a base model is named and the result is a whole model."""
    if run.model is not None or run.client_models:
        raise InputError(
            f"{option} {base}: the result of {run.path} is a whole model; leave it out"
        )


def adapter_of(run: FinishedRun, base: str | None = None, *, same: bool = False) -> Source:
    """Return the federated adapter over the base model; parameters and errors as ``result_of``."""
    if run.adapter is None:
        raise InputError(
            f"{run.path}: has no adapter/; take the model of the run: leave out --adapter (in"
            " Python: model())"
        )
    return Source(RESULT, base_of(run, base, same=same).directory, run.adapter, run)


def base_model_of(run: FinishedRun, base: str | None = None, *, same: bool = False) -> Source:
    """Return the base model; parameters and errors as for ``result_of``."""
    return Source(BASE, base_of(run, base, same=same).directory)


def client_of(run: FinishedRun, name: str) -> Source:
    """Return the model of a client, given by its number or by the name of its site.

    Raises InputError if the run has no model of this client.
    """
    models = run.client_models
    names = [
        str(entry.get("site"))
        for entry in run.summary.get("clients", ())
        if str(entry.get("client")) == name
    ]
    for known in (name, *names):
        if known in models:
            return Source(known, models[known], run=run)
    there = f"has models of {', '.join(models)}" if models else "has no models of single clients"
    raise InputError(f"{run.path}: has no model of client {name!r}; it {there}")


def sources_of(
    run: FinishedRun, clients: Sequence[str], *, with_base: bool, base: str | None = None
) -> list[Source]:
    """Return the models to look at: those of ``bases_of``, then the result or clients' models.

    Parameters
    ----------
    clients : clients by number or name; empty takes the result, or the models of all clients if
        each has its own
    with_base : whether base models are among them

    Raises
    ------
    InputError
        As for ``result_of`` and ``client_of``.
    """
    sources = bases_of(run, base) if with_base else []
    if clients:
        return sources + [client_of(run, name) for name in clients]
    if run.model is None and run.client_models:
        return sources + [client_of(run, name) for name in run.client_models]
    return [*sources, result_of(run, base)]


def require_result(run: FinishedRun, clients: Sequence[str]) -> None:
    """Raise InputError if the run lacks the models that ``sources_of`` would return.

    Nothing is opened, and the hub is not asked.
    """
    if clients:
        for name in clients:
            client_of(run, name)
    elif run.adapter is None and not run.client_models:
        result_of(run)


def bases_of(run: FinishedRun, base: str | None = None) -> list[Source]:
    """Return the base model of a run, after the model with which a chain of runs began, if any.

    A line says why the latter is left out if it cannot be opened. Parameters and errors are those
    of ``result_of``.
    """
    own = base_model_of(run, base)
    first = runs_behind(run)[0]
    if not has_original_base(first):
        tell(
            "without the original model: the directory of the run that made the base model of"
            f" {first.name} is not where it was, nor beside it"
        )
        return [own]
    if first.path == run.path:
        return [own]
    try:
        has_hash = "model_sha256" in first.summary
        return [Source(ORIGINAL, base_of(first, same=has_hash).directory), own]
    except EspalierError as error:
        tell(f"without the original model: {error}")
        return [own]


def base_of(run: FinishedRun, base: str | None = None, *, same: bool = False) -> OpenedModel:
    """Return the opened base model of a run; parameters and errors as for ``result_of``."""
    name = base if base is not None else str(run.setting("model"))
    expected = run.summary.get("model_sha256")
    try:
        model = open_model(name)
    except EspalierError as error:
        moved = moved_base(run) if base is None and expected else None
        if moved is None:
            hint = "; --base (in Python: base=) names a copy of it" if base is None else ""
            raise InputError(
                f"{run.path}: its base model cannot be opened: {error}{hint}"
            ) from None
        model, same = open_model(str(moved)), True
    if (same or (base is not None and expected)) and model.sha256 != expected:
        raise InputError(
            f"{model.directory}: does not have the hash that {run.name} recorded for its base model"
            f" ({expected}): it is another model, its files have changed, or another version of"
            " Espalier made the run; name or restore that model, or repeat the run"
        )
    return model


def require_text_model(source: Source) -> None:
    """Raise InputError if a model does not write text, as an encoder."""
    if source.model.family.kind != "decoder":
        raise InputError(
            f"{source.directory}: is an encoder, which classifies texts and writes none; name a"
            " run of a language model"
        )

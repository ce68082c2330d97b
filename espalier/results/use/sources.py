"""Models that a run directory offers: its result, the clients' models, and the base model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.errors import EspalierError, InputError
from espalier.hf.opening.opened import OpenedModel, open_model, opened_in
from espalier.results.finished_run import FinishedRun

RESULT = "result"
"""Name of the federated result."""
BASE = "base"
"""Name of the base model."""


@dataclass(frozen=True)
class Source:
    """Files of one model: a directory, and possibly an adapter over it.

    Parameters
    ----------
    name : ``result``, ``base``, or the name of a client
    directory : directory of the model, in Hugging Face format
    adapter : directory of the adapter, in PEFT's format; None if there is none
    """

    name: str
    directory: Path
    adapter: Path | None = None


def result_of(run: FinishedRun, base: str | None = None) -> Source:
    """Return the federated result: a model, or an adapter over the base model.

    Parameters
    ----------
    base : name of the base model; None takes the one of the run's settings

    Raises
    ------
    InputError
        The run has no such result, or each of its clients has its own; or the base model is not
        there any more.
    """
    if run.model is not None:
        return Source(RESULT, run.model)
    if clients := run.client_models:
        raise InputError(
            f"{run.path}: each client has its own model; name one of {', '.join(clients)}"
        )
    return adapter_of(run, base)


def adapter_of(run: FinishedRun, base: str | None = None) -> Source:
    """Return the federated adapter over the base model; parameters as for ``result_of``.

    Raises InputError if the run has no adapter, or the base model is not there any more.
    """
    if run.adapter is None:
        status = run.summary.get("status")
        raise InputError(
            f"{run.path}: has neither model/ nor adapter/ (its status is {status!r}); name a"
            " completed run"
        )
    return Source(RESULT, base_of(run, base).directory, run.adapter)


def base_model_of(run: FinishedRun, base: str | None = None) -> Source:
    """Return the base model; parameters and errors as for ``result_of``."""
    return Source(BASE, base_of(run, base).directory)


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
            return Source(known, models[known])
    there = f"has models of {', '.join(models)}" if models else "has no models of single clients"
    raise InputError(f"{run.path}: has no model of client {name!r}; it {there}")


def sources_of(
    run: FinishedRun, clients: Sequence[str], *, with_base: bool, base: str | None = None
) -> list[Source]:
    """Return the models to look at: the base model first, then the result or clients' models.

    Parameters
    ----------
    clients : clients by number or name; empty takes the result, or the models of all clients if
        each has its own
    with_base : whether the base model is one of them

    Raises
    ------
    InputError
        As for ``result_of`` and ``client_of``.
    """
    found = [base_model_of(run, base)] if with_base else []
    if clients:
        return found + [client_of(run, name) for name in clients]
    if run.model is None and run.client_models:
        return found + [client_of(run, name) for name in run.client_models]
    return [*found, result_of(run, base)]


def base_of(run: FinishedRun, base: str | None) -> OpenedModel:
    """Return the opened base model of a run; parameters and errors as for ``result_of``."""
    name = base if base is not None else str(run.setting("model"))
    try:
        return open_model(name)
    except EspalierError as error:
        hint = "" if base is not None else "; --base (in Python: base=) names a copy of it"
        raise InputError(f"{run.path}: its base model cannot be opened: {error}{hint}") from None


def require_text_model(source: Source) -> None:
    """Raise InputError if a model does not write text, as an encoder."""
    if opened_in(source.directory).family.kind != "decoder":
        raise InputError(
            f"{source.directory}: is an encoder, which classifies texts and writes none; name a"
            " run of a language model"
        )

"""Result to export: a model, or an adapter on its base model."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from espalier.environment.hub_models import download_model, is_on_hub
from espalier.environment.paths import at_home
from espalier.errors import InputError
from espalier.hf.export.peft_files import Adapted, edits_of, read_adapter
from espalier.hf.opening.opened import OpenedModel, open_model, opened_in
from espalier.hf.stream.edits import Edits, dense
from espalier.results.base_chain import Base, read_chain
from espalier.results.finished_run import FinishedRun, open_run


@dataclass(frozen=True)
class Source:
    """Result of a run, or a model directory.

    Parameters
    ----------
    model : the model, or the base model of the adapter
    is_adapter : the result is an adapter
    folder : directory of the result, with its card
    run : run that made it; None for a model directory
    """

    model: OpenedModel
    is_adapter: bool
    folder: Path
    run: FinishedRun | None

    @cached_property
    def adapted(self) -> Adapted:
        """Factors of the adapter, by block and matrix.

        Raises InputError if the adapter trains more than LoRA matrices.
        """
        return read_adapter(self.folder, self.model)

    @property
    def edits(self) -> Edits:
        """Edits that merge the adapter; none for a model."""
        return edits_of(self.adapted) if self.is_adapter else dense

    @property
    def name(self) -> str:
        """Name for files and cards, without a local path."""
        return self.folder.name if self.run is None else self.run.name

    @property
    def chain(self) -> list[Base]:
        """Models from which the result was made, the direct base first."""
        return [] if self.run is None else read_chain(self.run.summary.get("base") or ())


def open_source(path: str, *, adapter: bool, client: str) -> Source:
    """Open the result of a run, or a model directory.

    Parameters
    ----------
    path : run directory, or model directory
    adapter : take the adapter of a run that also has a merged model
    client : name of a client whose own model is taken; empty for the federated result

    Raises
    ------
    InputError
        The directory is neither, the run did not complete, or it has no such result; or its base
        model has changed.
    """
    folder = at_home(path).absolute()
    if not (folder / "summary.json").is_file() and (folder / "config.json").is_file():
        if adapter or client:
            raise InputError(f"{path}: is a model directory; --adapter and --client need a run")
        return Source(opened_in(folder), False, folder, None)
    run = open_run(path)
    if (status := run.summary.get("status")) != "completed":
        raise InputError(
            f"{path}: the run is {status}; only results of completed runs are exported"
        )
    if client:
        return _of_client(run, client)
    if run.model is not None and not adapter:
        return Source(opened_in(run.model), False, run.model, run)
    if run.adapter is None:
        raise InputError(
            f"{path}: the run wrote no {'adapter' if adapter else 'model and no adapter'}"
            + ("; leave out --adapter" if adapter else "")
        )
    model = _base_of(run)
    if model.sha256 != (expected := run.summary.get("model_sha256")):
        raise InputError(
            f"model = {run.setting('model')!r}: has SHA-256 {model.sha256}, and the adapter was"
            f" trained on {expected}; restore the base model"
        )
    return Source(model, True, run.adapter, run)


def _of_client(run: FinishedRun, client: str) -> Source:
    models = run.client_models
    if client not in models:
        names = ", ".join(models) or "none, because its clients have no models of their own"
        raise InputError(f"--client {client}: the run has {names}")
    return Source(opened_in(models[client]), False, models[client], run)


def _base_of(run: FinishedRun) -> OpenedModel:
    name = str(run.setting("model"))
    return open_model(download_model(name) if is_on_hub(name) else name)

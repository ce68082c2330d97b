"""Result of a run, as Python programs use it."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.environment.paths import at_home
from espalier.errors import InputError
from espalier.results.finished_run import FinishedRun, open_run

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from espalier.results.sources import Source


class Result:
    """Result of a run in its directory; files are read and models loaded when they are asked for.

    Parameters
    ----------
    path : run directory
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = at_home(str(path)).absolute()
        """Absolute path of the run directory."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @cached_property
    def run(self) -> FinishedRun:
        """Files of the run directory; reading it raises InputError if this is none."""
        if not self.path.exists():
            raise InputError(
                f"{self.path}: there is no such directory on this machine; if the run worked on a"
                " SuperLink elsewhere, copy the directory from there and pass the copy to"
                " espalier.load_result"
            )
        return open_run(self.path)

    @property
    def summary(self) -> Mapping[str, Any]:
        """Contents of ``summary.json``."""
        return self.run.summary

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the run, by table."""
        return self.run.settings

    @property
    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """Measures with the values of the dense and the federated model and of the baselines."""
        measures: Sequence[Mapping[str, Any]] = self.summary["metrics"]
        return measures

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients that have a model of their own; in most runs none."""
        return tuple(self.run.client_models)

    def model(
        self, client: str | None = None, *, base: str | None = None, device: str = "cpu"
    ) -> "PreTrainedModel | PeftModel":
        """Load the federated model, or the adapter over its base model, for inference.

        Parameters
        ----------
        client : name or number of a client whose own model is wanted; None for the federated model
        base : base model of an adapter, if it is no longer where the run found it
        device : ``cpu``, ``cuda``, or ``auto`` for CUDA if there is a device

        Returns
        -------
        Model of transformers in the number format of its files; a PeftModel for an adapter.

        Raises
        ------
        InputError
            The run has no such model, or its base model is not there any more.
        """
        from espalier.results.use.loading import load_model

        return load_model(self._source(client, base), device)

    def adapter(self, *, base: str | None = None, device: str = "cpu") -> "PeftModel":
        """Load the federated adapter over its base model; arguments and errors as for ``model``."""
        from espalier.results.sources import adapter_of
        from espalier.results.use.loading import load_model

        found: PeftModel = load_model(adapter_of(self.run, base), device)
        return found

    def tokenizer(
        self, client: str | None = None, *, base: str | None = None
    ) -> "PreTrainedTokenizerBase":
        """Load the tokenizer of the model; parameters and errors as for ``model``."""
        from espalier.results.use.loading import load_source_tokenizer

        return load_source_tokenizer(self._source(client, base))

    def report(self, *, measure: bool = False, base: str | None = None) -> Path:
        """Write ``report.html`` into the run directory and return its path.

        With ``measure`` memory and tokens per second of the base model and the results are measured
        first, as ``espalier report --measure`` does; ``base`` is as for ``model``.
        """
        from espalier.results.report.page import FILE, write_report

        if measure:
            from espalier.results import speed

            speed.measure(self.run, base=base)
        path = self.path / FILE
        write_report(self.run, path)
        return path

    def _source(self, client: str | None, base: str | None) -> "Source":
        from espalier.results.sources import client_of, require_adapter_for_base, result_of

        if base is not None:
            require_adapter_for_base(self.run, base, "base =")
        return result_of(self.run, base) if client is None else client_of(self.run, str(client))

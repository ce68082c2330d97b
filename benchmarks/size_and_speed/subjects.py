"""Models to measure: results of runs, or model directories, each with a label."""

from dataclasses import dataclass
from pathlib import Path

from espalier.errors import InputError
from espalier.hf.export.peft_files import WEIGHTS
from espalier.hf.opening.opened_model import OpenedModel, opened_in
from espalier.results.export.transformers_export import export_model
from espalier.results.figures import DENSE, FEDERATED, PERPLEXITY, qualities
from espalier.results.finished_run import FinishedRun
from espalier.results.sources import Source, open_source
from espalier.results.style import METHODS
from espalier.storage.blobs import sha256

HASH_CHARACTERS = 12
"""Number of characters of a hash in the name of a file or folder."""


@dataclass(frozen=True)
class Subject:
    """Model to measure."""

    label: str
    method: str
    """Method that made it smaller; empty if it is not known."""
    model: OpenedModel
    perplexities: dict[str, float]
    """Perplexity by name of the text, as the run measured it; empty for a model directory."""
    dense_perplexities: dict[str, float]
    """The same of the dense model; empty unless the run started from it."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.model.plan.num_parameters

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor in the files, by name."""
        return {name: own.shape for name, own in self.model.checkpoint.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of the files with weights."""
        return sum(file.stat().st_size for file in self.model.directory.glob("*.safetensors"))


def open_dense(directory: str) -> Subject:
    """Open the dense model; InputError if the directory holds none."""
    return Subject("dense", "", opened_in(Path(directory).absolute()), {}, {})


def open_subject(given: str, dense: Subject, work: Path, threads: int) -> Subject:
    """Open ``LABEL=DIRECTORY``, the directory of a run or of a model.

    Parameters
    ----------
    given : text of the command line
    dense : the dense model
    work : folder for a model whose adapter is merged, which is written once
    threads : number of CPU threads for the check of the merged model

    Raises
    ------
    InputError
        The text has another form, or there is no result.
    """
    label, equals, path = given.partition("=")
    if not (label and equals and path) or "/" in label:
        raise InputError(f"--result {given}: write LABEL=DIRECTORY; a label has no '/'")
    source = open_source(path, adapter=False, client="")
    model = _merged(source, work, label, threads) if source.adapter else source.model
    if source.run is None:
        return Subject(label, "", model, {}, {})
    perplexities = dict[str, dict[str, float]]()
    for quality in qualities(source.run):
        for column, value in quality.values.items():
            if quality.metric == PERPLEXITY and value is not None:
                perplexities.setdefault(column, {})[quality.dataset] = value
    return Subject(
        label,
        _method_of(source),
        model,
        perplexities.get(FEDERATED, {}),
        perplexities.get(DENSE, {}) if _started_from(source.run, dense.model) else {},
    )


def _started_from(run: FinishedRun, model: OpenedModel) -> bool:
    """Return whether a model is the base model of a run."""
    # Releases may hash a model in another way, but then its directory tells.
    named = Path(str(run.setting("model")))
    return run.summary.get("model_sha256") == model.sha256 or (
        named.is_dir() and named.samefile(model.directory)
    )


def _merged(source: Source, work: Path, label: str, threads: int) -> OpenedModel:
    """Merge an adapter unless that is done; another adapter or base has another folder."""
    parts = [source.model.sha256, sha256((source.folder / WEIGHTS).read_bytes())]
    target = work / f"{label}-{sha256(''.join(parts).encode())[:HASH_CHARACTERS]}"
    if not target.exists():
        export_model(source, target, "", threads)
    return opened_in(target)


def _method_of(source: Source) -> str:
    """Return the method that made the model smaller: the last in the chain that is not tuning."""
    assert source.run is not None
    made = [str(source.run.summary.get("method")), *(link.method or "" for link in source.chain)]
    pruning = [method for method in made if method in METHODS and method != "fedpetuning"]
    return next(iter(pruning), made[0])

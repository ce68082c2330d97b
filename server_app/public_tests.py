"""Data for the comparison of models: evaluation texts, and public items of a tuning task."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from torch import Tensor

from espalier.data.client_items import as_tests, public_items
from espalier.data.public_text import public_samples
from espalier.data.tasks.catalogue import TASKS, task_of
from espalier.data.tasks.item import Item
from espalier.data.tasks.scored_items import ScoredItems
from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.run import RunSettings
from espalier.settings.tables.task import TEXT
from strategies.base.evaluation import ClientEvaluation
from strategies.base.run import Run


@dataclass(frozen=True)
class PublicTests:
    """Evaluation texts and items, read before a run starts."""

    texts: Mapping[str, Tensor]
    """Sequences by text name, (sequences, tokens), int64; empty for an encoder with a task."""
    items: Sequence[Item] = ()
    encoded: ScoredItems | None = None
    """Items as token ids."""
    metrics: tuple[str, ...] = ()
    """Names of the scores on the items."""
    num_classes: int = 0
    """Number of classes of an encoder's task."""

    def sha256(self, settings: RunSettings) -> dict[str, str]:
        """Return a hash of the tokens of each text, and of the items, by the name of the dataset.

        Runs with the same hash were evaluated on the same samples.
        """
        # Shape and bytes: the same tokens in other samples are another test.
        hashes = {
            name: hashlib.sha256(repr(tuple(samples.shape)).encode() + samples.numpy().tobytes())
            for name, samples in self.texts.items()
        }
        if self.encoded is not None:
            items = repr(astuple(self.encoded)).encode()
            hashes[settings.task.name] = hashlib.sha256(items)
        return {name: digest.hexdigest() for name, digest in hashes.items()}

    def of_clients(self, settings: RunSettings) -> Mapping[str, Tensor]:
        """Return the texts on which clients evaluate; empty if they are scored on items."""
        return (
            self.texts if settings.evaluation.local_baseline and settings.task.name == TEXT else {}
        )

    def evaluation(self, run: Run) -> ClientEvaluation:
        """Return the evaluation at clients: local baselines, unless disabled, and own texts."""
        items = None
        if self.encoded is not None and run.settings.evaluation.local_baseline:
            items = (self.encoded, self.metrics)
        return ClientEvaluation(run, self.of_clients(run.settings), items)


def public_tests(
    settings: RunSettings, model: OpenedModel, *, built_in: bool = True
) -> PublicTests:
    """Read the texts and items of the settings, and check that the model can be tested on them.

    Without ``built_in``, the built-in texts are left out. Raises InputError if a text or the items
    cannot be read, the task is not suitable for this kind of model, or the model cannot be built.
    """
    tunes = settings.tunes
    if model.family.kind == "decoder" or not tunes:
        # Fail now if the model cannot be built.
        model.new_skeleton()
        texts = public_samples(settings.evaluation, model.encode, built_in=built_in)
        if not tunes or settings.task.name == TEXT:
            return PublicTests(texts)
        return _of_task(settings, model, texts, 0)
    classes = settings.num_classes
    if not classes:
        *names, last = (name for name, task in TASKS.items() if task.classes)
        raise InputError(
            f"task.name = '{settings.task.name}': an encoder only classifies; choose"
            f" {', '.join(names)} or {last}, or another model"
        )
    model.new_skeleton(classes)
    return _of_task(settings, model, {}, classes)


def _of_task(
    settings: RunSettings, model: OpenedModel, texts: Mapping[str, Tensor], num_classes: int
) -> PublicTests:
    items = public_items(settings)
    if not items:
        return PublicTests(texts, num_classes=num_classes)
    metrics: tuple[str, ...] = ("loss",)
    # Scores that clients of this kind of model can report.
    if num_classes:
        metrics = ("acc", "loss")
    elif "acc" in task_of(settings).metrics:
        metrics = ("acc", "acc_norm", "loss")
    encoded = as_tests(settings, items, model)
    return PublicTests(texts, items, encoded, metrics, num_classes)

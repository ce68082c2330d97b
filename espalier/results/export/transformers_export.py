"""Export for transformers: one directory that loads without the run, and its check."""

from collections.abc import Sequence
from pathlib import Path

import torch

from espalier.data.tasks.catalogue import task_named
from espalier.environment.paths import at_home
from espalier.errors import InputError
from espalier.hf.export.encoder import check_encoder, export_encoder
from espalier.hf.export.model import check_export, export_edited, require_written, weight_reader
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.hf.sliced.export import CODE as SLICED_CODE
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.structured.configuration import STRUCTURE_FILE, plain_config
from espalier.hf.structured.export import CODE
from espalier.results.base_chain import write_chain
from espalier.results.sources import Source
from espalier.settings.tables.data import CLASSIFICATION, listed_labels
from espalier.storage.atomic import write_bytes, write_json

SAMPLE = (2, 16)
"""Number of sequences on which the export is compared, and their length."""


def export_model(source: Source, target: Path, card: str, threads: int) -> None:
    """Write a model, with the adapter merged, and compare it with the result.

    A pruned model whose blocks are alike is written without additional code.

    Parameters
    ----------
    source : the result
    target : directory to write
    card : content of ``README.md``
    threads : number of CPU threads of the comparison

    Raises
    ------
    InputError
        Writing failed.
    ExportError
        The written model differs.
    """
    if source.adapter is not None and source.model.family.kind != "decoder":
        head = source.head
        export_encoder(source.model, source.edits, head, _classes(source), target, card)
        check_encoder(source.model, source.edits, head, target)
    else:
        export_edited(source.model, source.edits, target, card)
        _write_plainly(source.model, target)
        _write_own_code(target)
        check(source, target, threads)
    if source.run is not None:
        written = open_model(str(target)).sha256
        write_chain(target, written, source.run.name, source.run.summary)


def _classes(source: Source) -> Sequence[str]:
    """Return the names of the classes that the adapter of an encoder was trained on."""
    if source.run is None:
        raise InputError(f"{source.folder}: its classes are not known; name the run that made it")
    name = str(source.run.setting("task.name"))
    if name == CLASSIFICATION:
        return listed_labels(str(source.run.setting("data.labels")))
    return task_named(name).classes


def _write_plainly(model: OpenedModel, target: Path) -> None:
    """Replace the configuration by one for the classes of the family, if they fit."""
    if model.structure is None:
        return
    config = plain_config(model.config, model.family, model.plan, model.structure)
    if config is None:
        return
    write_json(target / "config.json", config)
    for name in (STRUCTURE_FILE, CODE.name):
        (target / name).unlink(missing_ok=True)


def _write_own_code(target: Path) -> None:
    """Replace the copied modelling code by this program's, which is what the check loads.

    Somebody may have changed the copy in the result's directory, and who loads the export runs it.
    """
    for code in (CODE, SLICED_CODE):
        if (target / code.name).exists():
            write_bytes(target / code.name, code.read_bytes())


def check(source: Source, target: Path, threads: int) -> None:
    """Reload an exported model, and compare its tensors, and the logits of a decoder."""
    model = source.model
    computing = Computing(torch.device("cpu"), torch.float32, threads)
    torch.set_num_threads(threads)
    if model.family.kind != "decoder":
        read = weight_reader(model, source.edits)
        require_written(target, ((name, read(name)) for name in model.checkpoint.tensors))
        return
    count, length = SAMPLE
    length = min(length, model.num_positions or length)
    samples = torch.arange(count * length).view(count, length) % len(model.tokenizer)
    check_export(BlockStream(model, computing), source.edits, target, samples)


def require_new(out: str) -> Path:
    """Return the absolute path of a directory to write; InputError if it has content."""
    target = at_home(out).absolute()
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InputError(f"--out {out}: is there already; name a new directory")
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}; name a new directory") from None
    return target

"""Smaller models at a client: its own in the folder that its owner configured, or the pushed one.

No other party receives this model or its shape.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from client_app.site import Site
from espalier.amounts import count
from espalier.data.tasks.catalogue import task_of
from espalier.hf.export.chat_template import add_chat_template
from espalier.hf.export.encoder import check_encoder, export_encoder
from espalier.hf.export.model import check_export
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import Edits
from espalier.hf.structured.export import best_form, export_structured
from espalier.hf.whole.adapters import merged
from espalier.models.adapters import HEAD_KEY, AdapterPlan, Tensors
from espalier.models.structure import Structure
from espalier.seeds import derive_seed
from espalier.storage.client_state import PrivateState

CHECKED = (2, 16)
"""Number of sequences and tokens per sequence for the check of the written model."""


def own_folder(site: Site, state: PrivateState) -> Path | None:
    """Return the target folder; None if the site's owner configured none."""
    # In a simulation the folder is in the client's state.
    if site.node.simulated:
        return state.own_model
    # Runs and sites have folders of their own.
    assert site.request is not None
    folder = (
        site.node.models_dir
        and Path(site.node.models_dir).expanduser() / f"{site.request.header.lineage}-{site.name}"
    )
    return folder or None


def write_own(site: Site, model: OpenedModel, edits: Edits, target: Path) -> None:
    """Write a client's smaller model with merged LoRA, and check it by loading it.

    It appears complete or not at all. Raises ExportError if the loaded model computes other values.
    """
    model = _structured(model)
    stream = BlockStream(model, site.computing)
    seed = derive_seed(site.settings.seed, "export-check")
    # Random tokens suffice to compare the written model with the one in memory.
    drawn = torch.randint(
        model.num_embeddings or 1, CHECKED, generator=torch.Generator().manual_seed(seed)
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    export_structured(model, edits, target, best_form(model), _card(site, model))
    add_chat_template(site.settings.task, model, target)
    # A model that computes other values must not stay in the owner's folder.
    with _removed_if_wrong(target):
        check_export(stream, edits, target, drawn)


def write_own_encoder(
    site: Site, model: OpenedModel, adapters: AdapterPlan, tensors: Tensors, target: Path
) -> None:
    """Write a client's smaller encoder with merged LoRA and classification head, and check it."""
    model = _structured(model)
    head = tensors[HEAD_KEY]
    edits = merged(adapters, tensors)
    target.parent.mkdir(parents=True, exist_ok=True)
    export_encoder(model, edits, head, task_of(site.settings).classes, target, _card(site, model))
    with _removed_if_wrong(target):
        check_encoder(model, edits, head, target)


def _structured(model: OpenedModel) -> OpenedModel:
    """Return the model with a structure, if necessary one that keeps everything."""
    if model.structure is not None:
        return model
    # A whole structure, so that there is one way to write a model.
    return OpenedModel(model.directory, Structure.whole(model.plan))


@contextmanager
def _removed_if_wrong(target: Path) -> Iterator[None]:
    try:
        yield
    except Exception:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _card(site: Site, model: OpenedModel) -> str:
    """Return the README of the model folder."""
    parameters = model.plan.num_parameters
    base_parameters = site.model.plan.num_parameters
    loader = model.family.auto_class
    has_read = "text" if model.family.kind == "decoder" else "items"
    made = (
        f"Made by Espalier ({site.settings.method}) at {site.name} of a run of"
        f" {count(site.settings.num_clients, 'client')}: {parameters:,} parameters of"
        f" {base_parameters:,}, LoRA merged. It was pruned for this client's {has_read}; nobody"
        " else has it."
    )
    return f"""# A smaller model of one client

{made}

```python
from transformers import {loader}, AutoTokenizer

model = {loader}.from_pretrained(".", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""

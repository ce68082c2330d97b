"""The smaller model that a run leaves a client alone, written where its owner wants it: nobody else gets it, or its shape."""

import shutil
from pathlib import Path

import torch

from client_app.site import Site
from espalier.modeling.block_stream import BlockStream
from espalier.modeling.edits import Edits
from espalier.modeling.export import check_export
from espalier.modeling.opened import OpenedModel
from espalier.modeling.structured.export import best_form, export_structured
from espalier.settings.seeds import derive_seed
from espalier.storage.private import PrivateState
from espalier.wire.structure import Structure

CHECKED = (2, 16)
"""Windows and tokens on which the written model is compared with what was meant."""


def own_folder(site: Site, state: PrivateState) -> Path | None:
    """Where the model goes; None where a site's owner wants none."""
    if site.node.simulated:
        return state.own_model
    assert site.header is not None
    folder = site.node.models_dir and Path(site.node.models_dir).expanduser() / f"{site.header.lineage}-{site.name}"
    return folder or None


def write_own(site: Site, model: OpenedModel, edits: Edits, target: Path) -> None:
    """Write a client's smaller model with LoRA merged, and load it again; it appears whole or not at all.

    Raises
    ------
    Mistake
        The file system refused.
    ExportError
        What was loaded computes something else; it is removed.
    """
    if model.structure is None:
        model = OpenedModel(model.directory, Structure.whole(model.plan))
    stream, seed = BlockStream(model, site.computing), derive_seed(site.settings.seed, "export-check")
    drawn = torch.randint(model.num_embeddings or 1, CHECKED, generator=torch.Generator().manual_seed(seed))
    target.parent.mkdir(parents=True, exist_ok=True)
    export_structured(model, edits, target, best_form(model), _card(site, model))
    try:
        check_export(stream, edits, target, drawn, site.settings.export_check)
    except Exception:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _card(site: Site, model: OpenedModel) -> str:
    """What the model is, for whoever finds it."""
    parameters, whole = model.plan.num_parameters, site.model.plan.num_parameters
    return "\n".join(
        [
            "# A smaller model of one client",
            "",
            f"Made by Espalier ({site.settings.method}) at {site.name} of a run of {site.settings.num_clients} clients: "
            f"{parameters:,} parameters of {whole:,}, LoRA merged. It was pruned for this client's text; nobody else has it.",
            "",
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'model = AutoModelForCausalLM.from_pretrained(".", trust_remote_code=True)',
            'tokenizer = AutoTokenizer.from_pretrained(".")',
            "```",
            "",
        ]
    )

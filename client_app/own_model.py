"""The smaller model that a run leaves a client alone, written where its owner wants it: nobody else gets it, or its shape."""

import shutil
from pathlib import Path

import torch

from client_app.site import Site
from client_app.smaller_model import SmallerModel
from espalier.modeling.block_stream import BlockStream
from espalier.modeling.export import check_export
from espalier.modeling.structured.export import export_structured
from espalier.settings.seeds import derive_seed
from espalier.storage.private import PrivateState

CHECKED = (2, 16)
"""Windows and tokens on which the written model is compared with what was meant."""


def own_folder(site: Site, state: PrivateState) -> Path | None:
    """Where the model goes; None where a site's owner wants none."""
    if site.node.simulated:
        return state.own_model
    assert site.header is not None
    folder = site.node.models_dir and Path(site.node.models_dir).expanduser() / f"{site.header.lineage}-{site.name}"
    return folder or None


def write_own(site: Site, mine: SmallerModel, target: Path) -> None:
    """Write the dense model with LoRA merged, and load it again; it appears whole or not at all.

    Raises
    ------
    Mistake
        The file system refused.
    ExportError
        What was loaded computes something else; it is removed.
    """
    stream, seed = BlockStream(mine.model, site.computing), derive_seed(site.settings.seed, "export-check")
    drawn = torch.randint(mine.model.num_embeddings or 1, CHECKED, generator=torch.Generator().manual_seed(seed))
    target.parent.mkdir(parents=True, exist_ok=True)
    export_structured(mine.model, mine.edits, target, "compact", _card(site, mine))
    try:
        check_export(stream, mine.edits, target, drawn, site.settings.export_check)
    except Exception:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _card(site: Site, mine: SmallerModel) -> str:
    """What the model is, for whoever finds it."""
    parameters, whole = mine.model.plan.num_parameters, site.model.plan.num_parameters
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

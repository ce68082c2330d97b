"""Files of FedSODA's sub-model, and their sizes."""

import json
from pathlib import Path

from espalier.hf.files.checkpoint import SINGLE, shard_header
from espalier.hf.nf4.folder import (
    REWRITTEN,
    quantised_config,
    quantised_specs,
)
from espalier.hf.opening.model_files import other_files
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.structured.export import config_of, specs_of
from espalier.messages.blobs.model_pieces import FILES
from espalier.messages.tensor_blobs import TensorSpec
from espalier.methods.tuning.fedsoda import FedSodaSettings
from espalier.settings.run import RunSettings


def files_of(settings: RunSettings, model: OpenedModel) -> dict[str, int]:
    """Return the bytes of each file of a sub-model that clients are offered, by name."""
    if settings.of(FedSodaSettings).emulator == "nf4":
        weights: dict[str, dict[str, TensorSpec]] = {SINGLE: quantised_specs(model)}
        config = quantised_config(model)
    else:
        weights = {}
        for name, stored in specs_of(model).items():
            weights.setdefault(stored.shard.name, {})[name] = stored
        config = config_of(model, "plain") if model.structure is not None else model.config
    sizes = {file.name: file.stat().st_size for file in other_files(model.directory, REWRITTEN)}
    sizes |= {
        name: len(shard_header(specs)) + sum(spec.num_bytes for spec in specs.values())
        for name, specs in weights.items()
    }
    # The file ends with a newline.
    sizes["config.json"] = len(json.dumps(config, indent=2)) + 1
    return {name: size for name, size in sorted(sizes.items()) if FILES.fullmatch(Path(name).name)}

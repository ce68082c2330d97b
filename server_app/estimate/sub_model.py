"""Sizes of the files of the sub-model that FedSODA's clients download."""

import json
from pathlib import Path

from espalier.hf.files.checkpoint import shard_header
from espalier.hf.nf4.folder import (
    WEIGHTS,
    WRITTEN_ANEW,
    quantised_config,
    quantised_specs,
)
from espalier.hf.opening.model_files import beside
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.structured.export import config_of, specs_of
from espalier.messages.blobs.model_pieces import FILES
from espalier.messages.tensor_blobs import DTYPE_BYTES
from espalier.methods.fedsoda import FedSodaSettings
from espalier.settings.run import RunSettings


def files_of(settings: RunSettings, model: OpenedModel) -> dict[str, int]:
    """Return the bytes of each file of a sub-model that clients are offered, by name."""
    if settings.of(FedSodaSettings).emulator == "nf4":
        weights = {WEIGHTS: quantised_specs(model)}
        config = quantised_config(model)
    else:
        weights = {}
        for name, (dtype, shape, shard) in specs_of(model).items():
            size = DTYPE_BYTES[dtype]
            for side in shape:
                size *= side
            weights.setdefault(shard, {})[name] = (dtype, shape, size)
        config = config_of(model, "plain") if model.structure is not None else model.config
    sizes = {file.name: file.stat().st_size for file in beside(model.directory, WRITTEN_ANEW)}
    sizes |= {
        name: (
            len(shard_header(specs, {"format": "pt"})) + sum(size for _, _, size in specs.values())
        )
        for name, specs in weights.items()
    }
    sizes["config.json"] = len(json.dumps(config, indent=2)) + 1
    return {name: size for name, size in sorted(sizes.items()) if FILES.fullmatch(Path(name).name)}

"""Sub-model that FedSODA's clients download: its plan, and the sizes of its files."""

import json
from dataclasses import dataclass
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
from espalier.messages.payload import DTYPE_BYTES
from espalier.methods.fedsoda.settings import FedSodaSettings
from espalier.models.structure import Structure
from espalier.settings.run import RunSettings


@dataclass(frozen=True)
class SubModel:
    """Base model without the dropped blocks of the emulator.

    Its sizes do not depend on which blocks are dropped.
    """

    model: OpenedModel
    files: dict[str, int]
    """Bytes of each file that clients are offered, by name."""
    aligned_blocks: list[int]
    """Blocks of the sub-model whose LoRA the server aligns; empty if it aligns none."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def sub_model(settings: RunSettings, base: OpenedModel) -> SubModel:
    """Return the sub-model of a run."""
    job = settings.of(FedSodaSettings)
    blocks = len(base.plan.blocks)
    emulator = job.emulator_of(blocks)
    gone = range(emulator[-1] + 1 - job.num_dropped, emulator[-1] + 1)
    kept = [index for index in range(blocks) if index not in gone]
    model = (
        OpenedModel(base.directory, Structure.whole(base.plan).with_blocks(kept)) if gone else base
    )
    left = job.emulator_of(len(kept))
    aligned = list(left) if job.drop == "uniform" else list(left)[: job.groups]
    return SubModel(model, _files(settings, model), aligned if job.aligns else [])


def _files(settings: RunSettings, model: OpenedModel) -> dict[str, int]:
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

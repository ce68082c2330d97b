"""Result of structured pruning: one bit per prunable group of each block, and biases or scales."""

from collections.abc import Sequence
from typing import Any

from espalier.hf.opening.opened import OpenedModel
from espalier.hf.structured.opened_cut import open_cut
from espalier.messages.blobs.cuts import scales_of
from espalier.models.structure import BlockStructure
from espalier.storage.blobs import BlobStore


class CutResult:
    """Smaller model, available when the cut is decided.

    Parameters
    ----------
    model : base model
    store : store for the blobs, in a run that of the checkpoint
    biases : canonical names of the matrices that get a bias
    """

    def __init__(self, model: OpenedModel, store: BlobStore, biases: Sequence[str]) -> None:
        self.base = model
        self.store = store
        self.biases = tuple(biases)
        self.blobs: list[str] = []
        """Hash of each block's blob."""

    def state(self) -> dict[str, Any]:
        """Return the hashes of the decided blocks."""
        return {"blobs": self.blobs}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        self.blobs = state["blobs"]

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        return self.blobs

    def blob(self, index: int) -> bytes:
        """Return the cut of one block as it is sent."""
        return self.store.get(self.blobs[index])

    @property
    def model(self) -> OpenedModel:
        """Smaller model."""
        return open_cut(self.base, self.blob, self.biases)

    def report(self) -> dict[str, Any]:
        """Return size and remaining fraction of the model, and the group counts of each block."""
        small = self.model
        assert small.structure is not None
        blocks = [
            {"groups": block.sizes.groups, "channels": block.sizes.channels}
            for block in small.structure.blocks
        ]
        share = small.plan.num_parameters / self.base.plan.num_parameters
        found = {
            "parameters": small.plan.num_parameters,
            "share_of_the_base": share,
            "units_of_blocks": blocks,
        }
        scales = [self._scales(block) for block in small.structure.blocks]
        return found | ({"scales_of_blocks": scales} if any(scales) else {})

    def _scales(self, block: BlockStructure) -> dict[str, list[float]]:
        """Return the smallest and largest scale of a block's kept groups, by kind."""
        scales = {
            kind: own[list(block.kept(kind))]
            for kind, own in scales_of(self.blob(block.source)).items()
        }
        return {kind: [float(own.min()), float(own.max())] for kind, own in scales.items()}

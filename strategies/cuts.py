"""Result of structured pruning: one bit per prunable group of each block, and biases or scales."""

from collections.abc import Iterable, Sequence
from typing import Any

from espalier.errors import EspalierError, InputError
from espalier.hf.opening.opened import OpenedModel, check_labels
from espalier.hf.structured.export import require_writable
from espalier.hf.structured.opened_cut import open_cut
from espalier.messages.blobs.cuts import cut_specs, scales_of
from espalier.messages.message import NoFields
from espalier.messages.parts import parts_of
from espalier.models.plan import block_key
from espalier.models.structure import BlockStructure
from espalier.settings.run import RunSettings
from espalier.settings.structured import StructuredSettings
from strategies.base.run import Run


class CutResult:
    """Smaller model, available when the cut is decided.

    Parameters
    ----------
    run : run whose base model is cut
    biases : canonical names of the matrices that get a bias
    scaled : kinds of prunable groups that get scales
    """

    def __init__(self, run: Run, biases: Sequence[str] = (), scaled: Sequence[str] = ()) -> None:
        self.run = run
        self.base = run.model
        self.store = run.checkpoint.blobs
        self.biases = tuple(biases)
        self.scaled = tuple(scaled)
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

    def keep(self, blobs: Iterable[bytes]) -> None:
        """Store the decision on each block."""
        self.run.progress.begin("cutting", len(self.base.plan.blocks))
        for index, blob in enumerate(blobs):
            self.blobs.append(self.store.put(blob))
            self.run.progress.step("cut", f"block {index}", block=index)

    def push(self, server_round: int) -> None:
        """Push the decisions to the clients, if they evaluate models on their own text."""
        settings = self.run.settings
        if settings.evaluation.own_text:
            places = {block_key(block.index): block.index for block in self.base.plan.blocks}
            specs = cut_specs(self.base.plan, self.biases, self.scaled)
            parts = (
                (NoFields(), {key: self.blob(places[key]) for key in keys})
                for keys in parts_of(specs, settings.part_bytes)
            )
            self.run.rounds.push_parts(server_round, parts)

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


def require_cuttable(
    settings: RunSettings, model: OpenedModel, blocks: range, biases: Sequence[str] = ()
) -> None:
    """Check that prunable groups of a model can be removed, and the result be written.

    Some forms of output cannot hold a model whose blocks differ in shape.

    Parameters
    ----------
    settings : settings of the run
    model : base model
    blocks : blocks whose groups may be removed
    biases : canonical names of the matrices that get a bias

    Raises
    ------
    InputError
        The model is an encoder, the pruning ratio is impossible, or the result cannot be written.
    """
    check_labels(model.family, None, str(model.directory / "config.json"))
    try:
        require_writable(model, settings.of(StructuredSettings), biases, blocks)
    except EspalierError as error:
        raise InputError(f"{settings.method}.{error}") from None

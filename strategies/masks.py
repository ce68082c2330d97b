"""Results that are prune masks, decided in one round or block by block.

The data are in the checkpoint's blobs, one per block; a result has their hashes and the reported
numbers.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray

from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.edits import WeightEdit, masked
from espalier.messages.blobs.mask_tensors import unpack_masks
from espalier.messages.blobs.masks import mask_name
from espalier.messages.decided_blocks import Decided, blocks_of_round
from espalier.messages.message import Fields
from espalier.messages.tensor_blobs import pack_tensors, views
from espalier.models.plan import ModelPlan, block_key
from espalier.settings.pruning import MaskingSettings, PruningSettings
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.selection.comparison_groups import group_size, pruned_in_matrix
from pruning_kernels.votes.bitmask import Words
from strategies.base.method import ClientOrder, Method, RunResult


class MaskResult(RunResult):
    """Decided blocks of a run, in order; their masks are in ``store``."""

    STATE: ClassVar[tuple[str, ...]] = ("mask_blobs",)

    def __init__(self, settings: RunSettings, model: OpenedModel, store: BlobStore) -> None:
        self.run_settings = settings
        self.model = model
        self.store = store
        self.mask_blobs: list[str] = []
        """Hash of each decided block's masks."""

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        return self.mask_blobs

    def report(self) -> dict[str, Any]:
        """Return the method's own entries of ``summary.json``: none."""
        return {}

    def keep_masks(self, masks: Mapping[str, NDArray]) -> None:
        """Store the packed masks of the next block, by canonical linear name."""
        tensors = {mask_name(name): words for name, words in masks.items()}
        self.mask_blobs.append(self.store.put(pack_tensors(tensors)))

    def zeros_beyond_masks(self) -> int:
        """Return the number of kept weights that become zero: none."""
        return 0

    def blob(self, index: int) -> bytes:
        """Return the prune masks of one block as they are sent."""
        return self.store.get(self.mask_blobs[index])

    def prune_masks(self, index: int) -> dict[str, torch.Tensor]:
        """Return the prune masks of one block: bool, by canonical linear name."""
        return unpack_masks(self.model.plan.blocks[index], self.blob(index))

    def packed_masks(self, index: int) -> dict[str, Words]:
        """Return the packed prune masks of one block by canonical linear name."""
        masks = views(self.blob(index))
        return {
            linear.name: masks[mask_name(linear.name)]
            for linear in self.model.plan.blocks[index].linears
        }

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """Return the edits of one block's dense weights."""
        return masked(self.prune_masks)(index)

    def centralized_sparsity(self) -> float:
        """Return the sparsity of the centralized baseline, which is that of a client."""
        return self.local_sparsity()

    def local_sparsity(self) -> float:
        """Return the sparsity of a client's local baseline, as the settings demand."""
        job = self.run_settings.of(PruningSettings)
        shapes = self.model.plan.shapes
        # Exact numbers, not the fraction of the settings: each group rounds down.
        pruned = sum(pruned_in_matrix(shape, job.sparsity, job.local_group) for shape in shapes)
        return pruned / self.model.plan.num_weights


def require_pattern_fits(plan: ModelPlan, settings: RunSettings) -> None:
    """Refuse a pattern that does not divide rows of a matrix, or columns of a SparseGPT step."""
    job = settings.of(PruningSettings)
    setting = f"pruning.pattern = '{job.pattern}'"
    for linear in plan.linears:
        try:
            size = group_size(linear.shape, job.server_group)
        except ValueError as error:
            raise InputError(f"{setting}: {linear.parameter}: {error}") from None
        # A pattern's groups must lie within the columns that are decided together.
        if job.pattern and job.columns_together % size:
            raise InputError(
                f"{setting}: sparsegpt decides {job.columns_together} columns at a time, which"
                f" {size} does not divide; choose another pattern or local-method"
            )


class Masking(Method):
    """Method that decides masks, all in one round or those of one block per round."""

    result: MaskResult

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse a pattern that does not fit the rows of a matrix."""
        require_pattern_fits(model.plan, settings)

    @property
    def masking(self) -> MaskingSettings:
        """Settings that all such methods have."""
        return self.run.settings.of(MaskingSettings)

    @property
    def num_rounds(self) -> int:
        """Number of rounds: 1 for one-shot pruning, one per block for iterative pruning."""
        return 1 if self.masking.strategy == "one-shot" else len(self.run.model.plan.blocks)

    def blocks_of_round(self, server_round: int) -> range:
        """Return the numbers of the blocks that a round decides."""
        return blocks_of_round(self.run.model.plan, self.masking, server_round)

    # ----- what is sent to the clients ----------------------------------------------------------

    def decided_blobs(self, index: int) -> dict[str, bytes]:
        """Return the blobs of a decided block as they are pushed, by key."""
        return {block_key(index): self.result.blob(index)}

    def decision(self, blocks: Iterable[int], decided: int) -> Fields:
        """Return the fields of a part with these blocks, of ``decided`` blocks in all parts."""
        return Decided(decided=decided)

    @abstractmethod
    def parts_of_decided(self, decided: int) -> list[range]:
        """Return the block numbers of each part in which the first blocks are pushed."""

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order of a round; if iterative, with the masks of the block before."""
        if self.masking.strategy == "one-shot" or server_round == 1:
            return ClientOrder()
        # Rounds count from 1, blocks from 0: the block of the previous round.
        before = server_round - 2
        return ClientOrder(blobs={block_key(before): self.result.blob(before)})

    def catch_up(self, server_round: int) -> Callable[[Sequence[int]], None] | None:
        """Return a function that pushes all decisions to clients that lost their hidden states."""
        # Hidden states exist only between the rounds of iterative pruning.
        if self.masking.strategy == "one-shot" or server_round == 1:
            return None
        return lambda lost: self._push(server_round, server_round - 1, lost)

    def push_result(self, server_round: int) -> None:
        """Push the result to the clients, part by part, for the evaluation on their own text."""
        if self.run.settings.evaluation.own_text:
            self._push(server_round, len(self.run.model.plan.blocks))

    def _push(
        self, server_round: int, decided: int, clients: Collection[int] | None = None
    ) -> None:
        """Push the decisions on the first ``decided`` blocks to clients; None means all."""
        parts = (
            # A generator: one part is in memory at a time.
            (
                self.decision(blocks, decided),
                {key: blob for index in blocks for key, blob in self.decided_blobs(index).items()},
            )
            for blocks in self.parts_of_decided(decided)
        )
        self.rounds.push_parts(server_round, parts, clients)

"""Result of FedPrLLM: prune masks of each block and scales of the kept weights (steps 3 to 6).

The data are in the checkpoint's blobs, one per block; this object has their hashes and the reported
numbers.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.edits import WeightEdit, masked, masked_and_scaled
from espalier.messages.blobs.mask_tensors import kept_shares, unpack_masks
from espalier.messages.blobs.masks import mask_name
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors, views
from espalier.methods.fedprllm import FedPrLLMSettings, votes_dtype
from espalier.models.plan import BlockPlan, LinearPlan
from espalier.seeds import derive_seed
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.selection.comparison_groups import pruned_in_matrix
from pruning_kernels.votes.bitmask import Words, count
from pruning_kernels.votes.votes import Sizes, VoteCounter, magnitudes

STATE = ("mask_blobs", "count_blobs", "num_voters", "unanimous_survivors")
"""Attributes that a checkpoint stores."""


class VoteResult:
    """Decided blocks of a run, in order.

    Parameters
    ----------
    settings : settings of the run
    model : dense model
    store : store for masks and counts, in a run that of the checkpoint
    """

    def __init__(self, settings: RunSettings, model: OpenedModel, store: BlobStore) -> None:
        self.settings = settings.of(FedPrLLMSettings)
        self.model = model
        self.seed = settings.seed
        self.votes_dtype = votes_dtype(settings.num_clients)
        self.store = store
        self.mask_blobs: list[str] = []
        """Hash of each decided block's masks."""
        self.count_blobs: list[str] = []
        """Hash of each decided block's vote counts; only with weight scaling."""
        self.num_voters: list[int] = []
        """Number of clients that voted on each decided block."""
        self.unanimous_survivors = 0
        """Number of kept weights that all clients voted to prune (many by column comparison)."""

    def state(self) -> dict[str, Any]:
        """Return the hashes of the decided blocks, and the reported numbers."""
        return {name: getattr(self, name) for name in STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        for name in STATE:
            setattr(self, name, state[name])

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        return [*self.mask_blobs, *self.count_blobs]

    def decide(self, block: BlockPlan, counters: Mapping[str, VoteCounter]) -> None:
        """Decide the prune masks of the next block by its votes, and store the result."""
        (voters,) = {counter.num_voters for counter in counters.values()}
        masks = {}
        votes = {}
        for linear in block.linears:
            counter = counters[linear.name]
            job = self.settings
            words = counter.most_voted(job.sparsity, job.server_group, self._sizes(block, linear))
            self.unanimous_survivors += count(counter.unanimous() & ~words)
            masks[mask_name(linear.name)] = words
            if job.weight_scaling:
                votes[linear.name] = counter.counts().astype(self.votes_dtype)
        self.mask_blobs.append(self.store.put(pack_tensors(masks)))
        self.num_voters.append(voters)
        if self.settings.weight_scaling:
            self.count_blobs.append(self.store.put(pack_tensors(votes)))

    def _sizes(self, block: BlockPlan, linear: LinearPlan) -> Sizes | None:
        """Return the values that break ties: the smaller one is pruned first.

        None means that the lower index is pruned first.
        """
        if self.settings.ties == "magnitude":
            return magnitudes(self.model.checkpoint.read(linear.parameter))
        if self.settings.ties == "random":
            seed = derive_seed(self.seed, f"ties/{linear.name}", block=block.index)
            return np.random.default_rng(seed).integers(0, 1 << 31, linear.shape, dtype=np.uint32)
        return None

    def report(self) -> dict[str, Any]:
        """Return the method's own entries of ``summary.json``."""
        return {"unanimous_survivors": self.unanimous_survivors}

    def zeros_beyond_masks(self) -> int:
        """Return the number of kept weights that weight scaling sets to zero.

        Their factor is the fraction of clients that voted to keep them, which is 0.
        """
        return self.unanimous_survivors if self.settings.weight_scaling else 0

    def blob(self, index: int) -> bytes:
        """Return the prune masks of one block as they are sent."""
        return self.store.get(self.mask_blobs[index])

    def votes_blob(self, index: int) -> bytes:
        """Return the votes on one block as they are sent; only with weight scaling."""
        return self.store.get(self.count_blobs[index])

    def prune_masks(self, index: int) -> dict[str, torch.Tensor]:
        """Return the prune masks of one block: bool, by canonical linear name."""
        return unpack_masks(self.model.plan.blocks[index], self.blob(index))

    def packed_masks(self, index: int) -> dict[str, Words]:
        """Return the packed prune masks of one block by canonical linear name."""
        masks = views(self.blob(index))
        return {
            one.name: masks[mask_name(one.name)] for one in self.model.plan.blocks[index].linears
        }

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """Return the edits of one block's dense weights (steps 5 and 6)."""
        if self.settings.weight_scaling:
            return masked_and_scaled(self.prune_masks, self.kept_shares)(index)
        return masked(self.prune_masks)(index)

    def kept_shares(self, index: int) -> dict[str, torch.Tensor]:
        """Return ``(m - votes) / m`` of one block's weights: float32, by canonical linear name."""
        return kept_shares(unpack_tensors(self.votes_blob(index)), self.num_voters[index])

    def centralized_sparsity(self) -> float:
        """Return the sparsity of the centralized baseline, which is that of a client."""
        return self.local_sparsity()

    def local_sparsity(self) -> float:
        """Return the sparsity of a client's local baseline, as the settings demand."""
        shapes = [linear.shape for block in self.model.plan.blocks for linear in block.linears]
        pruned = sum(
            pruned_in_matrix(shape, self.settings.sparsity, self.settings.local_group)
            for shape in shapes
        )
        return pruned / self.model.plan.num_weights

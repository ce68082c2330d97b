"""What the clients' votes decide: the prune masks of each block, and how much kept weights shrink (FedPrLLM steps 3 to 6).

Everything lies in the checkpoint's blobs, block by block; here are their hashes and what is reported of them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from espalier.modeling.edits import WeightEdit, masked, masked_and_scaled
from espalier.modeling.opened import OpenedModel
from espalier.settings.fedprllm import FedPrLLMSettings
from espalier.settings.run import RunSettings
from espalier.settings.seeds import derive_seed
from espalier.storage.blobs import BlobStore
from espalier.wire.fedprllm import votes_dtype
from espalier.wire.mask_tensors import kept_shares, unpack_masks
from espalier.wire.masks import mask_name
from espalier.wire.payload import pack_tensors, unpack_tensors
from espalier.wire.plan import BlockPlan, LinearPlan
from pruning_kernels.bitmask import count
from pruning_kernels.comparison_groups import pruned_in_matrix
from pruning_kernels.votes import Sizes, VoteCounter, magnitudes

STATE = ("mask_blobs", "count_blobs", "num_voters", "unanimous_survivors")
"""Attributes that a checkpoint keeps."""


class VoteResult:
    """The decided blocks of a run, in order.

    Parameters
    ----------
    settings : of the run
    model : the dense model
    store : where masks and counts are kept, for a run the checkpoint's blobs
    """

    def __init__(self, settings: RunSettings, model: OpenedModel, store: BlobStore) -> None:
        self.settings = settings.of(FedPrLLMSettings)
        self.model = model
        self.seed = settings.seed
        self.votes_dtype = votes_dtype(settings.num_clients)
        self.store = store
        self.mask_blobs: list[str] = []
        """Hash of each decided block's masks in the store."""
        self.count_blobs: list[str] = []
        """Hash of each decided block's vote counts there; with weight scaling only."""
        self.num_voters: list[int] = []
        """How many clients voted on each decided block."""
        self.unanimous_survivors = 0
        """Weights that are kept although every client would prune them (column comparison has many)."""

    def state(self) -> dict[str, Any]:
        """What was decided, by hash, and what is reported of it."""
        return {name: getattr(self, name) for name in STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""
        for name in STATE:
            setattr(self, name, state[name])

    def stored(self) -> list[str]:
        """Hashes of all blobs that the state names."""
        return [*self.mask_blobs, *self.count_blobs]

    def decide(self, block: BlockPlan, counters: Mapping[str, VoteCounter]) -> None:
        """Decide the prune masks of the next block by its votes, and keep them and what else the result needs."""
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
        """Among equally voted weights the smaller size goes first; None: the lower index."""
        if self.settings.ties == "magnitude":
            return magnitudes(self.model.checkpoint.read(linear.parameter))
        if self.settings.ties == "random":
            seed = derive_seed(self.seed, f"ties/{linear.name}", block=block.index)
            return np.random.default_rng(seed).integers(0, 1 << 31, linear.shape, dtype=np.uint32)
        return None

    def report(self) -> dict[str, Any]:
        """What the summary says of this method alone."""
        return {"unanimous_survivors": self.unanimous_survivors}

    def zeros_beyond_masks(self) -> int:
        """Kept weights that weight scaling turns into zeros, since all clients would prune them."""
        return self.unanimous_survivors if self.settings.weight_scaling else 0

    def blob(self, index: int) -> bytes:
        """The decided prune masks of one block as they travel."""
        return self.store.get(self.mask_blobs[index])

    def votes_blob(self, index: int) -> bytes:
        """The votes on one decided block as they travel; with weight scaling only."""
        return self.store.get(self.count_blobs[index])

    def prune_masks(self, index: int) -> dict[str, torch.Tensor]:
        """The decided prune masks of one block: bool, by canonical linear name."""
        return unpack_masks(self.model.plan.blocks[index], self.blob(index))

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """What the method does to one block's dense weights (steps 5 and 6)."""
        if self.settings.weight_scaling:
            return masked_and_scaled(self.prune_masks, self.kept_shares)(index)
        return masked(self.prune_masks)(index)

    def kept_shares(self, index: int) -> dict[str, torch.Tensor]:
        """``(m - votes) / m`` for the weights of one block, float32, by canonical linear name."""
        return kept_shares(unpack_tensors(self.votes_blob(index)), self.num_voters[index])

    def centralized_sparsity(self) -> float:
        """Share of the prunable weights that one party masks which has all data: as much as a client does."""
        return self.local_sparsity()

    def local_sparsity(self) -> float:
        """Share of the prunable weights that one client alone masks, as its settings demand it."""
        shapes = [linear.shape for block in self.model.plan.blocks for linear in block.linears]
        pruned = sum(
            pruned_in_matrix(shape, self.settings.sparsity, self.settings.local_group)
            for shape in shapes
        )
        return pruned / self.model.plan.num_weights

"""FedPrLLM (paper: "Exploring Federated Pruning for Large Language Models").

Each client sends the mask with which it would prune the model. The server counts the votes for each
weight (step 3), and prunes the weights with most votes within each comparison group (step 4 and
section 3.2.1). With weight scaling, it multiplies each remaining weight by the fraction of clients
that voted to keep it (step 6). One-shot pruning decides all blocks in one round. Iterative pruning
decides one block per round and sends each decision back (step 7); clients continue behind the
masked block as in step 7, or behind the scaled one as in the published code (``continue-behind =
"scaled"``). By default, ties prune the weight with smaller magnitude: the paper does not define
ties, and its code breaks them at random without a seed.

The data are in the checkpoint's blobs, one per block; this object has their hashes and the reported
numbers.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from espalier.errors import InputError
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.edits import WeightEdit, masked
from espalier.messages.blobs.mask_tensors import kept_shares, unpack_masks
from espalier.messages.blobs.masks import mask_name
from espalier.messages.message import Fields
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors, views
from espalier.methods.fedprllm import (
    Decision,
    FedPrLLMSettings,
    blocks_of_round,
    decided_parts,
    votes_dtype,
    votes_key,
)
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan, block_key
from espalier.seeds import derive_seed
from espalier.settings.pruning import PruningSettings
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.selection.comparison_groups import group_size, pruned_in_matrix
from pruning_kernels.votes.bitmask import Words, count
from pruning_kernels.votes.votes import Sizes, VoteCounter, magnitudes, vote_counter
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import ClientOrder, Method, ProgressWords, RunResult
from strategies.base.public_samples import require_counting
from strategies.base.run import Run


class VoteResult(RunResult):
    """Decided blocks of a run, in order; their masks and counts are in ``store``."""

    STATE = ("mask_blobs", "count_blobs", "num_voters", "unanimous_survivors")

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
        """Return the values that break ties, smaller ones first; None for the lower index."""
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
        """Return the number of kept weights that weight scaling sets to zero: nobody kept them."""
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
        shares = self.kept_shares if self.settings.weight_scaling else None
        return masked(self.prune_masks, shares)(index)

    def kept_shares(self, index: int) -> dict[str, torch.Tensor]:
        """Return ``(m - votes) / m`` of one block's weights: float32, by canonical linear name."""
        return kept_shares(unpack_tensors(self.votes_blob(index)), self.num_voters[index])

    def centralized_sparsity(self) -> float:
        """Return the sparsity of the centralized baseline, which is that of a client."""
        return self.local_sparsity()

    def local_sparsity(self) -> float:
        """Return the sparsity of a client's local baseline, as the settings demand."""
        shapes = [linear.shape for block in self.model.plan.blocks for linear in block.linears]
        job = self.settings
        pruned = sum(pruned_in_matrix(shape, job.sparsity, job.local_group) for shape in shapes)
        return pruned / self.model.plan.num_weights


def require_pattern_fits(plan: ModelPlan, settings: RunSettings) -> None:
    """Refuse a pattern that does not divide rows of a matrix, or columns of a SparseGPT step."""
    job = settings.of(PruningSettings)
    given = f"{settings.method}.pattern = '{job.pattern}'"
    for linear in (linear for block in plan.blocks for linear in block.linears):
        try:
            size = group_size(linear.shape, job.server_group)
        except ValueError as error:
            raise InputError(f"{given}: {linear.parameter}: {error}") from None
        if job.pattern and job.columns_together % size:
            raise InputError(
                f"{given}: sparsegpt decides {job.columns_together} columns at a time, which"
                f" {size} does not divide; choose another pattern or local-method"
            )


class FedPrLLM(Method):
    """Strategy of FedPrLLM: voting on prune masks."""

    WORDS = ProgressWords("masks", "masks", "masks")
    result: VoteResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.settings = run.settings.of(FedPrLLMSettings)
        require_counting(run.device, run.settings.device)
        self.result = VoteResult(run.settings, run.model, run.checkpoint.blobs)

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse a pattern that does not fit the rows of a matrix."""
        require_pattern_fits(model.plan, settings)

    @property
    def num_rounds(self) -> int:
        """Number of rounds: 1 for one-shot pruning, one per block for iterative pruning."""
        return 1 if self.settings.strategy == "one-shot" else len(self.run.model.plan.blocks)

    def description(self) -> str:
        """Return the main settings in words."""
        job = self.settings
        amount = f"pattern {job.pattern}" if job.pattern else f"{job.sparsity:.0%} sparsity"
        scaling = ", weight scaling" if job.weight_scaling else ""
        return (
            f"{amount}, {job.strategy}, {job.local_metric} by {job.local_group}, votes by"
            f" {job.server_group}, ties by {job.ties}{scaling}"
        )

    # ----- round ----------------------------------------------------------------------------------

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order to send masks; if iterative, with the decision on the block before."""
        order = super().order(server_round, client)
        if self.settings.strategy == "one-shot" or server_round == 1:
            return order
        before = server_round - 2
        decided = {block_key(before): self.result.blob(before)}
        if self.settings.continue_behind == "masked":
            return replace(order, blobs=decided)
        votes = {votes_key(before): self.result.votes_blob(before)}
        decision = Decision(num_voters=[self.result.num_voters[before]], decided=server_round - 1)
        return replace(order, fields=decision, blobs=decided | votes)

    def catch_up(self, server_round: int) -> Callable[[Sequence[int]], None] | None:
        """Return a function that pushes all decisions to clients that lost their hidden states."""
        if self.settings.strategy == "one-shot" or server_round == 1:
            return None
        return lambda lost: self._push(server_round, server_round - 1, lost)

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Count the votes block by block, and decide the masks (section 3.2, steps 3 and 4)."""
        blocks = blocks_of_round(self.run.model.plan, self.settings, server_round)
        self.run.progress.begin("voting", len(blocks))
        for index in blocks:
            block = self.run.model.plan.blocks[index]
            counters = {
                linear.name: vote_counter(linear.shape, len(clients), self.run.device)
                for linear in block.linears
            }
            for name, counter in counters.items():
                for first, masks in inbox.words(block_key(index), mask_name(name), clients):
                    counter.count(masks, first)
            self.result.decide(block, counters)
            self.run.progress.step("voted", f"block {index}", block=index)

    # ----- evaluation by the clients --------------------------------------------------------------

    def deliver(self, server_round: int) -> None:
        """Push the result to the clients, part by part, for the evaluation on their own text."""
        if self.run.settings.evaluation.own_text:
            self._push(server_round, len(self.run.model.plan.blocks))

    def _push(
        self, server_round: int, decided: int, clients: Collection[int] | None = None
    ) -> None:
        """Push the decisions on the first ``decided`` blocks to clients; None means all."""
        self.rounds.push_parts(server_round, self._decided(decided), clients)

    def _decided(self, decided: int) -> Iterator[tuple[Fields, Mapping[str, bytes]]]:
        """Yield the decisions on the first ``decided`` blocks, part by part."""
        scaled = self.settings.weight_scaling
        for blocks in decided_parts(self.run.model.plan, self.run.settings, decided):
            blobs = {block_key(index): self.result.blob(index) for index in blocks}
            blobs |= {votes_key(index): self.result.votes_blob(index) for index in blocks if scaled}
            voters = [self.result.num_voters[index] for index in blocks]
            yield Decision(num_voters=voters, decided=decided), blobs

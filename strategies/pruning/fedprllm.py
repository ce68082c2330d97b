"""FedPrLLM (paper: "Exploring Federated Pruning for Large Language Models").

Each client sends the mask with which it would prune the model. The server counts the votes for each
weight (step 3), and prunes the weights with most votes within each comparison group (step 4 and
section 3.2.1). With weight scaling, it multiplies each remaining weight by the fraction of clients
that voted to keep it (step 6). One-shot pruning decides all blocks in one round. Iterative pruning
decides one block per round and sends each decision back (step 7); clients continue behind the
masked block as in step 7, or behind the scaled one as in the published code (``continue-behind =
"scaled"``). By default, ties prune the weight with smaller magnitude: the paper does not define
ties, and its code breaks them at random without a seed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.edits import WeightEdit, masked
from espalier.messages.blobs.mask_tensors import kept_shares
from espalier.messages.blobs.masks import mask_name, votes_name
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.methods.pruning.fedprllm import (
    Decision,
    FedPrLLMSettings,
    decided_parts,
    votes_dtype,
    votes_key,
)
from espalier.models.plan import BlockPlan, LinearPlan, block_key
from espalier.seeds import derive_seed
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.votes.bitmask import count
from pruning_kernels.votes.vote_counter import vote_counter
from pruning_kernels.votes.votes import Sizes, VoteCounter, magnitudes
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import ClientOrder, ProgressWords
from strategies.base.public_samples import require_counting
from strategies.base.run import Run
from strategies.base.sums.unmasking import Sums
from strategies.masks import Masking, MaskResult


class VoteResult(MaskResult):
    """Decided blocks of a run, in order; their masks and counts are in ``store``."""

    STATE = ("mask_blobs", "count_blobs", "num_voters", "unanimous_survivors")

    def __init__(self, settings: RunSettings, model: OpenedModel, store: BlobStore) -> None:
        super().__init__(settings, model, store)
        self.settings = settings.of(FedPrLLMSettings)
        self.seed = settings.seed
        self.votes_dtype = votes_dtype(settings.num_clients)
        self.count_blobs: list[str] = []
        """Hash of each decided block's vote counts; only with weight scaling."""
        self.num_voters: list[int] = []
        """Number of voters of each decided block, without those that a rule leaves out."""
        self.unanimous_survivors = 0
        """Number of kept weights that all clients voted to prune (many by column comparison)."""

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        return [*self.mask_blobs, *self.count_blobs]

    def decide(self, block: BlockPlan, counters: Mapping[str, VoteCounter]) -> None:
        """Decide the prune masks of the next block by its votes, and store the result."""
        # All matrices of a block have the same voters; trimming has reduced them equally.
        (voters,) = {counter.num_voters for counter in counters.values()}
        masks = {}
        votes = {}
        for linear in block.linears:
            counter = counters[linear.name]
            job = self.settings
            words = counter.most_voted(job.sparsity, job.server_group, self._sizes(block, linear))
            # Kept only to reach the exact sparsity of the group, although all clients would prune
            # them.
            self.unanimous_survivors += count(counter.unanimous() & ~words)
            masks[linear.name] = words
            # The votes are stored only if scaling needs them: they are larger than the masks.
            if job.weight_scaling:
                votes[linear.name] = counter.counts().astype(self.votes_dtype)
        self.keep_masks(masks)
        self.num_voters.append(voters)
        if self.settings.weight_scaling:
            self.count_blobs.append(self.store.put(pack_tensors(votes)))

    def _sizes(self, block: BlockPlan, linear: LinearPlan) -> Sizes | None:
        """Return the values that break ties, smaller ones first; None for the lower index."""
        if self.settings.ties == "magnitude":
            return magnitudes(self.model.checkpoint.read(linear.parameter))
        if self.settings.ties == "random":
            # A seed per matrix, so that the order in which matrices are decided has no effect.
            seed = derive_seed(self.seed, f"ties/{linear.name}", block=block.index)
            return np.random.default_rng(seed).integers(0, 1 << 31, linear.shape, dtype=np.uint32)
        return None

    def report(self) -> dict[str, Any]:
        """Return the method's own entries of ``summary.json``."""
        return {"unanimous_survivors": self.unanimous_survivors}

    def zeros_beyond_masks(self) -> int:
        """Return the number of kept weights that weight scaling sets to zero: nobody kept them."""
        return self.unanimous_survivors if self.settings.weight_scaling else 0

    def votes_blob(self, index: int) -> bytes:
        """Return the votes on one block as they are sent; only with weight scaling."""
        return self.store.get(self.count_blobs[index])

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """Return the edits of one block's dense weights (steps 5 and 6)."""
        shares = self.kept_shares if self.settings.weight_scaling else None
        return masked(self.prune_masks, shares)(index)

    def kept_shares(self, index: int) -> dict[str, torch.Tensor]:
        """Return ``(m - votes) / m`` of one block's weights: float32, by canonical linear name."""
        return kept_shares(unpack_tensors(self.votes_blob(index)), self.num_voters[index])


class FedPrLLM(Masking):
    """Strategy of FedPrLLM: voting on prune masks."""

    WORDS = ProgressWords("masks", "masks", "masks")
    result: VoteResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.settings = run.settings.of(FedPrLLMSettings)
        require_counting(run.device, run.settings.device)
        self.result = VoteResult(run.settings, run.model, run.checkpoint.blobs)

    def description(self) -> str:
        """Return the main settings in words."""
        job = self.settings
        amount = f"pattern {job.pattern}" if job.pattern else f"{job.sparsity:.0%} sparsity"
        scaling = ", weight scaling" if job.weight_scaling else ""
        return (
            f"{amount}, {job.strategy}, {job.metric} by {job.local_group}, votes by"
            f" {job.server_group}{self.run.settings.federation.rule_in_words}, ties by {job.ties}"
            f"{scaling}"
        )

    # ----- round ----------------------------------------------------------------------------------

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order to send masks; if iterative, with the decision on the block before."""
        order = super().order(server_round, client)
        # Behind a masked block the masks of the previous block are enough.
        if not order.blobs or self.settings.continue_behind == "masked":
            return order
        # Rounds count from 1, blocks from 0: the block of the previous round.
        before = server_round - 2
        fields = self.decision([before], server_round - 1)
        return replace(order, fields=fields, blobs=self.decided_blobs(before))

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Count the votes block by block, and decide the masks (section 3.2, steps 3 and 4)."""

        def count_masks(key: str, name: str, counter: VoteCounter) -> None:
            # Masks of all clients, a stretch of words at a time.
            for first, masks in inbox.words(key, mask_name(name), clients):
                counter.count(masks, first)

        self._vote(server_round, len(clients), count_masks)

    def fold_sums(self, server_round: int, sums: Sums, clients: list[int]) -> None:
        """Decide the masks by the sums of the votes."""
        self._vote(
            server_round,
            len(clients),
            lambda key, name, counter: counter.take_counts(sums.tensor(key, votes_name(name))),
        )

    def _vote(
        self, server_round: int, voters: int, fill: Callable[[str, str, VoteCounter], None]
    ) -> None:
        """Decide the masks of a round's blocks.

        ``fill`` counts the votes for a matrix, given the key of its block and its name.
        """
        blocks = self.blocks_of_round(server_round)
        self.run.progress.begin("voting", len(blocks))
        for index in blocks:
            block = self.run.model.plan.blocks[index]
            counters = {}
            for linear in block.linears:
                counter = vote_counter(linear.shape, voters, self.run.device)
                fill(block_key(index), linear.name, counter)
                # Trimmed after counting: all matrices then have the same, smaller number of voters.
                counter.trim(self.run.settings.federation.trim(voters))
                counters[linear.name] = counter
            self.result.decide(block, counters)
            self.run.progress.step("voted", f"block {index}", block=index)

    # ----- what is sent to the clients ----------------------------------------------------------

    def decided_blobs(self, index: int) -> dict[str, bytes]:
        """Return the masks and, with weight scaling, the votes of a decided block."""
        blobs = super().decided_blobs(index)
        if self.settings.weight_scaling:
            blobs[votes_key(index)] = self.result.votes_blob(index)
        return blobs

    def decision(self, blocks: Iterable[int], decided: int) -> Decision:
        """Return the number of voters of these blocks, and that of decided blocks."""
        voters = [self.result.num_voters[index] for index in blocks]
        return Decision(num_voters=voters, decided=decided)

    def parts_of_decided(self, decided: int) -> list[range]:
        """Return the block numbers of each part in which the first blocks are pushed."""
        return decided_parts(self.run.model.plan, self.run.settings, decided)

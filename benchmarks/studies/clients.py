"""Clients of one FedPrLLM setting in this process, with the functions of the app.

In one-shot pruning, a client's work does not depend on how the server compares votes. So a study
computes the samples, masks and votes of a setting once, and decides them in several ways.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from espalier.data.client_text import client_samples
from espalier.hf.stream.block_stream import Activations, BlockStream
from espalier.hf.stream.calibration import choose_in_dense_block, prune_by_block
from espalier.hf.stream.edits import Edits, masked
from espalier.hf.stream.input_statistics import watch_for
from espalier.messages.blobs.mask_tensors import pack_masks, unpack_masks
from espalier.messages.blobs.masks import mask_name
from espalier.messages.tensor_blobs import unpack_tensors
from espalier.methods.pruning.fedprllm import FedPrLLMSettings
from espalier.models.plan import BlockPlan
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.selection.local_pruning import LocalPruning
from pruning_kernels.votes.bitmask import Words, pack
from pruning_kernels.votes.vote_counter import vote_counter
from pruning_kernels.votes.votes import VoteCounter
from strategies.pruning.fedprllm import VoteResult

PUBLISHED_TIES = {"layer": "random", "row": "index", "column": "index"}
"""Tie rules of the paper's code by comparison group.

That code draws without a seed; here the run's seed is used.
"""


class Clients:
    """All clients of a run with these settings, and their and the server's computations.

    Parameters
    ----------
    settings : settings of the run; the server's comparison group is given later
    stream : dense model
    scratch : directory for masks
    published_ties : True to break ties by the rules of the paper's code instead of the settings
    """

    def __init__(
        self,
        settings: RunSettings,
        stream: BlockStream,
        scratch: Path,
        published_ties: bool = False,
    ) -> None:
        self.settings = settings
        self.published_ties = published_ties
        self.stream = stream
        self.plan = stream.model.plan
        self.store = BlobStore(scratch)
        job = settings.of(FedPrLLMSettings)
        pruning = LocalPruning(job.metric, job.sparsity, job.local_group)
        self.choose = pruning.prune_mask
        self.watch = watch_for(pruning)
        self._decided: dict[tuple[str, str], VoteResult] = {}

    def ties_of(self, group: str) -> str:
        """Return the tie rule in a comparison group."""
        return (
            PUBLISHED_TIES[group]
            if self.published_ties
            else self.settings.of(FedPrLLMSettings).ties
        )

    @cached_property
    def samples(self) -> list[Tensor]:
        """Calibration samples of each client, (data.num-samples, data.sequence-length), int64."""
        encode = self.stream.model.encode
        return [
            client_samples(self.settings, simulated_node(), encode, client)
            for client in range(self.settings.num_clients)
        ]

    @cached_property
    def masks(self) -> list[list[str]]:
        """Hash of each client's masks of each block."""
        return [self._prune(samples) for samples in self.samples]

    def local_baseline(self, client: int) -> Edits:
        """Return the local baseline of one client."""
        return self._masked(self.masks[client])

    @cached_property
    def centralized(self) -> Edits:
        """Centralized baseline: one party with the samples of all clients."""
        return self._masked(self._prune(torch.cat(self.samples)))

    def decide(self, strategy: str, group: str) -> VoteResult:
        """Return the server's decision by the clients' votes.

        It includes the vote counts, so that weights can be scaled or not.
        """
        if (strategy, group) not in self._decided:
            varied = {
                "vote_group": group,
                "weight_scaling": True,
                "ties": self.ties_of(group),
            }
            job = self.settings.of(FedPrLLMSettings).model_copy(update=varied)
            settings = self.settings.model_copy(update={"job": job})
            result = VoteResult(settings, self.stream.model, self.store)
            if strategy == "one-shot":
                for block in self.plan.blocks:
                    result.decide(block, self._votes[block.index])
            else:
                self._decide_block_by_block(result)
            self._decided[strategy, group] = result
        return self._decided[strategy, group]

    @cached_property
    def _votes(self) -> list[Mapping[str, VoteCounter]]:
        """One-shot votes of all clients, by block and linear."""
        return [
            self._count(block, [hashes[block.index] for hashes in self.masks])
            for block in self.plan.blocks
        ]

    def _count(self, block: BlockPlan, hashes: list[str]) -> dict[str, VoteCounter]:
        votes = [unpack_tensors(self.store.get(blob)) for blob in hashes]
        return _counted(
            block,
            [
                {linear.name: vote[mask_name(linear.name)] for linear in block.linears}
                for vote in votes
            ],
        )

    @torch.no_grad()
    def _decide_block_by_block(self, result: VoteResult) -> None:
        """Decide by iterative pruning (section 3.2.3).

        All clients vote on a block, the server decides, and all continue behind the pruned block.
        """
        everybody: list[Activations] = [self.stream.start(samples) for samples in self.samples]
        for block in self.plan.blocks:
            votes = []
            for activations in everybody:
                masks = choose_in_dense_block(
                    self.stream, activations, block.index, self.choose, self.watch
                )
                votes.append(
                    {
                        name: pack(mask.cpu().numpy().astype(np.bool_))
                        for name, mask in masks.items()
                    }
                )
            result.decide(block, _counted(block, votes))
            with self.stream.block(block.index, masked(result.prune_masks)(block.index)) as pruned:
                for activations in everybody:
                    activations.through(block.index, pruned)

    def _prune(self, samples: Tensor) -> list[str]:
        pruned = prune_by_block(self.stream, samples, self.choose, self.watch)
        return [self.store.put(pack_masks(masks)) for _, masks in pruned]

    def _masked(self, hashes: list[str]) -> Edits:
        return masked(
            lambda index: unpack_masks(self.plan.blocks[index], self.store.get(hashes[index]))
        )


def _counted(block: BlockPlan, votes: Sequence[Mapping[str, Words]]) -> dict[str, VoteCounter]:
    """Return the votes of all clients on one block, given packed masks by canonical linear name."""
    counters = {linear.name: vote_counter(linear.shape, len(votes)) for linear in block.linears}
    for name, counter in counters.items():
        counter.count(np.stack([vote[name] for vote in votes]))
    return counters

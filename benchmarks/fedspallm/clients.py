"""Clients of one FedSpaLLM setting in this process, with the functions of the app.

A client's work does not depend on the number of others or on the server's aggregation. So a study
prunes once per client, and aggregates in several ways.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from espalier.data.client_text import client_samples
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.calibration import prune_layers
from espalier.hf.stream.edits import Edits, replaced
from espalier.messages.blobs.mask_tensors import pack_kept, unpack_kept
from espalier.messages.blobs.masks import kept_name, mask_name
from espalier.methods.pruning.fedspallm import FedSpaLLMSettings
from espalier.models.plan import BlockPlan, LinearPlan
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.selection.local_pruning import LocalPruning
from pruning_kernels.votes.kept_mean import KeptMean, kept_mean
from pruning_kernels.votes.vote_counter import vote_counter
from pruning_kernels.votes.votes import VoteCounter
from strategies.pruning.fedspallm.global_model import KeptResult


class Clients:
    """All clients of a run with these settings.

    Parameters
    ----------
    settings : settings of the run; those of the aggregation are given later
    stream : dense model
    scratch : directory for pruned layers
    """

    def __init__(self, settings: RunSettings, stream: BlockStream, scratch: Path) -> None:
        self.settings = settings
        self.stream = stream
        self.plan = stream.model.plan
        self.store = BlobStore(scratch)
        self._layers: dict[int, list[str]] = {}

    @cached_property
    def samples(self) -> list[Tensor]:
        """Calibration samples of each client, (data.num-samples, data.sequence-length), int64."""
        encode = self.stream.model.encode
        return [
            client_samples(self.settings, simulated_node(), encode, client)
            for client in range(self.settings.num_clients)
        ]

    def layers(self, client: int) -> list[str]:
        """Return the hash of each layer as a client prunes it."""
        if client not in self._layers:
            self._layers[client] = self._prune(self.samples[client])
        return self._layers[client]

    def standalone(self, client: int) -> Edits:
        """Return a client's own model."""
        return self._edits(self.layers(client))

    def centralized(self, clients: Sequence[int]) -> Edits:
        """Return the centralized baseline: one party with the samples of some clients."""
        return self._edits(self._prune(torch.cat([self.samples[client] for client in clients])))

    def fold(self, clients: Sequence[int], settings: RunSettings) -> KeptResult:
        """Return the server's aggregation of some clients' layers with these settings."""
        result = KeptResult(settings, self.stream.model, self.store)
        for block in self.plan.blocks:
            result.decide(block, 1, self._folded(block, clients))
        return result

    def _folded(
        self, block: BlockPlan, clients: Sequence[int]
    ) -> Iterator[tuple[LinearPlan, KeptMean, VoteCounter]]:
        sent = [load(self.store.get(self.layers(client)[block.index])) for client in clients]
        for linear in block.linears:
            mean = kept_mean(linear.shape)
            votes = vote_counter(linear.shape, len(clients))
            masks = [tensors[mask_name(linear.name)].numpy() for tensors in sent]
            for mask, tensors in zip(masks, sent, strict=True):
                mean.add(mask, tensors[kept_name(linear.name)].to(torch.float32).numpy())
            votes.count(torch.stack([torch.from_numpy(mask) for mask in masks]).numpy())
            yield linear, mean, votes

    def _prune(self, samples: Tensor) -> list[str]:
        job = self.settings.of(FedSpaLLMSettings)
        pruning = LocalPruning(job.local_method, job.sparsity, job.local_group, job.damping_mean)
        layers = prune_layers(self.stream, samples, pruning, range(len(self.plan.blocks)))
        return [self.store.put(pack_kept(layer.matrices)) for layer in layers]

    def _edits(self, hashes: list[str]) -> Edits:
        blocks = self.plan.blocks
        return replaced(
            lambda i: {
                name: m.weight()
                for name, m in unpack_kept(blocks[i], self.store.get(hashes[i])).items()
            }
        )

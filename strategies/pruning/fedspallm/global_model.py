"""Global model of FedSpaLLM: mask, kept weights and version of every layer, also at each client.

The data are in the checkpoint's blobs, one per layer; this object has the hashes and the reported
numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from espalier.hf.files.dtypes import TORCH_DTYPES
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.edits import WeightEdit, replaced
from espalier.messages.blobs.mask_tensors import PrunedMatrix, pack_kept, unpack_kept
from espalier.messages.blobs.masks import kept_specs, mask_name
from espalier.messages.tensor_blobs import views
from espalier.methods.pruning.fedspallm import FedSpaLLMSettings, Update, num_kept, sparsity_of
from espalier.models.plan import BlockPlan, LinearPlan, block_key, cut_into_parts
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.votes.bitmask import Words, count, num_words, unpack
from pruning_kernels.votes.kept_mean import KeptMean
from pruning_kernels.votes.votes import VoteCounter, magnitudes
from strategies.base.method import RunResult
from strategies.base.rounds import Rounds


@dataclass(frozen=True)
class Layers:
    """Global model at one point in time; all layers, including dense ones."""

    versions: list[int]
    """Round in which each layer was last pruned; 0 for a dense layer."""
    blobs: list[str]
    """Hash of each pruned layer in the store; empty for a dense layer."""
    num_kept: list[list[int]]
    """Number of kept weights in each matrix of a pruned layer."""


class KeptResult(RunResult):
    """Layers of a run after the last round; the pruned ones are in ``store``."""

    STATE = ("versions", "blobs", "num_kept", "unanimous", "kept_zeros", "local_share")

    def __init__(self, settings: RunSettings, model: OpenedModel, store: BlobStore) -> None:
        self.run = settings
        self.settings = settings.of(FedSpaLLMSettings)
        self.model = model
        self.store = store
        self.versions = [0] * len(model.plan.blocks)
        """Round in which each layer was last pruned; 0 for a dense layer."""
        self.blobs = [""] * len(model.plan.blocks)
        """Hash of each pruned layer in the store; empty for a dense layer."""
        self.num_kept: list[list[int]] = [[] for _ in model.plan.blocks]
        """Number of kept weights in each matrix of a pruned layer."""
        self.unanimous = [0] * len(model.plan.blocks)
        """Number of weights of each layer that every sampling client pruned, before expansion."""
        self.kept_zeros = [0] * len(model.plan.blocks)
        """Number of kept weights of each layer that are zero; see ``zeros_beyond_masks``."""
        self.local_share = 0.0
        """Sparsity of a client's own model, averaged over the clients of the last round."""
        self.before = self.layers()
        """Global model at the start of the last round."""

    def state(self) -> dict[str, Any]:
        """Return hashes and numbers of all layers."""
        return super().state() | {"before": asdict(self.before)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        super().restore(state)
        self.before = Layers(**state["before"])

    def layers(self) -> Layers:
        """Return a copy of the present global model, which later rounds do not change."""
        return Layers(list(self.versions), list(self.blobs), list(self.num_kept))

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        # Each blob once: layers that did not change are in both models.
        return [key for key in dict.fromkeys([*self.blobs, *self.before.blobs]) if key]

    def unfinished(self) -> list[int]:
        """Return the layers that are not yet pruned to the run's sparsity."""
        reached = [
            version > 0 and sparsity_of(self.run, version) == self.settings.sparsity
            for version in self.versions
        ]
        return [index for index, done in enumerate(reached) if not done]

    def decide(
        self,
        block: BlockPlan,
        server_round: int,
        folded: Iterator[tuple[LinearPlan, KeptMean, VoteCounter]],
    ) -> None:
        """Make one layer of the global model from its sums and votes (equations 5 to 7)."""
        matrices = {}
        unanimous = 0
        zeros = 0
        for linear, mean, votes in folded:
            weight = mean.mean(self.settings.aggregation)
            pruned_by_all = votes.unanimous()
            unanimous += count(pruned_by_all)
            words = pruned_by_all
            # Without expansion only weights that every client pruned are pruned (equation 6).
            if self.settings.mask_expansion:
                # Equation 7: of weights that equally many clients pruned, those with the smaller
                # mean come first. As in the whole program, ``int(s * d)`` weights are pruned; the
                # paper rounds up.
                words = votes.most_voted(
                    sparsity_of(self.run, server_round),
                    self.settings.server_group,
                    magnitudes(torch.from_numpy(weight)),
                )
            prune_mask = torch.from_numpy(unpack(words, linear.shape))
            # Rounded to the model's dtype once, after the mean.
            kept = torch.from_numpy(weight)[~prune_mask].to(TORCH_DTYPES[linear.dtype])
            # Zeros that are not of the dense model come from weights that all clients pruned.
            dense = self.model.checkpoint.read(linear.parameter)[~prune_mask]
            zeros += int(((kept == 0) & (dense != 0)).sum())
            matrices[linear.name] = PrunedMatrix(words, linear.shape, kept)
        self.blobs[block.index] = self.store.put(pack_kept(matrices))
        self.versions[block.index] = server_round
        self.num_kept[block.index] = [
            matrices[linear.name].kept.numel() for linear in block.linears
        ]
        self.unanimous[block.index] = unanimous
        self.kept_zeros[block.index] = zeros

    def note_local_models(self, sampled: Sequence[Sequence[int]], server_round: int) -> None:
        """Set ``before`` and ``local_share`` before the round's layers are decided (equation 9)."""
        # The layers that this round does not change are part of the clients' own models.
        self.before = self.layers()
        blocks = self.model.plan.blocks
        total = self.model.plan.num_weights
        local = [sum(num_kept(block, self.run, server_round).values()) for block in blocks]
        before = [
            # A layer that was never pruned is dense.
            sum(kept) if kept else block.num_weights
            for block, kept in zip(blocks, self.num_kept, strict=True)
        ]
        kept = [
            sum(local[i] if i in indices else before[i] for i in range(len(blocks)))
            for indices in sampled
        ]
        # Mean of the clients' sparsities (equation 9): own layers where sampled, else the global
        # ones.
        self.local_share = sum(1 - number / total for number in kept) / len(kept)

    def num_bytes(self, index: int, num_kept: Sequence[int]) -> int:
        """Return the bytes of one pruned layer whose matrices keep ``num_kept`` weights."""
        block = self.model.plan.blocks[index]
        kept = dict(zip((linear.name for linear in block.linears), num_kept, strict=True))
        return sum(spec.num_bytes for spec in kept_specs(block, kept).values())

    def matrices(self, index: int) -> dict[str, PrunedMatrix]:
        """Return one layer by canonical linear name; empty if it is dense."""
        if not self.versions[index]:
            return {}
        return unpack_kept(self.model.plan.blocks[index], self.store.get(self.blobs[index]))

    def packed_masks(self, index: int) -> dict[str, Words]:
        """Return the packed prune masks of one layer by canonical linear name."""
        linears = self.model.plan.blocks[index].linears
        if not self.versions[index]:
            return {
                linear.name: np.zeros(num_words(linear.num_weights), np.uint64)
                for linear in linears
            }
        tensors = views(self.store.get(self.blobs[index]))
        return {linear.name: tensors[mask_name(linear.name)] for linear in linears}

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """Return the edits of one layer's dense weights."""
        weights = {name: matrix.weight() for name, matrix in self.matrices(index).items()}
        return replaced(lambda _: weights)(index)

    def zeros_beyond_masks(self) -> int:
        """Return the number of kept weights that are zero.

        Every client pruned them, or they were pruned in an earlier round.
        """
        return sum(self.kept_zeros)

    def local_sparsity(self) -> float:
        """Return the sparsity of a client's own model, averaged over clients."""
        return self.local_share

    def centralized_sparsity(self) -> float:
        """Return the sparsity of the centralized baseline: every layer at the final sparsity."""
        kept = sum(
            sum(num_kept(block, self.run, self.run.federation.rounds).values())
            for block in self.model.plan.blocks
        )
        return 1 - kept / self.model.plan.num_weights

    def report(self) -> dict[str, Any]:
        """Return the method's own entries of ``summary.json``."""
        return {
            "layer_versions": self.versions,
            "sparsity_before_expansion": sum(self.unanimous) / self.model.plan.num_weights,
        }


class ClientLayers:
    """Version of every layer at every client; at first all clients have the dense model."""

    def __init__(self, result: KeptResult, part_bytes: int) -> None:
        self.result = result
        self.part_bytes = part_bytes
        self._versions: dict[int, list[int]] = {}

    def state(self) -> dict[str, list[int]]:
        """Return the versions by client, for a checkpoint."""
        return {str(client): versions for client, versions in sorted(self._versions.items())}

    def restore(self, state: dict[str, list[int]]) -> None:
        """Restore the versions that ``state`` returned."""
        self._versions = {int(client): versions for client, versions in state.items()}

    def forget(self, client: int) -> None:
        """Reset a client that lost its layers to the dense model."""
        self._versions.pop(client, None)

    def stale(self, client: int, model: Layers) -> list[int]:
        """Return the layers whose version at a client differs from the model's."""
        client_versions = self._versions_at(client)
        return [
            index
            for index, version in enumerate(model.versions)
            if version != client_versions[index]
        ]

    def push(
        self,
        rounds: Rounds,
        server_round: int,
        model: Layers,
        ends: Mapping[int, int] | None = None,
    ) -> None:
        """Push to every active client its stale layers, part by part.

        Clients that need the same part receive it in the same step, and their messages share its
        blobs. So only one part is in memory, for any number of clients. ``ends`` has the number of
        layers that each client reads; later layers are not pushed. None means all.
        """
        active = [seat.client for seat in rounds.roster.active()]
        if ends is None:
            ends = dict.fromkeys(active, len(model.versions))
        stale = {
            client: [index for index in self.stale(client, model) if index < end]
            for client, end in ends.items()
            if client in active
        }
        parts = {client: self._parts(model, blocks) for client, blocks in stale.items() if blocks}
        # Parts in lockstep, so that memory holds one part for all clients.
        for part in range(max(map(len, parts.values()), default=0)):
            client_blocks = {client: cut[part] for client, cut in parts.items() if part < len(cut)}
            # Clients with the same missing layers share the message's blobs.
            for blocks in sorted(set(client_blocks.values())):
                update = Update(
                    blocks=list(blocks),
                    versions=[model.versions[index] for index in blocks],
                    num_kept=[number for index in blocks for number in model.num_kept[index]],
                )
                store = self.result.store
                blobs = {block_key(index): store.get(model.blobs[index]) for index in blocks}
                requests = [
                    rounds.request("push", seat.client, server_round, update, blobs, part)
                    for seat in rounds.roster.active()
                    if client_blocks.get(seat.client) == blocks
                ]
                list(rounds.exchange(requests))
        # Noted after the exchange, also for clients that failed: they receive nothing more.
        for client in parts:
            client_versions = self._versions_at(client)
            self._versions[client] = [
                model.versions[index] if index in stale[client] else client_versions[index]
                for index in range(len(client_versions))
            ]

    def _versions_at(self, client: int) -> list[int]:
        return self._versions.get(client, [0] * len(self.result.versions))

    def _parts(self, model: Layers, blocks: list[int]) -> list[tuple[int, ...]]:
        sizes = [self.result.num_bytes(index, model.num_kept[index]) for index in blocks]
        cut = cut_into_parts(sizes, self.part_bytes)
        return [tuple(blocks[place] for place in part) for part in cut]

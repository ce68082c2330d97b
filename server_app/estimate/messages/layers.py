"""Messages of FedSpaLLM: sampled layers go up, stale layers down.

The samples are those that the run will draw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from espalier.messages.blobs.kept_weights import kept_specs
from espalier.methods.fedspallm.contract import Sample, Update, num_kept, sparsity_of
from espalier.methods.fedspallm.settings import FedSpaLLMSettings
from espalier.models.plan import cut_into_parts
from espalier.settings.run import RunSettings
from pruning_kernels.selection.comparison_groups import pruned_in_matrix
from server_app.estimate.exchange import Exchange
from server_app.estimate.messages.base import Messages
from strategies.fedspallm.layer_sampling import drawn_layers, layers_per_client


@dataclass(frozen=True)
class Sampled:
    """Samples of one round, if no client fails."""

    samples: Mapping[int, Sequence[int]]
    before: tuple[int, ...]
    """Version of each layer at the start of the round."""


class KeptLayers(Messages):
    """Messages of a method that samples layers for each client in each round."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.job = self.settings.of(FedSpaLLMSettings)
        self.rounds, self.versions = self._drawn()
        self._trained, self._brought = cache(self._train), cache(self._bring)
        self._held: dict[int, list[int]] = {}

    @classmethod
    def differs(cls, settings: RunSettings) -> str:
        """Return what the size depends on: capabilities, and overlap of pruned weights."""
        job = settings.of(FedSpaLLMSettings)
        open_ones = []
        if not job.capabilities and job.sampled_layers < 1:
            open_ones.append("layers are sampled as for nodes of equal capability")
        if not job.mask_expansion:
            open_ones.append(
                "without mask expansion the global model keeps more weights the less clients agree"
            )
        return "; ".join(open_ones)

    @property
    def num_rounds(self) -> int:
        """Number of configured rounds, plus rounds for layers that no sample reached."""
        return len(self.rounds)

    def _drawn(self) -> tuple[list[Sampled], tuple[int, ...]]:
        """Return all rounds, and the versions of the layers after the last one."""
        blocks = len(self.model.plan.blocks)
        clients = range(self.settings.num_clients)
        planned = self.settings.federation.rounds
        capabilities = {
            client: self.job.capability_of(client) if self.job.capabilities else 1.0
            for client in clients
        }
        places = layers_per_client(blocks, self.job.sampled_layers, capabilities)
        versions = [0] * blocks
        rounds = list[Sampled]()
        while len(rounds) < planned or self._unfinished(versions):
            number = len(rounds) + 1
            layers = list(range(blocks)) if number <= planned else self._unfinished(versions)
            samples = drawn_layers(self.settings.seed, number, layers, versions, places)
            rounds.append(
                Sampled({client: own for client, own in samples.items() if own}, tuple(versions))
            )
            for index in {index for own in samples.values() for index in own}:
                versions[index] = number
        return rounds, tuple(versions)

    def _unfinished(self, versions: Sequence[int]) -> list[int]:
        done = [
            version > 0 and sparsity_of(self.settings, version) == self.job.sparsity
            for version in versions
        ]
        return [index for index, finished in enumerate(done) if not finished]

    def round_of(self, client: int, server_round: int) -> list[Exchange]:
        """Return the stale layers that the client will read, and its sample in both directions."""
        drawn = self.rounds[server_round - 1]
        if server_round == 1:
            self._held[client] = [0] * len(drawn.before)
        if client not in drawn.samples:
            return []
        sample = tuple(drawn.samples[client])
        brought = self._update(client, server_round, drawn.before, sample[-1] + 1)
        return brought + self._trained(server_round, sample)

    def _train(self, server_round: int, sample: tuple[int, ...]) -> list[Exchange]:
        order = Sample(blocks=list(sample), versions=list(self.rounds[server_round - 1].before))
        return self.post.train(server_round, order, {"blocks": list(sample)})

    def result_of(self, client: int) -> list[Exchange]:
        """Return the layers around the client's own ones, and the result if it is evaluated."""
        found = self._update(client, self.num_rounds, self.rounds[-1].before) if self.asked else []
        if self.settings.evaluation.own_text:
            found = found + self._update(client, self.num_rounds + 1, self.versions)
        return found

    def _update(
        self, client: int, server_round: int, versions: Sequence[int], end: int | None = None
    ) -> list[Exchange]:
        held = self._held[client]
        stale = tuple(
            index
            for index, version in enumerate(versions)
            if version != held[index] and (end is None or index < end)
        )
        for index in stale:
            held[index] = versions[index]
        return self._brought(server_round, stale, tuple(versions[index] for index in stale))

    def _bring(
        self, server_round: int, blocks: tuple[int, ...], versions: tuple[int, ...]
    ) -> list[Exchange]:
        kept = [self._kept(index, version) for index, version in zip(blocks, versions, strict=True)]
        plans = [self.model.plan.blocks[index] for index in blocks]
        sizes = [
            sum(spec.num_bytes for spec in kept_specs(plan, own).values())
            for plan, own in zip(plans, kept, strict=True)
        ]
        found = []
        for part, places in enumerate(
            cut_into_parts(sizes, self.settings.part_bytes) if blocks else ()
        ):
            update = Update(
                blocks=[blocks[place] for place in places],
                versions=[versions[place] for place in places],
                num_kept=[number for place in places for number in kept[place].values()],
            )
            found.append(self.post.exchange("deliver", server_round, update, part=part))
        return found

    def _kept(self, index: int, version: int) -> dict[str, int]:
        """Return the number of kept weights of each matrix, by canonical linear name."""
        block = self.model.plan.blocks[index]
        sparsity = sparsity_of(self.settings, version)
        if self.job.mask_expansion:
            group = self.job.server_group
            return {
                linear.name: linear.num_weights - pruned_in_matrix(linear.shape, sparsity, group)
                for linear in block.linears
            }
        local = num_kept(block, self.settings, version)
        if self.case == "least":
            return local
        clients = sum(index in own for own in self.rounds[version - 1].samples.values())
        if self.case == "most":
            return {
                linear.name: min(linear.num_weights, clients * local[linear.name])
                for linear in block.linears
            }
        # Usual case: independent masks, so a weight is pruned only if all clients of the round
        # prune it.
        gone = {
            linear.name: 1 - local[linear.name] / linear.num_weights for linear in block.linears
        }
        return {
            name: round(block.linear(name).num_weights * (1 - share**clients))
            for name, share in gone.items()
        }

"""FedSpaLLM (papers: "FedSpaLLM: Federated Pruning of Large Language Models").

In every round each client prunes the layers that were sampled for it (equation 8, algorithm 1) and sends their masks and kept
weights. The server takes, for each weight, the mean over the clients that kept it (equation 5), and prunes the weights that
most clients pruned until the sparsity is reached (equations 6 and 7). A layer is a decoder block. Layers that a round did
not reach, because the samples are too few or their clients died, are pruned in further rounds.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from espalier.settings.mistakes import Mistake
from espalier.settings.seeds import derive_seed
from espalier.wire.fedspallm import Sample, SamplePart, sample_parts
from espalier.wire.kept import kept_name
from espalier.wire.masks import mask_name
from espalier.wire.messages import Letter
from espalier.wire.payload import block_key
from espalier.wire.plan import BlockPlan, LinearPlan
from pruning_kernels.kept_mean import KeptMean
from pruning_kernels.votes import VoteCounter
from strategies.engine.capped import count_claims
from strategies.engine.counting import require_counting
from strategies.engine.evaluation import ClientEvaluation
from strategies.engine.inbox import Inbox
from strategies.engine.method import Method
from strategies.engine.run import Run
from strategies.methods.held_layers import HeldLayers
from strategies.methods.layer_sampling import layers_per_client, require_places, sample_layers
from strategies.methods.pattern_fit import require_pattern_fits
from strategies.results.kept import KeptResult

LARGEST_KEPT = 100
"""A kept weight may be so many times as large as the largest of its dense matrix; SparseGPT's updates stay far below."""


class FedSpaLLM(Method):
    """l0 aggregation with mask expansion and layer sampling.

    Parameters
    ----------
    run : settings, dense model and run folder
    public_text : name -> windows (windows, tokens), int64, on which clients evaluate their own result; may be empty
    """

    def __init__(self, run: Run, public_text: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(run, ClientEvaluation(run, public_text or {}))
        self.settings = run.settings.fedspallm
        self.plan = run.model.plan
        require_pattern_fits(run.model.plan, "fedspallm", self.settings)
        require_counting(run.device, run.settings.device)
        self.result = KeptResult(run.settings, run.model, run.checkpoint.blobs)
        self.held = HeldLayers(self.result, run.settings.part_bytes)
        self._samples: dict[int, list[int]] = {}
        self._reply_hashes: dict[int, list[str]] = {}
        self._largest: dict[str, float] = {}
        self._weights: dict[int, float] = {}

    @property
    def num_rounds(self) -> int:
        """The rounds of the settings, and one more as long as a layer is not pruned to the sparsity."""
        finished = self.rounds.finished
        more = finished >= self.settings.rounds and self.result.unfinished()
        return max(self.settings.rounds, finished + 1 if more else finished)

    def summary(self) -> None:
        """Show what will be done."""
        job = self.settings
        amount = f"pattern {job.pattern}" if job.pattern else f"{job.sparsity:.0%} sparsity"
        expansion = "mask expansion" if job.mask_expansion else "no mask expansion"
        text = f"{job.local_method}, {job.aggregation} mean, {expansion}, {job.sampled_layers:.0%} of the layers sampled"
        self.run.progress.note("method", f"fedspallm    {amount}, {text}")

    def state(self) -> dict[str, Any]:
        """The global model, and what each client holds of it."""
        return {"layers": self.result.state(), "held": self.held.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""
        self.result.restore(state["layers"])
        self.held.restore(state["held"])

    def stored(self) -> Collection[str]:
        """Hashes of the result's blobs."""
        return self.result.stored()

    def prepare(self, server_round: int) -> Iterator[list[Message]]:
        """Sample layers for every client, and bring it the stale ones that it will read: those up to its last sampled one.

        Before the first round there are none. When clients do not take them, layers are sampled again for those that are left,
        unless clients were asked before the run was resumed: they answer a round once.
        """
        asked, before = set[int](), self.run.folder.load_samples(server_round)
        while (active := {seat.client for seat in self.rounds.roster.active()}) and active != asked:
            asked, self._samples = active, self._draw(server_round) if before is None else before
            ends = {client: blocks[-1] + 1 for client, blocks in self._samples.items()}
            yield from self.held.updates(self.rounds, server_round, self.result.layers(), ends)

    def deliver(self, server_round: int) -> Iterator[list[Message]]:
        """Bring the clients what they evaluate and do not hold: the model that their own layers belong in, and the result.

        A client's own model is its layers of the last round in the global model that the round began with (equation 9); the
        result is evaluated on a client's own text alone.
        """
        if self.evaluation.asked:
            yield from self.held.updates(self.rounds, server_round, self.result.before)
        if self.run.settings.evaluation.own_text:
            yield from self.held.updates(self.rounds, server_round + 1, self.result.layers())

    # ----- the round --------------------------------------------------------------------------------------------------

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask every client to prune the layers that ``prepare`` sampled for it (algorithm 1, lines 3 to 7)."""
        self.run.folder.save_samples(server_round, self._samples)
        active = {seat.client for seat in self.rounds.roster.active()}
        self._samples = {client: blocks for client, blocks in self._samples.items() if client in active}
        sampled = {index for blocks in self._samples.values() for index in blocks}
        if left := sorted(set(self._to_sample(server_round)) - sampled):
            text = f"round {server_round} does not reach layers {', '.join(map(str, left))}"
            self.run.progress.note("not_covered", text, round=server_round, layers=left)
        self.rounds.lost = {}
        return self._orders(server_round, self._samples)

    def _orders(self, server_round: int, clients: Iterable[int]) -> list[Message]:
        requests = []
        for client in clients:
            sample = Sample(blocks=self._samples[client], versions=self.result.versions)
            requests.append(self.rounds.request("train", self.rounds.roster.seats[client], server_round, sample))
        return requests

    def _caught_up(self, server_round: int) -> Iterator[Message]:
        """Bring clients that lost their layers of the global model those that they read in this round, and ask again."""
        lost = {client: self._samples[client][-1] + 1 for client in sorted(self.rounds.lost or {})}
        for client in lost:
            self.held.forget(client)
        for requests in self.held.updates(self.rounds, server_round, self.result.layers(), lost):
            for _ in self.rounds.exchange(requests):
                pass
        active = {seat.client for seat in self.rounds.roster.active()}
        yield from self.rounds.exchange(
            self._orders(server_round, [client for client in lost if client in active]), self.next_part
        )

    def _draw(self, server_round: int) -> dict[int, list[int]]:
        """The layers of each client in a round: of all, those that were pruned longest ago first if not all can be covered."""
        generator = np.random.default_rng(derive_seed(self.run.settings.seed, "layers", server_round=server_round))
        everybody = layers_per_client(len(self.plan.blocks), self.settings.sampled_layers, self._capabilities())
        places = {seat.client: everybody[seat.client] for seat in self.rounds.roster.active()}
        layers = self._to_sample(server_round)
        order = generator.permutation(len(layers))
        by_age = sorted((layers[place] for place in order), key=lambda index: self.result.versions[index])
        if server_round == 1:
            seats = self.rounds.roster.seats
            require_places(self.settings, len(layers), {seats[client].site: number for client, number in places.items()})
        return sample_layers(by_age, places, generator)

    def _to_sample(self, server_round: int) -> list[int]:
        """Layers from which a round's samples are drawn."""
        return list(range(len(self.plan.blocks))) if server_round <= self.settings.rounds else self.result.unfinished()

    def _capabilities(self) -> dict[int, float]:
        """What each client can compute, dropped ones included: as the settings say, else as the nodes do, within a ratio."""
        seats = [seat for _, seat in sorted(self.rounds.roster.seats.items())]
        if self.settings.capabilities:
            return {seat.client: self.settings.capability_of(seat.client) for seat in seats}
        measured = [seat.site for seat in seats if seat.measured]
        if measured and len(measured) < len(seats):
            raise Mistake(
                f"capability: {', '.join(measured)} measured its own, others state theirs, and the two cannot be compared; "
                "set it on every node or to 0 on every node"
            )
        stated = {seat.client: seat.capability for seat in seats}
        return count_claims(self.rounds, "capability", stated, self.settings.max_capability_ratio)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Fold the sampled layers, one after the other (lines 15 to 18)."""
        self.run.progress.begin("layers", len(self.rounds.roster.active()))
        inbox = Inbox(self.run.folder.inbox)
        for letter in inbox.receive(chain(replies, self._caught_up(server_round))):
            self._note_arrival(letter)
        complete = [client for client in inbox.complete_clients() if self._is_plausible(inbox, client)]
        self.rounds.require_quorum(len(complete), "sent their layers")
        claimed = {client: self._claimed_weight(client) for client in complete}
        self._weights = count_claims(self.rounds, "weight", claimed, self.settings.max_weight_ratio)
        self.result.note_local_models([self._samples[client] for client in complete], server_round)
        sampled = sorted({index for client in complete for index in self._samples[client]})
        self.run.progress.begin("folding", len(sampled))
        for index in sampled:
            clients = [client for client in complete if index in self._samples[client]]
            block = self.plan.blocks[index]
            self.result.decide(block, server_round, self._folded(inbox, block, clients))
            self.run.progress.step("folded", f"layer {index} of {len(clients)} clients", block=index, clients=clients)
        inbox.clear()
        return None, MetricRecord({"num-clients": len(complete), "num-layers": len(sampled)})

    def _is_plausible(self, inbox: Inbox, client: int) -> bool:
        """Whether no kept weight is far beyond the dense ones; nothing else bounds what one client does to a mean."""
        for block in (self.plan.blocks[index] for index in self._samples[client]):
            for linear in block.linears:
                largest = self._largest_dense(linear)
                kept = inbox.tensor(client, block_key(block.index), kept_name(linear.name))
                if kept.numel() and kept.abs().max().item() > LARGEST_KEPT * largest:
                    reason = f"a kept weight is over {LARGEST_KEPT} times the largest dense one"
                    where = f"{block_key(block.index)} {linear.name}"
                    self.rounds.drop("train", self.rounds.roster.seats[client], f"reply refused: {where}: {reason}")
                    return False
        return True

    def _largest_dense(self, linear: LinearPlan) -> float:
        if linear.parameter not in self._largest:
            self._largest[linear.parameter] = self.run.model.checkpoint.read(linear.parameter).abs().max().item()
        return self._largest[linear.parameter]

    def _folded(self, inbox: Inbox, block: BlockPlan, clients: list[int]) -> Iterator[tuple[LinearPlan, KeptMean, VoteCounter]]:
        """Sum and votes of each matrix of a layer, over the clients that sampled it, in order of client."""
        key = block_key(block.index)
        for linear in block.linears:
            mean = KeptMean(linear.shape, self.run.device)
            votes = VoteCounter(linear.shape, len(clients), self.run.device)
            for client in clients:
                weight = self._weights[client]
                kept = inbox.tensor(client, key, kept_name(linear.name)).to(torch.float32).numpy()
                mean.add(inbox.tensor(client, key, mask_name(linear.name)).numpy(), kept, weight)
            for first, masks in inbox.words(key, mask_name(linear.name), clients):
                votes.count(masks, first)
            yield linear, mean, votes

    def _claimed_weight(self, client: int) -> float:
        """What a client would weigh by what it says; see ``capped``."""
        if self.settings.client_weights == "equal":
            return 1.0
        return float(self.rounds.roster.seats[client].metrics["calibration_windows"])

    def next_part(self, letter: Letter) -> Message | None:
        """Ask for the part of a client's layers that follows the one which has arrived."""
        header = letter.header
        if header.kind == "train":
            self._reply_hashes[header.client] = letter.scalars["blob_sha256"]
        blocks = self._samples[header.client]
        parts, following = sample_parts(self.plan, self.run.settings, header.server_round, blocks), header.part + 1
        if following == len(parts):
            return None
        hashes = [self._reply_hashes[header.client][blocks.index(index)] for index in parts[following]]
        seat = self.rounds.roster.seats[header.client]
        part = SamplePart(blocks=blocks, blob_sha256=hashes)
        return self.rounds.request("fetch", seat, header.server_round, part, part=following)

    def _note_arrival(self, letter: Letter) -> None:
        seat = self.rounds.roster.seats[letter.header.client]
        if letter.header.kind == "train":
            seat.worked(letter.scalars["seconds"])
            names = ("damping", *(["calibration_windows"] if self.settings.client_weights == "samples" else []))
            seat.metrics = {name: letter.scalars[name] for name in names} | {"layers": self._samples[seat.client]}
        if letter.header.part + 1 == letter.header.num_parts:
            number = len(self._samples[seat.client])
            self.run.progress.step(
                "layers", f"{number} layers of {seat.site}, {seat.work()}", client=seat.client, seconds=seat.seconds
            )

"""FedSpaLLM (paper: "FedSpaLLM: Federated Pruning of Large Language Models").

In every round each client prunes the layers that were sampled for it (equation 8, algorithm 1), and
sends their masks and kept weights. For each weight, the server takes the mean over the clients that
kept it (equation 5). It prunes the weights that most clients pruned until the sparsity is reached
(equations 6 and 7). A layer is a decoder block. Layers that the planned rounds did not reach,
because of too few samples or failed clients, are pruned in further rounds.

If the clients' places suffice, every layer is sampled at least once. The layers, in random order,
are first assigned to random places of the clients; the remaining places are filled at random. All
layers are treated alike, so a client that prunes k of L layers has each layer with probability k /
L, and equal clients have equal probabilities.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.amounts import count
from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.blobs.masks import kept_name, mask_name, votes_name
from espalier.messages.message import MessageBody
from espalier.methods.pruning.fedspallm import (
    FedSpaLLMSettings,
    SampledBlocks,
    SampledBlocksPart,
    kept_scale,
)
from espalier.models.plan import BlockPlan, LinearPlan, block_key
from espalier.seeds import derive_seed
from espalier.settings.run import RunSettings
from pruning_kernels.lora.clipping import MIN_CLIENTS, SINGLE_NUMBERS, clip_rows
from pruning_kernels.votes.bitmask import Words, unpack
from pruning_kernels.votes.kept_mean import KeptMean, SummedMean, kept_mean
from pruning_kernels.votes.vote_counter import vote_counter
from pruning_kernels.votes.votes import VoteCounter
from strategies.averaging.client_weights import count_claims, counted_capabilities
from strategies.averaging.updates import UpdateLimits
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import ClientOrder, Method, ProgressWords, Selection
from strategies.base.public_samples import require_counting
from strategies.base.roster import Seat
from strategies.base.run import Run
from strategies.base.sums.unmasking import Sums
from strategies.masks import require_pattern_fits
from strategies.pruning.fedspallm.global_model import ClientLayers, KeptResult


def layers_per_client(
    num_layers: int, share: float, capabilities: Mapping[int, float]
) -> dict[int, int]:
    """Return k_i, the number of layers that each client prunes.

    The most capable client prunes the fraction ``share`` of all layers, the others proportionally
    fewer, but at least one: ``k_i = max(1, round(L * share * r_i / max r))``, with capabilities r_i
    > 0 in any unit.
    """
    largest = max(capabilities.values())
    return {
        client: max(1, round(num_layers * share * (value / largest)))
        for client, value in capabilities.items()
    }


def require_places(job: FedSpaLLMSettings, num_layers: int, places: Mapping[str, int]) -> None:
    """Raise InputError if ``coverage`` requires all layers, and the clients' places are fewer.

    ``places`` has k_i by the name of the client.
    """
    # A client cannot have more places than there are layers.
    total = sum(min(number, num_layers) for number in places.values())
    if total < num_layers and job.coverage == "every-round":
        numbers = ", ".join(f"{site} {number}" for site, number in places.items())
        raise InputError(
            f"fedspallm.sampled-layers = {job.sampled_layers}: the clients together prune"
            f" {count(total, 'layer')} in a round, the model has {num_layers} ({numbers}); raise"
            " it, or set fedspallm.coverage to 'over-rounds'"
        )


def drawn_layers(
    seed: int,
    server_round: int,
    layers: Sequence[int],
    versions: Sequence[int],
    places: Mapping[int, int],
) -> dict[int, list[int]]:
    """Draw the layers of every client in a round.

    If not all of ``layers`` can be covered, those that were pruned longest ago come first:
    ``versions`` has the round in which each layer of the model was last pruned.
    """
    # The seed of the round, so that a draw does not depend on earlier rounds.
    generator = np.random.default_rng(derive_seed(seed, "layers", server_round=server_round))
    order = generator.permutation(len(layers))
    # A stable sort of a random order: ties between equally old layers are random.
    by_age = sorted((layers[place] for place in order), key=lambda index: versions[index])
    return sample_layers(by_age, places, generator)


def sample_layers(
    layers: Sequence[int], places: Mapping[int, int], generator: np.random.Generator
) -> dict[int, list[int]]:
    """Draw the layers of every client, in ascending order and without repetition.

    The first of ``layers`` have precedence if not all can be covered. Places k_i above the number
    of layers are reduced to it.
    """
    sizes = {client: min(places[client], len(layers)) for client in sorted(places)}
    total = sum(sizes.values())
    # Only as many layers as there are places can be covered; they go to random places.
    first = generator.permutation(np.asarray(layers[:total], dtype=np.int64))
    seats = generator.permutation(np.repeat(list(sizes), list(sizes.values())))
    drawn: dict[int, list[int]] = {client: [] for client in sizes}
    for layer, client in zip(first, seats, strict=False):
        drawn[int(client)].append(int(layer))
    # The remaining places are filled with other layers, without repetition.
    for client, size in sizes.items():
        others = np.setdiff1d(np.asarray(layers, dtype=np.int64), drawn[client])
        drawn[client] += generator.choice(others, size - len(drawn[client]), replace=False).tolist()
    return {client: sorted(chosen) for client, chosen in drawn.items()}


FoldedMatrix = tuple[LinearPlan, KeptMean, VoteCounter]
"""Matrix, sum of its kept weights, and votes to prune them."""
LARGEST_KEPT = 100
"""Maximum ratio of a kept weight to the largest weight of its dense matrix.

Updates by SparseGPT stay far below this ratio.
"""


class FedSpaLLM(Method):
    """Strategy of FedSpaLLM: l0 aggregation with mask expansion and layer sampling."""

    WORDS = ProgressWords("layers", "layers", "layers")
    result: KeptResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.settings = run.settings.of(FedSpaLLMSettings)
        self.plan = run.model.plan
        require_counting(run.device, run.settings.device)
        self.result = KeptResult(run.settings, run.model, run.checkpoint.blobs)
        self.client_layers = ClientLayers(self.result, run.settings.part_bytes)
        self._sampled: dict[int, list[int]] = {}
        """Layers that each client of the round prunes."""
        self._largest: dict[str, float] = {}
        self._weights: dict[int, float] = {}
        self.limits = UpdateLimits(SINGLE_NUMBERS * run.settings.federation.update_limit)

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse a pattern that does not fit, or samples that cannot cover all layers."""
        require_pattern_fits(model.plan, settings)
        if capabilities:
            job = settings.of(FedSpaLLMSettings)
            numbers = dict(enumerate(capabilities.values()))
            if job.capabilities:
                numbers = {place: job.capability_of(place) for place in numbers}
            places = layers_per_client(len(model.plan.blocks), job.sampled_layers, numbers)
            places_by_site = dict(zip(capabilities, places.values(), strict=True))
            require_places(job, len(model.plan.blocks), places_by_site)

    @property
    def num_rounds(self) -> int:
        """Rounds of the settings, plus one more while a layer has not reached the sparsity."""
        # A client may fail or sample too little; then further rounds prune what is left.
        finished = self.rounds.finished
        planned = self.run.settings.federation.rounds
        more = finished >= planned and self.result.unfinished()
        return max(planned, finished + 1 if more else finished)

    def description(self) -> str:
        """Return the main settings in words."""
        job = self.settings
        amount = f"pattern {job.pattern}" if job.pattern else f"{job.sparsity:.0%} sparsity"
        expansion = "mask expansion" if job.mask_expansion else "no mask expansion"
        return (
            f"{amount}, {job.local_method}, {job.aggregation} mean, {expansion},"
            f" {job.sampled_layers:.0%} of the layers sampled"
        )

    def state(self) -> dict[str, Any]:
        """Return the global model, the layers that each client holds, and the prepared samples."""
        sampled = {str(client): blocks for client, blocks in sorted(self._sampled.items())}
        return {
            "layers": self.result.state(),
            "client-layers": self.client_layers.state(),
            "samples": sampled,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        self.result.restore(state["layers"])
        self.client_layers.restore(state["client-layers"])
        self._sampled = {int(client): blocks for client, blocks in state["samples"].items()}

    # ----- samples --------------------------------------------------------------------------------

    def before_round(self, server_round: int) -> bool:
        """Draw the layers of each client (equation 8).

        The samples go to the checkpoint, because a resumed run must not draw others: a client
        answers a round only once.
        """
        everybody = layers_per_client(
            len(self.plan.blocks), self.settings.sampled_layers, self._capabilities()
        )
        # Places follow from all capabilities, dropped clients included, so they do not change in a
        # run.
        places = {seat.client: everybody[seat.client] for seat in self.rounds.roster.active()}
        layers = self._to_sample(server_round)
        if server_round == 1:
            # Only now are the capabilities of real sites known.
            seats = self.rounds.roster.seats
            places_by_site = {seats[client].site: number for client, number in places.items()}
            require_places(self.settings, len(layers), places_by_site)
        self._sampled = drawn_layers(
            self.run.settings.seed, server_round, layers, self.result.versions, places
        )
        return True

    def _to_sample(self, server_round: int) -> list[int]:
        """Return the layers from which a round's samples are drawn."""
        planned = server_round <= self.run.settings.federation.rounds
        return list(range(len(self.plan.blocks))) if planned else self.result.unfinished()

    def _capabilities(self) -> dict[int, float]:
        """Return all clients' capabilities: those of the settings, else the nodes' limited ones."""
        if self.settings.capabilities:
            return {
                client: self.settings.capability_of(client)
                for client in sorted(self.rounds.roster.seats)
            }
        return counted_capabilities(self.rounds, "fedspallm.capabilities")

    # ----- round ----------------------------------------------------------------------------------

    def prepare(self, server_round: int, save: Callable[[], None]) -> Selection:
        """Push the stale layers that clients will read; select the clients with sampled layers.

        A client reads the layers up to its last sampled one (algorithm 1, lines 3 to 7). Before
        round 1 no layer is stale.
        """
        self._push(server_round, self._sampled)
        active = {seat.client for seat in self.rounds.roster.active()}
        # A client may have been dropped by the push.
        self._sampled = {
            client: blocks for client, blocks in self._sampled.items() if client in active
        }
        sampled = {index for blocks in self._sampled.values() for index in blocks}
        if uncovered := sorted(set(self._to_sample(server_round)) - sampled):
            text = f"round {server_round} does not reach layers {', '.join(map(str, uncovered))}"
            self.run.progress.note("not_covered", text, round=server_round, layers=uncovered)
        return Selection(list(self._sampled))

    def _push(self, server_round: int, clients: Iterable[int]) -> None:
        """Push to clients the stale layers up to their last sampled one."""
        ends = {client: self._sampled[client][-1] + 1 for client in clients}
        self.client_layers.push(self.rounds, server_round, self.result.layers(), ends)

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order to prune the sampled layers of the current global model.

        Each part of the reply consists of complete layers.
        """
        blocks = self._sampled[client]
        return ClientOrder(
            SampledBlocks(blocks=blocks, versions=self.result.versions),
            fetch=lambda report, hashes: SampledBlocksPart(blocks=blocks, blob_sha256=hashes),
            sends=count(len(blocks), "layer"),
        )

    def catch_up(self, server_round: int) -> Callable[[Sequence[int]], None] | None:
        """Return a function that pushes the layers of this round to clients that lost theirs.

        Round 1 starts from the base model, which every client has.
        """

        def push_again(lost: Sequence[int]) -> None:
            for client in lost:
                # It has nothing any more, so all layers up to its last sampled one are stale.
                self.client_layers.forget(client)
            self._push(server_round, lost)

        return push_again if server_round > 1 else None

    def note_part(self, seat: Seat, body: MessageBody) -> None:
        """Record SparseGPT's damping and the layers; with weights by samples, also their number."""
        if body.header.kind != "train":
            return
        weighed = self.run.settings.federation.client_weights == "samples"
        # In a secure sum no number of a single client's data is recorded.
        names = [] if self.run.settings.federation.secure_sum else ["damping"]
        names += ["calibration_samples"] if weighed else []
        seat.note(**{name: body.fields[name] for name in names}, layers=self._sampled[seat.client])

    def fault_of(self, inbox: Inbox, client: int) -> str | None:
        """Return which kept weight the local method cannot have left, and why.

        SparseGPT changes weights, but none far beyond the dense ones. The other methods change
        none, bit by bit.
        """
        for block in (self.plan.blocks[index] for index in self._sampled[client]):
            # SparseGPT updates kept weights, so only their size can be checked.
            before = self._before(block.index) if self.settings.local_method != "sparsegpt" else {}
            key = block_key(block.index)
            for linear in block.linears:
                kept = inbox.tensor(client, key, kept_name(linear.name))
                if before:
                    mask = inbox.tensor(client, key, mask_name(linear.name)).numpy()
                    places = _kept_places(mask, linear.shape)
                    # Bit by bit, because NaN and -0.0 would compare in another way as numbers.
                    if not torch.equal(_bits(kept), _bits(before[linear.name][places])):
                        return (
                            f"{key} {linear.name}: a kept weight is not that of the global layer,"
                            f" and {self.settings.local_method} changes none"
                        )
                elif kept.numel() and kept.abs().max().item() > LARGEST_KEPT * self._largest_dense(
                    linear
                ):
                    # A single huge weight would otherwise enter the mean.
                    return (
                        f"{key} {linear.name}: a kept weight is over {LARGEST_KEPT} times the"
                        " largest dense one"
                    )
        return None

    def _before(self, index: int) -> dict[str, Tensor]:
        """Return a layer's matrices before this round, by canonical name, in the model's dtype."""
        matrices = self.result.matrices(index)
        block = self.plan.blocks[index]
        return {
            linear.name: (
                matrices[linear.name].weight()
                if matrices
                else self.run.model.checkpoint.read(linear.parameter)
            )
            for linear in block.linears
        }

    def _largest_dense(self, linear: LinearPlan) -> float:
        if linear.parameter not in self._largest:
            self._largest[linear.parameter] = (
                self.run.model.checkpoint.read(linear.parameter).abs().max().item()
            )
        return self._largest[linear.parameter]

    # ----- aggregation ----------------------------------------------------------------------------

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Aggregate the sampled layers one by one (algorithm 1, lines 15 to 18)."""
        equal = self.run.settings.federation.client_weights == "equal"
        seats = self.rounds.roster.seats
        claimed = {
            client: 1.0 if equal else float(seats[client].metrics["calibration_samples"])
            for client in clients
        }
        self._weights = count_claims(self.rounds, "weight", claimed)
        self._decide(
            server_round,
            clients,
            lambda block, senders: self._folded(inbox, block, senders),
        )
        self.limits.tell(self.rounds)

    def fold_sums(self, server_round: int, sums: Sums, clients: list[int]) -> None:
        """Decide the layers by the sums of votes and of kept weights."""
        self._decide(
            server_round,
            clients,
            lambda block, senders: self._summed(sums, block, len(senders)),
        )

    def _decide(
        self,
        server_round: int,
        clients: list[int],
        folded: Callable[[BlockPlan, list[int]], Iterator[FoldedMatrix]],
    ) -> None:
        """Decide the sampled layers one by one.

        ``folded`` returns sums and votes of a layer's matrices, given the clients that sampled it.
        """
        self.result.note_local_models([self._sampled[client] for client in clients], server_round)
        sampled = sorted({index for client in clients for index in self._sampled[client]})
        self.run.progress.begin("aggregating", len(sampled))
        for index in sampled:
            # Only clients that sampled the layer contribute to it.
            senders = [client for client in clients if index in self._sampled[client]]
            block = self.plan.blocks[index]
            self.result.decide(block, server_round, folded(block, senders))
            text = f"layer {index} of {count(len(senders), 'client')}"
            self.run.progress.step("folded", text, block=index, clients=senders)

    def _summed(self, sums: Sums, block: BlockPlan, num_clients: int) -> Iterator[FoldedMatrix]:
        """Yield mean and votes of each matrix of a layer from the sums of all clients.

        If the local method changes no weights, the kept ones are those of the layer before.
        """
        key = block_key(block.index)
        changes = self.settings.changes_weights
        before = {} if changes else self._before(block.index)
        for linear in block.linears:
            votes = vote_counter(linear.shape, num_clients, self.run.device)
            # Before the layers are decided: this needs the model of the last round.
            votes.take_counts(sums.tensor(key, votes_name(linear.name)))
            # Votes count the clients that pruned a weight; the others kept it.
            keepers = num_clients - votes.counts().reshape(-1)
            if changes:
                name = kept_name(linear.name)
                scale = kept_scale(linear)
                # Clients clip their weights to the bound; a dense weight beyond it would be
                # changed.
                if self._largest_dense(linear) > scale.bound:
                    raise InputError(
                        f"{linear.parameter}: has a weight beyond {scale.bound:g}, where kept"
                        " weights are clipped in a secure sum; set federation.secure-sum to false"
                    )
                total = sums.numbers(key, name, scale).numpy()
                # A mean beyond the bound, which no honest clients have, is clipped to it.
                total = np.clip(total, -scale.bound * keepers, scale.bound * keepers)
            else:
                # Every keeper has the same value: the sum is exact.
                total = before[linear.name].double().reshape(-1).numpy() * keepers
            yield linear, SummedMean(linear.shape, total, keepers, num_clients), votes

    def _folded(self, inbox: Inbox, block: BlockPlan, clients: list[int]) -> Iterator[FoldedMatrix]:
        """Yield sum and votes of each matrix of a layer, added in client order."""
        key = block_key(block.index)
        # Without comparison every contribution counts as it is.
        compares = len(clients) >= MIN_CLIENTS and not self.limits.off
        changes = self.settings.changes_weights and compares
        before = self._before(block.index) if changes else {}
        # One matrix at a time: dense sums, and the mask and kept weights of one client.
        for linear in block.linears:
            mean = kept_mean(linear.shape, self.run.device)
            votes = vote_counter(linear.shape, len(clients), self.run.device)
            clipped = (
                self._clipped(inbox, key, linear, clients, before[linear.name]) if changes else {}
            )
            for client in clients:
                mask = inbox.tensor(client, key, mask_name(linear.name)).numpy()
                kept = inbox.tensor(client, key, kept_name(linear.name)).to(torch.float32)
                # Move the client's rows towards the layer of the round before.
                if client in clipped:
                    places = _kept_places(mask, linear.shape)
                    kept = _towards(kept, before[linear.name], places, clipped[client])
                # In client order, because float sums depend on the order.
                mean.add(mask, kept.numpy(), self._weights[client])
            for first, masks in inbox.words(key, mask_name(linear.name), clients):
                votes.count(masks, first)
            yield linear, mean, votes

    def _clipped(
        self, inbox: Inbox, key: str, linear: LinearPlan, clients: list[int], before: Tensor
    ) -> dict[int, Tensor]:
        """Return factors that limit the changes of rows, (rows,) float64, of clients above a limit.

        SparseGPT changes kept weights to compensate for pruned ones, by similar amounts at all
        clients. Rows are compared by the root mean square of their changes.
        """
        sizes = []
        for client in clients:
            mask = inbox.tensor(client, key, mask_name(linear.name)).numpy()
            kept = inbox.tensor(client, key, kept_name(linear.name))
            sizes.append(_row_changes(kept, before, _kept_places(mask, linear.shape)))
        clipped = {}
        for client, size, factors in zip(
            clients, sizes, clip_rows(sizes, self.limits.max_ratio), strict=True
        ):
            if bool((factors < 1).any()):
                clipped[client] = factors
                # The most limited row is reported.
                row = int(factors.argmin())
                self.limits.note(
                    client, (key, linear.name), float(size[row]), float(size[row] * factors[row])
                )
        return clipped

    # ----- evaluation by the clients --------------------------------------------------------------

    def push_result(self, server_round: int) -> None:
        """Push to the clients the layers that they need for the evaluation and do not hold.

        A client's own model consists of its layers of the last round and of the global model before
        that round (equation 9).
        """
        # Before the final push: a client's own model needs the layers before the last round.
        if self.evaluation.asked:
            self.client_layers.push(self.rounds, server_round, self.result.before)
        if self.run.settings.evaluation.own_text:
            self.client_layers.push(self.rounds, server_round + 1, self.result.layers())


def _bits(numbers: Tensor) -> Tensor:
    """Return the numbers as integers of the same width, for a bitwise comparison."""
    return numbers.contiguous().view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.element_size()]
    )


def _kept_places(mask: Words, shape: tuple[int, int]) -> Tensor:
    """Return True for kept weights of a packed prune mask: bool, shape of the matrix."""
    return torch.from_numpy(~unpack(mask, shape))


def _row_changes(kept: Tensor, before: Tensor, places: Tensor) -> Tensor:
    """Return the root mean square of the changes of each row's kept weights: (rows,), float64."""
    squares = torch.zeros(places.shape, dtype=torch.float32)
    squares[places] = (kept.to(torch.float32) - before[places].to(torch.float32)).square()
    # A row without kept weights has no change; avoid 0 / 0.
    return (squares.sum(dim=1, dtype=torch.float64) / places.sum(dim=1).clamp(min=1)).sqrt()


def _towards(kept: Tensor, before: Tensor, places: Tensor, factors: Tensor) -> Tensor:
    """Return kept weights with each row's changes multiplied by a factor of at most 1: float32."""
    # Kept weights in row-major order, with the row of each.
    row_of = places.nonzero()[:, 0]
    weight_factors = factors.to(torch.float32)[row_of]
    initial = before[places].to(torch.float32)
    # Rows within the limit keep their bits.
    return torch.where(weight_factors < 1, initial + weight_factors * (kept - initial), kept)

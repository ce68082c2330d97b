"""FedPETuning (Zhang et al. 2023): federated averaging of LoRA adapters.

In every round each sampled client trains the global adapters on its own data, and the server averages what they send. The base
model stays as it is, and where it is. Averaging the factors A and B, as the paper does, is not averaging the updates B A; with
``aggregation = "svd"`` the updates are averaged, and the best approximation of the adapters' rank is kept.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from espalier.corpora.tasks.scored_items import ScoredItems
from espalier.settings.seeds import derive_seed
from espalier.wire.adapter_payload import read_adapter, sums
from espalier.wire.adapters import HEAD_KEY, Adapter, cut_to_rank
from espalier.wire.messages import Letter, validate
from espalier.wire.payload import block_key
from espalier.wire.tuning import Order, PartOrder, TuningReport, parts
from pruning_kernels.factor_means import weighted_mean, zero_padded_mean
from pruning_kernels.factors import Factors
from strategies.engine.capped import count_claims
from strategies.engine.evaluation import ClientEvaluation
from strategies.engine.inbox import Inbox
from strategies.engine.method import Method
from strategies.engine.roster import Seat
from strategies.engine.run import Run
from strategies.methods.plausible_update import Reach
from strategies.results.adapters import AdapterResult


class FedPETuning(Method):
    """Federated averaging of adapters.

    Parameters
    ----------
    run : settings, base model and run folder
    public_text : name -> windows (windows, tokens), int64, on which clients evaluate what they train alone; may be empty
    tests : public test items, and the metrics by which clients score what they train alone on them
    """

    def __init__(
        self,
        run: Run,
        public_text: Mapping[str, torch.Tensor] | None = None,
        tests: tuple[ScoredItems, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(run, ClientEvaluation(run, public_text or {}, tests))
        self.job = run.settings.job
        self.result = AdapterResult(run.settings, run.model, run.checkpoint.blobs)
        steps = run.settings.training.steps
        steps_before = (self.job.rounds - 1) * steps if self.job.keep_optimizer else 0
        self.reach = Reach(run.settings.training, steps_before, differences=self.job.sends_differences)
        self._asked: list[Seat] = []
        self._orders: dict[int, Order] = {}
        """What each client of the round was asked to train."""
        self._reports: dict[int, TuningReport] = {}
        """What each client of the round said when it had."""
        self._weights: dict[int, float] = {}
        """What each client of the round weighs in the mean."""

    @property
    def num_rounds(self) -> int:
        """As many as the settings say."""
        rounds: int = self.job.rounds
        return rounds

    def summary(self) -> None:
        """Show what will be done."""
        lora, training = self.run.settings.lora, self.run.settings.training
        adapters = f"rank {lora.rank} on {lora.targets}, {self.result.adapters.num_parameters:,} parameters"
        text = f"{adapters}, {self.job.aggregation} averaged, {training.steps} steps a round, base {training.base}"
        self.run.progress.note("method", f"{self.run.settings.method:<12} {text}")

    def state(self) -> dict[str, Any]:
        """The global adapters, and how large what clients began with was."""
        return self.result.state() | {"reach": self.reach.starts}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""
        self.result.restore(state)
        self.reach.starts = state["reach"]

    def stored(self) -> Collection[str]:
        """Hashes of the result's blobs."""
        return self.result.stored()

    # ----- the round --------------------------------------------------------------------------------------------------

    def _sampled(self, server_round: int) -> list[Seat]:
        """The clients of a round: drawn from those that still take part, in order of client."""
        seats = self.rounds.roster.active()
        number = self.job.clients_of_round(len(seats))
        generator = np.random.default_rng(derive_seed(self.run.settings.seed, "clients", server_round=server_round))
        chosen = sorted(generator.choice(len(seats), number, replace=False).tolist()) if number < len(seats) else None
        return seats if chosen is None else [seats[place] for place in chosen]

    def limit_of(self, seat: Seat) -> int:
        """Largest rank of the adapters that a client trains in its next round."""
        limit: int = self.job.rank_limit_of(seat.client, self.run.settings.lora)
        return limit

    def _parts(self, limit: int) -> list[list[str]]:
        return parts(self.result.adapters.limited(limit), self.run.settings)

    def prepare(self, server_round: int) -> Iterator[list[Message]]:
        """Draw the round's clients, and bring them the global adapters, all parts but the last, which comes with the order."""
        self._asked = self._sampled(server_round)
        self._orders = {seat.client: Order(rank_limit=self.limit_of(seat)) for seat in self._asked}
        if server_round > 1:
            yield from self._deliveries(self._orders, server_round, omitted=1)

    def deliver(self, server_round: int) -> Iterator[list[Message]]:
        """Bring the result to the clients, whole and part by part, so that they can evaluate it on their own text."""
        if self.run.settings.evaluation.own_text:
            whole = Order(rank_limit=self.run.settings.lora.largest_rank)
            orders = {seat.client: whole for seat in self.rounds.roster.active()}
            yield from self._deliveries(orders, server_round + 1, omitted=0)

    def _deliveries(self, orders: Mapping[int, Order], server_round: int, omitted: int) -> Iterator[list[Message]]:
        cut = {client: self._parts(order.rank_limit)[: -omitted or None] for client, order in orders.items()}
        for part in range(max(map(len, cut.values()), default=0)):
            receiving = [seat for seat in self.rounds.roster.active() if part < len(cut.get(seat.client, ()))]
            yield [
                self.rounds.request("deliver", seat, server_round, order, self._blobs(order, part), part)
                for seat, order in ((seat, orders[seat.client]) for seat in receiving)
            ]

    def _blobs(self, order: Order, part: int) -> dict[str, bytes]:
        return {key: self.result.blob(key, order.rank_limit) for key in self._parts(order.rank_limit)[part]}

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask the drawn clients to train; the first round begins with adapters that everybody makes from the seed."""
        active = self.rounds.roster.active()
        self._asked = [seat for seat in self._asked if seat in active]
        return [
            self.rounds.request("train", seat, server_round, order, self._blobs(order, -1) if server_round > 1 else {})
            for seat, order in ((seat, self._orders[seat.client]) for seat in self._asked)
        ]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Average the adapters blob by blob, in order of client."""
        self.run.progress.begin("training", len(self._asked))
        inbox = Inbox(self.run.folder.inbox)
        for letter in inbox.receive(replies):
            self._note_arrival(letter)
        self._note_starts(server_round)
        clients = [client for client in inbox.complete_clients() if self._is_plausible(inbox, client)]
        sampled = len(self._orders) if self.job.sampled_clients < 1 else None
        self.rounds.require_quorum(len(clients), "sent their adapters", of=sampled)
        self.settle(inbox, clients)
        claimed = {client: self._claimed_weight(client) for client in clients}
        self._weights = count_claims(self.rounds, "weight", claimed, self.job.max_weight_ratio)
        self.result.replace(self._folded(inbox, clients), self._limits_after(server_round))
        inbox.clear()
        return None, MetricRecord({"num-clients": len(clients)})

    def _note_starts(self, server_round: int) -> None:
        """Take note of what the round's clients began with: what was sent to them, or the values made from the seed."""
        for key, tensors in self._first_values() if server_round == 1 else self._sent_values():
            self.reach.note(key, tensors)

    def _first_values(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        for key in self.result.blobs:
            yield key, self.result.tensors(key)

    def _sent_values(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        for limit in sorted({order.rank_limit for order in self._orders.values()}):
            for key in self.result.blobs:
                yield key, self.result.received(key, limit)

    def _is_plausible(self, inbox: Inbox, client: int) -> bool:
        """Whether training can have led to all that a client sent; if not, it is dropped."""
        for key, shapes in self.result.adapters.limited(self._orders[client].rank_limit).shapes().items():
            start = self._start(key)
            for name, shape in shapes.items():
                sent = self._sent(inbox, client, key, name, shape)
                finite = bool(torch.isfinite(self._trained(sent, start, client, name)).all())
                if not finite or (sent.numel() and sent.abs().max().item() > self.reach.limit(key, name)):
                    reason = f"reply refused: {key} {name}: {self.reach.reason}"
                    self.rounds.drop("train", self.rounds.roster.seats[client], reason)
                    return False
        return True

    def settle(self, inbox: Inbox, clients: list[int]) -> None:
        """Take over what the round's clients reported, before their adapters are averaged; here there is nothing to settle."""

    def _weight(self, client: int) -> float:
        """What a client weighs in the round's mean."""
        return self._weights[client]

    def _limits_after(self, server_round: int) -> list[int]:
        """Rank limits to which the global adapters go next: to train them, and after the last round to evaluate the whole."""
        if server_round == self.num_rounds:
            return [self.run.settings.lora.largest_rank] if self.run.settings.evaluation.own_text else []
        return [self.limit_of(seat) for seat in self.rounds.roster.active()]

    def _folded(self, inbox: Inbox, clients: list[int]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """The mean of each block's adapters; one matrix's adapters of all clients are in memory at a time."""
        adapters = self.result.adapters
        self.run.progress.begin("averaging", len(adapters.blocks))
        for index in sorted(adapters.blocks):
            key, tensors = block_key(index), dict[str, torch.Tensor]()
            for adapter in adapters.blocks[index]:
                mean = self.mean_of(adapter, self._factors(inbox, key, adapter, clients), clients)
                tensors |= {adapter.name_a: mean.a, adapter.name_b: mean.b}
            yield key, tensors
            self.run.progress.step("averaged", f"block {index} of {len(clients)} clients", block=index)
        if adapters.head:
            yield HEAD_KEY, {name: self._mean_of_head(inbox, name, clients) for name in adapters.head}

    def _mean_of_head(self, inbox: Inbox, name: str, clients: list[int]) -> torch.Tensor:
        """Mean of one tensor of the classification head, float32; summed in float64, in order of client."""
        shape, start, total = self.result.adapters.head[name], self._start(HEAD_KEY), 0.0
        mean = torch.zeros(shape, dtype=torch.float64)
        for client in clients:
            trained = self._trained(self._sent(inbox, client, HEAD_KEY, name, shape), start, client, name)
            mean += trained.to(torch.float64) * self._weight(client)
            total += self._weight(client)
        return (mean / total).to(torch.float32)

    def _factors(self, inbox: Inbox, key: str, adapter: Adapter, clients: list[int]) -> list[Factors]:
        """One matrix's adapters as the clients trained them."""
        found, start = [], self._start(key)
        for client in clients:
            shapes = adapter.limited(self._orders[client].rank_limit).shapes()
            sent = {name: self._sent(inbox, client, key, name, shape) for name, shape in shapes.items()}
            a, b = (self._trained(sent[name], start, client, name) for name in (adapter.name_a, adapter.name_b))
            found.append(Factors(b, a, adapter.scaling))
        return found

    def _sent(self, inbox: Inbox, client: int, key: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor as a client sent it, float32."""
        return read_adapter(partial(inbox.tensor, client, key), name, shape, self.job.payload)

    def _start(self, key: str) -> Mapping[str, torch.Tensor]:
        """What clients' differences are added to: the global adapters of the round; nothing where values are sent.

        Clients began with what rounding left of them. So what it took moves the point at which they trained, and does not come
        back with what they send.
        """
        return self.result.tensors(key) if self.job.sends_differences else {}

    def _trained(self, sent: torch.Tensor, start: Mapping[str, torch.Tensor], client: int, name: str) -> torch.Tensor:
        """One tensor as a client trained it; of ranks that it gave up, where it sent zeros, nothing is left."""
        if not start:
            return sent
        begun = cut_to_rank({name: start[name][tuple(map(slice, sent.shape))]}, self._reports[client].rank)
        return sums(begun, {name: sent})[name]

    def mean_of(self, adapter: Adapter, factors: list[Factors], clients: list[int]) -> Factors:
        """The mean of one matrix's adapters."""
        weights = [self._weight(client) for client in clients]
        if self.job.aggregation == "svd":
            return weighted_mean(factors, weights, adapter.rank, adapter.scaling)
        return zero_padded_mean(factors, weights, adapter.rank)

    def _claimed_weight(self, client: int) -> float:
        """What a client would weigh by what it says; see ``capped``."""
        return float(self.rounds.roster.seats[client].metrics["samples"]) if self.job.client_weights == "samples" else 1.0

    def next_part(self, letter: Letter) -> Message | None:
        """Ask for the part of a client's adapters that follows the one which has arrived."""
        header, seat = letter.header, self.rounds.roster.seats[letter.header.client]
        if header.kind == "train":
            self._reports[header.client] = validate(TuningReport, letter.scalars)
        order, report = self._orders[header.client], self._reports[header.client]
        cut, following = self._parts(order.rank_limit), header.part + 1
        if following == len(cut):
            return None
        keys = [key for part in cut for key in part]
        hashes = [report.blob_sha256[keys.index(key)] for key in cut[following]]
        part = PartOrder(blob_sha256=hashes, rank_limit=order.rank_limit, rank=report.rank)
        return self.rounds.request("fetch", seat, header.server_round, part, part=following)

    def _note_arrival(self, letter: Letter) -> None:
        seat = self.rounds.roster.seats[letter.header.client]
        if letter.header.kind == "train":
            seat.worked(letter.scalars["seconds"])
            skipped = seat.metrics.get("skipped_steps", 0) + letter.scalars["skipped_steps"]
            told = {"samples": letter.scalars["samples"]} if self.job.client_weights == "samples" else {}
            seat.metrics = {**told, "lora_rank": letter.scalars["rank"], "skipped_steps": skipped}
        if letter.header.part + 1 == letter.header.num_parts:
            self.run.progress.step(
                "trained", f"adapters of {seat.site}, {seat.work()}", client=seat.client, seconds=seat.seconds
            )

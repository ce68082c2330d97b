"""FedPETuning (Zhang et al. 2023): federated averaging of LoRA adapters.

In every round each sampled client trains the global adapters on its own data, and the server averages what they send. The base
model stays as it is, and where it is. Averaging the factors A and B, as the paper does, is not averaging the updates B A; with
``aggregation = "svd"`` the updates are averaged, and the best approximation of the adapters' rank is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median_low
from typing import Any

import torch
from flwr.app import Message

from espalier.amounts import count
from espalier.modeling.opened import OpenedModel
from espalier.modeling.quantised import require_quantisable
from espalier.settings.fedpetuning import AdapterAveraging
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.adapter_payload import Shape, read_adapter, sums
from espalier.wire.adapters import Adapter, AdapterPlan, cut_to_rank
from espalier.wire.messages import Scalars, validate
from espalier.wire.parts import PartRequest
from espalier.wire.payload import block_of_key
from espalier.wire.tuning import Order, PartOrder, TuningReport, parts, trained
from pruning_kernels.clipping import LEAST_CLIENTS, distances_from_others, root_mean_square
from pruning_kernels.factor_means import weighted_mean, zero_padded_mean
from pruning_kernels.factors import Factors
from strategies.engine.client_weights import count_claims
from strategies.engine.evaluation import ClientEvaluation
from strategies.engine.inbox import Inbox
from strategies.engine.method import Method
from strategies.engine.result import RunResult
from strategies.engine.roster import Seat
from strategies.engine.run import Run
from strategies.engine.update_limits import UpdateLimits
from strategies.methods.drawn_clients import drawn
from strategies.methods.fleet_time import (
    bytes_of_round,
    fingerprint_of,
    fleet_of_run,
    require_fleet,
    virtual_seconds,
)
from strategies.methods.plausible_update import Reach
from strategies.results.adapters import AdapterResult
from strategies.results.timed import DeviceTime, RoundTime


class FedPETuning(Method):
    """Federated averaging of adapters.

    Takes what ``Method`` does.
    """

    SENT = "adapters"
    STEPS = ("training", "trained")
    REPORT: type[TuningReport] = TuningReport
    """What clients report beside their adapters."""

    result: RunResult

    def __init__(self, run: Run, evaluation: ClientEvaluation | None = None) -> None:
        super().__init__(run, evaluation)
        self.job = run.settings.of(AdapterAveraging)
        self.federation = run.settings.federation
        self.result = self.new_result()
        steps = run.settings.training.steps
        steps_before = (self.federation.rounds - 1) * steps if self.federation.keep_optimizer else 0
        self.reach = Reach(
            run.settings.training, steps_before, differences=self.federation.sends_differences
        )
        self.fleet = fleet_of_run(run.settings, simulation=run.simulation)
        self._limits: dict[int, int] = {}
        """Largest rank that each client of the round was asked to train."""
        self._told: dict[int, TuningReport] = {}
        """What each client of the round said when it had."""
        self._weights: dict[int, float] = {}
        """What each client of the round weighs in the mean."""
        self.limits, self.far = (UpdateLimits(self.federation.max_update_ratio) for _ in range(2))

    def new_result(self) -> RunResult:
        """What the rounds lead to, before any."""
        return AdapterResult(self.run.settings, self.run.model, self.run.checkpoint.blobs)

    @property
    def averaged(self) -> AdapterResult:
        """The global adapters, which clients train and the server averages."""
        assert isinstance(self.result, AdapterResult)
        return self.result

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse adapters that the model cannot have, what cannot be quantised, and a fleet that is not there."""
        require_fleet(settings)
        trained(model.plan, settings)
        if settings.training.base == "nf4":
            require_quantisable(model.plan)

    @property
    def num_rounds(self) -> int:
        """As many as the settings say."""
        return self.federation.rounds

    def summary(self) -> None:
        """Show what will be done."""
        lora = self.run.settings.lora
        training = self.run.settings.training
        averaged = "updates" if self.job.averages_updates else "factors"
        adapters = (
            f"rank {lora.rank} on {lora.targets}, {self.averaged.adapters.num_parameters:,}"
            " parameters"
        )
        text = (
            f"{adapters}, {averaged} averaged, {count(training.steps, 'step')} a round, base"
            f" {training.base}"
        )
        self.run.progress.note("method", f"{self.run.settings.method:<12} {text}")

    def state(self) -> dict[str, Any]:
        """The global adapters, and how large what clients began with was."""
        return self.result.state() | {
            "reach": self.reach.starts,
            "fleet": fingerprint_of(self.fleet),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned; ``Mistake`` where the fleet has changed meanwhile."""
        if state["fleet"] != fingerprint_of(self.fleet):
            raise Mistake(
                f"{self.run.settings.method}.fleet: is not the fleet that the run began with; bring"
                " its file back, or begin a new run (resume-from = '')"
            )
        self.result.restore(state)
        self.reach.starts = state["reach"]

    # ----- who trains, and at which rank ------------------------------------------------------------------------------

    def draw(self, server_round: int) -> None:
        """Draw the round's clients from those that still take part; the draw follows from the seed, and nothing is kept."""
        sampled = drawn(self.run.settings, server_round, self.seats_of_rounds())
        self._limits = {seat.client: self.limit_of(seat) for seat in sampled}

    def seats_of_rounds(self) -> list[Seat]:
        """Clients from which a round's are drawn."""
        return self.rounds.roster.active()

    def clients_of(self, server_round: int) -> Sequence[int]:
        """The clients that were drawn."""
        return list(self._limits)

    def quorum_of(self) -> int | None:
        """The quorum is of those that were drawn, where not all are."""
        return len(self._limits) if self.federation.sampled_clients < 1 else None

    def limit_of(self, seat: Seat) -> int:
        """Largest rank of the adapters that a client trains in its next round."""
        return self.job.rank_limit_of(seat.client, self.run.settings.lora)

    # ----- the global adapters on their way down ----------------------------------------------------------------------

    def prepare(self, server_round: int) -> Iterator[list[Message]]:
        """Draw the round's clients, and bring them the global adapters, all parts but the last, which comes with the order."""
        self.draw(server_round)
        if server_round > 1:
            yield from self.deliveries(self._limits, server_round, omitted=1)

    @property
    def brings_result(self) -> bool:
        """Whether the clients get the result: where they evaluate it on their own text."""
        return self.run.settings.evaluation.own_text

    def deliver(self, server_round: int) -> Iterator[list[Message]]:
        """Bring the result to the clients, whole and part by part, so that they can evaluate it on their own text."""
        if self.brings_result:
            largest = self.run.settings.lora.largest_rank
            whole = {seat.client: largest for seat in self.rounds.roster.active()}
            yield from self.deliveries(whole, server_round + 1, omitted=0)

    def deliveries(
        self, limits: Mapping[int, int], server_round: int, omitted: int
    ) -> Iterator[list[Message]]:
        """The global adapters for clients with these rank limits, but for the last parts that are ``omitted``."""
        cut = {
            client: self._parts(client, limit)[: -omitted or None]
            for client, limit in limits.items()
        }
        for part in range(max(map(len, cut.values()), default=0)):
            receiving = [seat for seat in self.receiving() if part < len(cut.get(seat.client, ()))]
            yield [
                self._delivery(seat, server_round, limits[seat.client], part) for seat in receiving
            ]

    def _delivery(self, seat: Seat, server_round: int, limit: int, part: int) -> Message:
        blobs = self._blobs(server_round, seat.client, limit, part)
        number = part + self.first_delivery(server_round)
        return self.rounds.request(
            "deliver", seat, server_round, Order(rank_limit=limit), blobs, number
        )

    def first_delivery(self, server_round: int) -> int:
        """Number of the ``deliver`` that brings the first part of the global adapters."""
        return 0

    def adapters_for(self, client: int, limit: int) -> AdapterPlan:
        """The adapters that a client has at a rank limit."""
        return self.averaged.adapters.limited(limit)

    def adapter_for(self, client: int, key: str, adapter: Adapter) -> Adapter:
        """One of them, of the blob ``key``, as a client of the round trains it."""
        return adapter.limited(self._limits[client])

    def blob_for(self, client: int, key: str, limit: int) -> bytes:
        """One blob of the global adapters as it is sent to a client."""
        return self.averaged.blob(key, limit)

    def _parts(self, client: int, limit: int) -> list[list[str]]:
        return parts(self.adapters_for(client, limit), self.run.settings)

    def _blobs(self, server_round: int, client: int, limit: int, part: int) -> dict[str, bytes]:
        found = {key: self.blob_for(client, key, limit) for key in self._parts(client, limit)[part]}
        return found | dict(self.part_blobs(server_round, client))

    # ----- the round --------------------------------------------------------------------------------------------------

    def order(self, server_round: int, client: int) -> tuple[Scalars, Mapping[str, bytes]]:
        """A drawn client trains; the first round begins with adapters that everybody makes from the seed."""
        limit = self._limits[client]
        return Order(rank_limit=limit), (
            self._blobs(server_round, client, limit, -1) if server_round > 1 else {}
        )

    def reply_parts(self, server_round: int, client: int) -> Sequence[Sequence[str]]:
        """Whole blocks, and the head."""
        return self._parts(client, self._limits[client])

    def part_order(self, client: int, hashes: list[str]) -> PartRequest:
        """The client's ranks say of which adapters."""
        return PartOrder(
            blob_sha256=hashes, rank_limit=self._limits[client], rank=self._reports[client]["rank"]
        )

    def note_report(self, seat: Seat, report: Mapping[str, Any]) -> None:
        """The rank that it goes on with, steps that were left out, and with weights by samples how many it has."""
        told = self._told[seat.client] = validate(self.REPORT, report)
        skipped = seat.metrics.get("skipped_steps", 0) + told.skipped_steps
        samples = {"samples": told.samples} if self.federation.client_weights == "samples" else {}
        seat.metrics = {**samples, "lora_rank": told.rank, "skipped_steps": skipped}

    def is_plausible(self, inbox: Inbox, client: int) -> bool:
        """Whether training can have led to all that a client sent; if not, it is dropped."""
        for key, shapes in self.adapters_for(client, self._limits[client]).shapes().items():
            start = self._start(key)
            for name, shape in shapes.items():
                sent = self._sent(inbox, client, key, name, shape)
                finite = bool(torch.isfinite(self._trained(sent, start, client, key, name)).all())
                if not finite or (
                    sent.numel() and sent.abs().max().item() > self.reach_of(name).limit(key, name)
                ):
                    reason = f"reply refused: {key} {name}: {self.reach_of(name).reason}"
                    self.rounds.drop("train", self.rounds.roster.seats[client], reason)
                    return False
        return True

    # ----- aggregation ------------------------------------------------------------------------------------------------

    def received(self, server_round: int) -> None:
        """Take note of what the round's clients began with: what was sent to them, or the values made from the seed."""
        for key, tensors in self._first_values() if server_round == 1 else self._sent_values():
            for name, tensor in tensors.items():
                self.reach_of(name).note(key, {name: tensor})

    def reach_of(self, name: str) -> Reach:
        """How far training can have moved a tensor of this name."""
        return self.reach

    def _first_values(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        for key in self.averaged.blobs:
            yield key, self.averaged.tensors(key)

    def _sent_values(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        for limit in sorted(set(self._limits.values())):
            for key in self.averaged.blobs:
                yield key, self.averaged.received(key, limit)

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Average the adapters blob by blob, in order of client."""
        clients = self._near_each_other(server_round, inbox, clients)
        self.settle(inbox, clients)
        self.note_round(server_round, clients)
        claimed = {client: self._claimed_weight(client) for client in clients}
        self._weights = count_claims(
            self.rounds, "weight", claimed, self.federation.max_weight_ratio
        )
        self.averaged.replace(self._folded(inbox, clients), self._limits_after(server_round))
        self.limits.tell(self.rounds)

    def _near_each_other(self, server_round: int, inbox: Inbox, clients: list[int]) -> list[int]:
        """The clients but those whose update is far from the others': they have no part in this round.

        A client is left out that is more than ``federation.max-update-ratio`` times as far from the mean of the others' updates
        as the median client is. Which directions clients go in does not matter as long as they differ alike: where the mean
        has converged, every client's update is the opposite of the sum of the others'.
        """
        if len(clients) < LEAST_CLIENTS:
            return clients
        gram = torch.zeros(len(clients), len(clients), dtype=torch.float64)
        for key in self.averaged.adapters.shapes():
            start = self.averaged.tensors(key)
            shapes = {
                client: self.adapters_for(client, self._limits[client]).shapes()[key]
                for client in clients
            }
            factors = self._clip_factors(inbox, key, shapes, start)
            for name, of_clients in factors.items():
                rows = []
                for client in clients:
                    shape = shapes[client][name]
                    trained = self._clipped(
                        inbox, client, key, name, shape, start, of_clients[client]
                    )
                    change = trained - self._begun(start, client, key, name, shape)
                    rows.append(
                        self.spread(client, key, name, change, start[name].shape)
                        .flatten()
                        .to(torch.float64)
                    )
                changes = torch.stack(rows)
                gram += changes @ changes.T
        distances = dict(zip(clients, distances_from_others(gram), strict=True))
        usual = median_low(distances.values())
        most = self.limits.most_ratio * usual + 1e-6 * float(gram.diagonal().max().sqrt())
        far = [client for client in clients if distances[client] > most]
        for client in far:
            self.far.note(client, server_round, distances[client], usual)
        self.far.tell(self.rounds, "distance")
        return [client for client in clients if client not in far]

    def spread(
        self, client: int, key: str, name: str, change: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        """A client's change of a tensor in the shape of the global one, zero where the client has no part of it."""
        whole = change.new_zeros(tuple(shape))
        whole[tuple(map(slice, change.shape))] = change
        return whole

    def settle(self, inbox: Inbox, clients: list[int]) -> None:
        """Take over what the round's clients reported, before their adapters are averaged; here there is nothing to settle."""

    def note_round(self, server_round: int, clients: list[int]) -> None:
        """Note how long the round takes by the clock of the fleet that the run pretends to have, if it has one."""
        if self.fleet is not None:
            sent = {client: self.bytes_of(client, server_round) for client in clients}
            times = {
                client: DeviceTime(self.seconds_of(client, server_round, size), size)
                for client, size in sent.items()
            }
            note = RoundTime.of(server_round, times)
            self.averaged.rounds = [*self.averaged.rounds, note]
            self.run.progress.note("timed", f"timed        {note.in_words()}", **note.to_json())

    def note_saved(self, server_round: int) -> None:
        """Write down what pretended devices took for the round, unless it is written already."""
        if self.fleet is None:
            return
        for note in (note for note in self.averaged.rounds if note.round == server_round):
            for client, own in note.devices.items():
                self.run.folder.ledger.record_round(
                    self.rounds.lineage, note.round, client, own.seconds
                )

    def bytes_of(self, client: int, server_round: int) -> int:
        """What a client of the round gets and sends, in numbers of adapters."""
        return bytes_of_round(
            self.adapters_for(client, self._limits[client]), self.run.settings, server_round
        )

    def seconds_of(self, client: int, server_round: int, num_bytes: int) -> float:
        """T_i of the round, by the fleet's clock."""
        assert self.fleet is not None
        adapters = self.adapters_for(client, self._limits[client])
        kept = self.parameters_of(client)
        return virtual_seconds(
            self.fleet, self.run.settings, client, server_round, kept, adapters, num_bytes
        )

    def parameters_of(self, client: int) -> int:
        """Parameters of the frozen model that a client trains on."""
        return self.run.model.plan.num_parameters

    def _limits_after(self, server_round: int) -> list[int]:
        """Rank limits to which the global adapters go next: to train them, and after the last round to evaluate the whole."""
        if server_round == self.num_rounds:
            return [self.run.settings.lora.largest_rank] if self.brings_result else []
        return [self.limit_of(seat) for seat in self.rounds.roster.active()]

    def _folded(
        self, inbox: Inbox, clients: list[int]
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """The mean of each block's adapters; one matrix's adapters of all clients are in memory at a time."""
        adapters = self.averaged.adapters
        keys = list(adapters.shapes())
        self.run.progress.begin("averaging", sum(block_of_key(key) is not None for key in keys))
        for key in keys:
            index = block_of_key(key)
            tensors = dict[str, torch.Tensor]()
            for adapter in adapters.blocks.get(index, ()) if index is not None else ():
                mean = self.mean_of(
                    key, adapter, self._factors(inbox, key, adapter, clients), clients
                )
                tensors |= {adapter.name_a: mean.a, adapter.name_b: mean.b}
            whole = {
                name: self._mean_of_whole(inbox, key, name, clients)
                for name in adapters.whole.get(key, {})
            }
            yield key, tensors | whole
            if index is not None:
                self.run.progress.step(
                    "averaged", f"block {index} of {count(len(clients), 'client')}", block=index
                )

    def _mean_of_whole(self, inbox: Inbox, key: str, name: str, clients: list[int]) -> torch.Tensor:
        """Mean of one tensor that is trained whole, float32; summed in float64, in order of client."""
        shape = self.averaged.adapters.whole[key][name]
        start = self.averaged.tensors(key)
        total = 0.0
        mean = torch.zeros(shape, dtype=torch.float64)
        factors = self._clip_factors(
            inbox, key, {client: {name: shape} for client in clients}, start
        )[name]
        for client in clients:
            trained = self._clipped(inbox, client, key, name, shape, start, factors[client])
            mean += trained.to(torch.float64) * self._weights[client]
            total += self._weights[client]
        return (mean / total).to(torch.float32)

    def _factors(
        self, inbox: Inbox, key: str, adapter: Adapter, clients: list[int]
    ) -> list[Factors]:
        """One matrix's adapters as the clients trained them, each factor's change up to a multiple of the median client's.

        All clients began the round with the same factors, so that a huge B beside a tiny A is far from them in both.
        """
        found = []
        start = self.averaged.tensors(key)
        shapes = {client: self.adapter_for(client, key, adapter).shapes() for client in clients}
        factors = self._clip_factors(inbox, key, shapes, start)
        for client in clients:
            a, b = (
                self._clipped(
                    inbox, client, key, name, shapes[client][name], start, factors[name][client]
                )
                for name in (adapter.name_a, adapter.name_b)
            )
            found.append(Factors(b, a, adapter.scaling))
        return found

    def _clip_factors(
        self,
        inbox: Inbox,
        key: str,
        shapes: Mapping[int, Mapping[str, Shape]],
        start: Mapping[str, torch.Tensor],
    ) -> dict[str, dict[int, float]]:
        """Return the factors on the clients' changes of tensors, by name and client.

        ``shapes`` are those of each client; ``start`` is what the round began with. Changes are compared by the root of their
        mean square, as ranks and numbers of rows may differ.
        """
        sizes: dict[str, dict[int, float]] = {}
        for client, of_client in shapes.items():
            for name, shape in of_client.items():
                trained = self._trained(
                    self._sent(inbox, client, key, name, shape), self._start(key), client, key, name
                )
                change = trained - self._begun(start, client, key, name, shape)
                sizes.setdefault(name, {})[client] = root_mean_square(change)
        return {
            name: self.limits.factors((key, name), of_clients) for name, of_clients in sizes.items()
        }

    def _clipped(
        self,
        inbox: Inbox,
        client: int,
        key: str,
        name: str,
        shape: Shape,
        start: Mapping[str, torch.Tensor],
        factor: float,
    ) -> torch.Tensor:
        """One tensor as a client trained it; only ``factor`` of the way from what it began with, where that is below 1."""
        trained = self._trained(
            self._sent(inbox, client, key, name, shape), self._start(key), client, key, name
        )
        if factor == 1.0:
            return trained
        begun = self._begun(start, client, key, name, shape)
        return begun + factor * (trained - begun)

    def _sent(
        self, inbox: Inbox, client: int, key: str, name: str, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """One tensor as a client sent it, float32."""
        return read_adapter(
            partial(inbox.tensor, client, key), name, shape, self.federation.payload
        )

    def _start(self, key: str) -> Mapping[str, torch.Tensor]:
        """What clients' differences are added to: the global adapters of the round; nothing where values are sent.

        Clients began with what rounding left of them. So what it took moves the point at which they trained, and does not come
        back with what they send.
        """
        return self.averaged.tensors(key) if self.federation.sends_differences else {}

    def _trained(
        self,
        sent: torch.Tensor,
        start: Mapping[str, torch.Tensor],
        client: int,
        key: str,
        name: str,
    ) -> torch.Tensor:
        """One tensor as a client trained it; of ranks that it gave up, where it sent zeros, nothing is left."""
        if not start:
            return sent
        return sums({name: self._begun(start, client, key, name, tuple(sent.shape))}, {name: sent})[
            name
        ]

    def _begun(
        self, start: Mapping[str, torch.Tensor], client: int, key: str, name: str, shape: Shape
    ) -> torch.Tensor:
        """Return a client's initial value of one tensor of ``start``; zeros for ranks that it gave up."""
        own = self.part_for(client, key, name, start[name])
        return cut_to_rank({name: own[tuple(map(slice, shape))]}, self._told[client].rank)[name]

    def part_for(self, client: int, key: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What a client has of a tensor of the global adapters, at every rank."""
        return tensor

    def mean_of(
        self, key: str, adapter: Adapter, factors: list[Factors], clients: list[int]
    ) -> Factors:
        """The mean of one matrix's adapters."""
        weights = [self._weights[client] for client in clients]
        if self.job.averages_updates:
            return weighted_mean(factors, weights, adapter.rank, adapter.scaling)
        return zero_padded_mean(factors, weights, adapter.rank)

    def _claimed_weight(self, client: int) -> float:
        """Return the weight that a client claims; see ``limited_weights``."""
        return (
            float(self._told[client].samples)
            if self.federation.client_weights == "samples"
            else 1.0
        )

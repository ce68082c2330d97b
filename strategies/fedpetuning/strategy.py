"""FedPETuning (Zhang et al. 2023): federated averaging of LoRA adapters.

In every round each sampled client trains the global adapters on its own data, and the server
averages the results. The base model is frozen and is not sent. The paper averages the factors A and
B, which is not the same as averaging the updates B A. With ``aggregation = "svd"`` the updates are
averaged, and the best approximation with the adapters' rank is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median_low
from typing import Any

import torch
from flwr.app import Message

from espalier.amounts import count
from espalier.errors import InputError
from espalier.hf.nf4.matrices import require_quantisable
from espalier.hf.opening.opened import OpenedModel
from espalier.messages.blobs.adapters import Shape, read_adapter, sums
from espalier.messages.message import Scalars, validate
from espalier.messages.parts import PartRequest
from espalier.methods.fedpetuning.contract import (
    Order,
    PartOrder,
    TuningReport,
    parts,
    trained,
)
from espalier.methods.fedpetuning.settings import AdapterAveraging
from espalier.models.adapters import Adapter, AdapterPlan, cut_to_rank
from espalier.models.plan import block_of_key
from espalier.settings.run import RunSettings
from pruning_kernels.lora.clipping import LEAST_CLIENTS, distances_from_others, root_mean_square
from pruning_kernels.lora.factor_means import weighted_mean, zero_padded_mean
from pruning_kernels.lora.factors import Factors
from strategies.averaging.client_sampling import drawn
from strategies.averaging.client_weights import count_claims
from strategies.averaging.training_bound import Reach
from strategies.averaging.update_limits import UpdateLimits
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import Method
from strategies.base.result import RunResult
from strategies.base.roster import Seat
from strategies.base.run import Run
from strategies.fedpetuning.adapters import AdapterResult
from strategies.fleet.timed_rounds import DeviceTime, RoundTime
from strategies.fleet.training_time import (
    bytes_of_round,
    fingerprint_of,
    fleet_of_run,
    require_fleet,
    virtual_seconds,
)


class FedPETuning(Method):
    """Strategy of FedPETuning: federated averaging of adapters.

    The parameters are those of ``Method``.
    """

    SENT = "adapters"
    STEPS = ("training", "trained")
    REPORT: type[TuningReport] = TuningReport
    """Fields that clients report with their adapters."""

    result: RunResult

    def __init__(self, run: Run, evaluation: ClientEvaluation | None = None) -> None:
        super().__init__(run, evaluation)
        self.job = run.settings.of(AdapterAveraging)
        self.federation = run.settings.federation
        self.result = self.new_result()
        self.reach = Reach(run.settings.training, differences=self.federation.sends_differences)
        self.fleet = fleet_of_run(run.settings, simulation=run.simulation)
        self._limits: dict[int, int] = {}
        """Maximum rank that each client of the round trains."""
        self._told: dict[int, TuningReport] = {}
        """Report of each client of the round."""
        self._weights: dict[int, float] = {}
        """Weight of each client of the round in the mean."""
        self.limits, self.far = (UpdateLimits(self.federation.max_update_ratio) for _ in range(2))

    def new_result(self) -> RunResult:
        """Return the initial result, before the first round."""
        return AdapterResult(self.run.settings, self.run.model, self.run.checkpoint.blobs)

    @property
    def averaged(self) -> AdapterResult:
        """Global adapters, which clients train and the server averages."""
        assert isinstance(self.result, AdapterResult)
        return self.result

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse adapters or NF4 that the model does not allow, and an unknown fleet."""
        require_fleet(settings)
        trained(model.plan, settings)
        if settings.training.base == "nf4":
            require_quantisable(model.plan)

    @property
    def num_rounds(self) -> int:
        """Number of rounds in the settings."""
        return self.federation.rounds

    def summary(self) -> None:
        """Show the method and its main settings."""
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
        """Return the global adapters, the magnitudes for ``Reach``, and the fleet's fingerprint."""
        return self.result.state() | {
            "reach": self.reach.starts,
            "fleet": fingerprint_of(self.fleet),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned.

        Raises
        ------
        InputError
            The fleet has changed since the run began.
        """
        if state["fleet"] != fingerprint_of(self.fleet):
            raise InputError(
                "federation.fleet: is not the fleet that the run began with; bring"
                " its file back, or begin a new run (resume-from = '')"
            )
        self.result.restore(state)
        self.reach.starts = state["reach"]

    # ----- selection of clients and ranks ---------------------------------------------------------

    def draw(self, server_round: int) -> None:
        """Select the round's clients from the active ones.

        The seed determines the selection, so it is not stored.
        """
        sampled = drawn(self.run.settings, server_round, self.seats_of_rounds())
        self._limits = {seat.client: self.limit_of(seat) for seat in sampled}

    def seats_of_rounds(self) -> list[Seat]:
        """Return the clients from which a round's clients are selected."""
        return self.rounds.roster.active()

    def clients_of(self, server_round: int) -> Sequence[int]:
        """Return the selected clients."""
        return list(self._limits)

    def quorum_of(self) -> int | None:
        """Return the number of selected clients if not all were selected."""
        return len(self._limits) if self.federation.sampled_clients < 1 else None

    def limit_of(self, seat: Seat) -> int:
        """Return the maximum rank of the adapters that a client trains in its next round."""
        return self.job.rank_limit_of(seat.client, self.run.settings.lora)

    # ----- global adapters to the clients ---------------------------------------------------------

    def prepare(self, server_round: int) -> Iterator[list[Message]]:
        """Select the round's clients, and push the global adapters to them.

        The last part is sent with the order.
        """
        self.draw(server_round)
        if server_round > 1:
            yield from self.deliveries(self._limits, server_round, omitted=1)

    @property
    def brings_result(self) -> bool:
        """True if clients receive the result, for the evaluation on their own text."""
        return self.run.settings.evaluation.own_text

    def deliver(self, server_round: int) -> Iterator[list[Message]]:
        """Push the complete result to the clients for the evaluation on their own text."""
        if self.brings_result:
            largest = self.run.settings.lora.rank
            whole = {seat.client: largest for seat in self.rounds.roster.active()}
            yield from self.deliveries(whole, server_round + 1, omitted=0)

    def deliveries(
        self, limits: Mapping[int, int], server_round: int, omitted: int
    ) -> Iterator[list[Message]]:
        """Yield requests that push the global adapters to clients with these rank limits.

        ``omitted`` is the number of last parts that are not pushed.
        """
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
        """Return the number of the ``deliver`` with the first part of the global adapters."""
        return 0

    def adapters_for(self, client: int, limit: int) -> AdapterPlan:
        """Return the adapters of a client at a rank limit."""
        return self.averaged.adapters.limited(limit)

    def adapter_for(self, client: int, key: str, adapter: Adapter) -> Adapter:
        """Return the adapter of the blob ``key`` as a client of the round trains it."""
        return adapter.limited(self._limits[client])

    def blob_for(self, client: int, key: str, limit: int) -> bytes:
        """Return one blob of the global adapters as it is sent to a client."""
        return self.averaged.blob(key, limit)

    def _parts(self, client: int, limit: int) -> list[list[str]]:
        return parts(self.adapters_for(client, limit), self.run.settings)

    def _blobs(self, server_round: int, client: int, limit: int, part: int) -> dict[str, bytes]:
        found = {key: self.blob_for(client, key, limit) for key in self._parts(client, limit)[part]}
        return found | dict(self.part_blobs(server_round, client))

    # ----- round ----------------------------------------------------------------------------------

    def order(self, server_round: int, client: int) -> tuple[Scalars, Mapping[str, bytes]]:
        """Return the order to train.

        The first round needs no adapters, because every client makes the initial ones from the
        seed.
        """
        limit = self._limits[client]
        return Order(rank_limit=limit), (
            self._blobs(server_round, client, limit, -1) if server_round > 1 else {}
        )

    def reply_parts(self, server_round: int, client: int) -> Sequence[Sequence[str]]:
        """Return the reply parts; each consists of complete blocks, or the head."""
        return self._parts(client, self._limits[client])

    def part_order(self, client: int, hashes: list[str]) -> PartRequest:
        """Return a ``fetch`` that names the client's ranks, which determine the shapes."""
        return PartOrder(
            blob_sha256=hashes, rank_limit=self._limits[client], rank=self._reports[client]["rank"]
        )

    def note_report(self, seat: Seat, report: Mapping[str, Any]) -> None:
        """Record rank and number of skipped steps; with weights by samples, also their number."""
        told = self._told[seat.client] = validate(self.REPORT, report)
        skipped = seat.metrics.get("skipped_steps", 0) + told.skipped_steps
        samples = {"samples": told.samples} if self.federation.client_weights == "samples" else {}
        seat.metrics = {**samples, "lora_rank": told.rank, "skipped_steps": skipped}

    def is_plausible(self, inbox: Inbox, client: int) -> bool:
        """Return whether training can have led to all numbers of a reply.

        A client that fails the check is dropped.
        """
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

    # ----- aggregation ----------------------------------------------------------------------------

    def received(self, server_round: int) -> None:
        """Record the values with which the round's clients began.

        These are the adapters that were sent, or in round 1 those made from the seed.
        """
        for key, tensors in self._first_values() if server_round == 1 else self._sent_values():
            for name, tensor in tensors.items():
                self.reach_of(name).note(key, {name: tensor})

    def reach_of(self, name: str) -> Reach:
        """Return the limits for tensors of this name."""
        return self.reach

    def _first_values(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        for key in self.averaged.blobs:
            yield key, self.averaged.tensors(key)

    def _sent_values(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        for limit in sorted(set(self._limits.values())):
            for key in self.averaged.blobs:
                yield key, self.averaged.received(key, limit)

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Average the adapters blob by blob, in client order."""
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
        """Return the clients without those whose update is far from the others.

        A client is left out of the round if the distance of its update from the mean of the other
        updates is more than ``federation.max-update-ratio`` times the median distance. Different
        directions are fine as long as all clients differ to the same degree. When the mean has
        converged, for example, each client's update is the opposite of the sum of the others.
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
        # The small term tolerates rounding if all updates are nearly equal.
        most = self.limits.most_ratio * usual + 1e-6 * float(gram.diagonal().max().sqrt())
        far = [client for client in clients if distances[client] > most]
        for client in far:
            self.far.note(client, server_round, distances[client], usual)
        self.far.tell(self.rounds, "distance")
        return [client for client in clients if client not in far]

    def spread(
        self, client: int, key: str, name: str, change: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        """Return a client's change of a tensor in the global shape, padded with zeros."""
        whole = change.new_zeros(tuple(shape))
        whole[tuple(map(slice, change.shape))] = change
        return whole

    def settle(self, inbox: Inbox, clients: list[int]) -> None:
        """Process the reports of the round's clients before their adapters are averaged."""

    def note_round(self, server_round: int, clients: list[int]) -> None:
        """Record the duration of the round by the virtual clock, if the run has a fleet."""
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
        """Write the virtual times of the round to the ledger, unless they are there already."""
        if self.fleet is None:
            return
        for note in (note for note in self.averaged.rounds if note.round == server_round):
            for client, own in note.devices.items():
                self.run.folder.ledger.record_round(
                    self.rounds.lineage, note.round, client, own.seconds
                )

    def bytes_of(self, client: int, server_round: int) -> int:
        """Return the bytes of adapters that a client receives and sends in the round."""
        return bytes_of_round(
            self.adapters_for(client, self._limits[client]), self.run.settings, server_round
        )

    def seconds_of(self, client: int, server_round: int, num_bytes: int) -> float:
        """Return T_i of the round in seconds, by the virtual clock."""
        assert self.fleet is not None
        adapters = self.adapters_for(client, self._limits[client])
        kept = self.parameters_of(client)
        return virtual_seconds(
            self.fleet, self.run.settings, client, server_round, kept, adapters, num_bytes
        )

    def parameters_of(self, client: int) -> int:
        """Return the number of parameters of the frozen model that a client trains on."""
        return self.run.model.plan.num_parameters

    def _limits_after(self, server_round: int) -> list[int]:
        """Return the rank limits with which the global adapters are sent next.

        They are sent for training, and after the last round in full rank if clients evaluate the
        result.
        """
        if server_round == self.num_rounds:
            return [self.run.settings.lora.rank] if self.brings_result else []
        return [self.limit_of(seat) for seat in self.rounds.roster.active()]

    def _folded(
        self, inbox: Inbox, clients: list[int]
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield the mean of each block's adapters.

        Only one matrix's adapters of all clients are in memory at a time.
        """
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
        """Return the mean of one tensor that is trained without LoRA: float32.

        The sum is in float64 and in client order.
        """
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
        """Return one matrix's adapters as the clients trained them, with limited changes.

        The change of each factor is limited relative to the median client. All clients began the
        round with the same factors, so a pair of a huge B and a tiny A is far from them in both
        factors.
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
        """Return the factors that limit the clients' changes of tensors, by name and client.

        Changes are compared by their root mean square, because ranks and numbers of rows may
        differ.

        Parameters
        ----------
        inbox : replies of the round
        key : key of the blob
        shapes : shapes of each client's tensors, by client and name
        start : values at the start of the round
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
        """Return one tensor as a client trained it; a ``factor`` below 1 reduces its change."""
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
        """Return one tensor as a client sent it: float32."""
        return read_adapter(
            partial(inbox.tensor, client, key), name, shape, self.federation.payload
        )

    def _start(self, key: str) -> Mapping[str, torch.Tensor]:
        """Return the values to which clients' differences are added; empty if values are sent.

        These are the round's global adapters before rounding, although clients began with rounded
        ones. So the rounding error of the download only moves the point at which the gradient is
        taken, and is not part of the update.
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
        """Return one tensor as a client trained it; ranks that the client removed are zero."""
        if not start:
            return sent
        return sums({name: self._begun(start, client, key, name, tuple(sent.shape))}, {name: sent})[
            name
        ]

    def _begun(
        self, start: Mapping[str, torch.Tensor], client: int, key: str, name: str, shape: Shape
    ) -> torch.Tensor:
        """Return a client's initial value of one tensor of ``start``; zeros for removed ranks."""
        own = self.part_for(client, key, name, start[name])
        return cut_to_rank({name: own[tuple(map(slice, shape))]}, self._told[client].rank)[name]

    def part_for(self, client: int, key: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a client's part of a global tensor, at full rank."""
        return tensor

    def mean_of(
        self, key: str, adapter: Adapter, factors: list[Factors], clients: list[int]
    ) -> Factors:
        """Return the mean of one matrix's adapters."""
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

"""Federated averaging of adapters, which the tuning methods have in common.

In every round each selected client trains the global adapters on its own data, and the server
averages the results. The base model is frozen and is not sent.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from espalier.amounts import count
from espalier.errors import InputError
from espalier.hf.nf4.matrices import require_quantisable
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.message import MessageBody, validate
from espalier.messages.parts import reports_samples
from espalier.methods.tuning.adapters.contract import Order, PartOrder, TuningReport
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.methods.tuning.adapters.summands import value_scale
from espalier.methods.tuning.adapters.tensors import (
    before_round,
    of_all_rounds,
    of_round,
    parts,
    trained,
)
from espalier.models.adapters import FACTORS, Adapter, AdapterPlan
from espalier.models.plan import block_of_key
from espalier.seeds import derive_seed
from espalier.settings.run import RunSettings
from espalier.settings.tables.training import TrainingSettings
from pruning_kernels.lora.clipping import MIN_CLIENTS, distances_from_others
from pruning_kernels.lora.factor_means import weighted_mean, zero_padded_mean
from pruning_kernels.lora.factors import Factors
from strategies.averaging.adapters import AdapterResult
from strategies.averaging.client_weights import count_claims
from strategies.averaging.training_bound import Reach
from strategies.averaging.updates import UpdateLimits, Updates
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import ClientOrder, Method, ProgressWords, Selection
from strategies.base.roster import Seat
from strategies.base.run import Run
from strategies.base.sums.unmasking import Sums
from strategies.fleet import (
    DeviceTime,
    FleetClock,
    RoundTime,
    bytes_of_round,
    fleet_of_run,
    virtual_seconds,
)

Mean = Callable[[str, Adapter, list[Factors], list[float]], Mapping[str, Tensor]]
"""Function of blob key, global adapter, clients' factors and their weights.

It returns the new global tensors of the adapter, by canonical name.
"""


class AdapterAverager:
    """Averaging of one run's adapters.

    Parameters
    ----------
    adapters : function that returns the global adapters
    rank_of : function that returns the maximum rank that a client trains in its next round; None
        for the settings' rank
    brings_result : True if clients receive the result after the last round; None: if they evaluate
        it on text of their own
    report : fields that clients report with their adapters
    training : training settings of tensors whose names begin with a prefix, if they are not those
        of the run
    """

    def __init__(
        self,
        run: Run,
        adapters: Callable[[], AdapterResult],
        *,
        rank_of: Callable[[Seat], int] | None = None,
        brings_result: bool | None = None,
        report: type[TuningReport] = TuningReport,
        training: Mapping[str, TrainingSettings] | None = None,
    ) -> None:
        self.run = run
        self.adapters = adapters
        self.job = run.settings.of(AdapterAveraging)
        self.federation = run.settings.federation
        self.clock = FleetClock(run)
        self._round = 0
        """Number of the round that was prepared last."""
        self.rank_limits: dict[int, int] = {}
        """Maximum rank that each client of the round trains."""
        self.reports: dict[int, TuningReport] = {}
        """Report of each client of the round."""
        self._faults: dict[int, dict[str, str]] = {}
        """Implausible tensors of each client of the round, by blob key."""
        self._rank_of = rank_of or (
            lambda seat: self.job.rank_limit_of(seat.client, run.settings.lora)
        )
        own_text = run.settings.evaluation.own_text
        self._brings_result = own_text if brings_result is None else brings_result
        self._report = report
        self._starts: dict[str, float] = {}
        """Largest magnitude with which clients began, by ``<blob key>/<name>``."""
        self._reaches = {
            prefix: Reach(settings, self.federation.sends_differences, self._starts)
            for prefix, settings in {**(training or {}), "": run.settings.training}.items()
        }
        """Bounds by the beginning of a tensor's name; the first one that fits counts."""
        ratio = self.federation.update_limit
        self._limits = UpdateLimits(ratio)
        self._far = UpdateLimits(ratio)

    def state(self) -> dict[str, Any]:
        """Return the magnitudes with which clients began, and the fleet's fingerprint."""
        return {"reach": self._starts, "fleet": self.clock.fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned; refuse another fleet than the run's."""
        self.clock.require_same(state["fleet"])
        self._starts.clear()
        self._starts.update(state["reach"])

    # ----- clients of a round and their adapters --------------------------------------------------

    def draw(self, server_round: int, seats: Sequence[Seat] | None = None) -> dict[int, int]:
        """Select a round's clients among ``seats``, by default all; return their rank limits.

        The seed determines the selection, so it is not stored.
        """
        among = self.run.rounds.roster.active() if seats is None else seats
        number = self.federation.clients_of_round(len(among))
        if number < len(among):
            seed = derive_seed(self.run.settings.seed, "clients", server_round=server_round)
            # ``choice`` returns places in random order; sorted, they follow the client order.
            places = np.random.default_rng(seed).choice(len(among), number, replace=False)
            among = [among[place] for place in sorted(places.tolist())]
        return {seat.client: self._rank_of(seat) for seat in among}

    def prepare(
        self, server_round: int, rank_limits: Mapping[int, int], first: int = 0
    ) -> Selection:
        """Push the global adapters to the clients of a round, and return these clients.

        The last part is sent with the order. The first round needs no adapters, because every
        client makes the initial ones from the seed. ``first`` is the number of the ``push`` with
        the first part.
        """
        self._round = server_round
        self.rank_limits = dict(rank_limits)
        adapters = self.adapters()
        # The first reading fixes the fleet's file for the whole run.
        self.clock.record(adapters.rounds)
        values = adapters.beginnings(self.rank_limits.values())
        # In round 1 clients begin with the initial values, not rounded for the wire.
        if server_round == 1:
            values = ((key, adapters.tensors(key)) for key in adapters.blobs)
        for key, tensors in values:
            # All bounds have the same record of initial magnitudes.
            self._reaches[""].note(key, tensors)
        if server_round > 1:
            self.push(server_round, self.rank_limits, omitted=1, first=first)
        sampled = self.federation.sampled_clients < 1
        # The quorum refers to the sampled clients; without sampling to all of the run.
        return Selection(list(self.rank_limits), len(self.rank_limits) if sampled else None)

    def push(
        self, server_round: int, rank_limits: Mapping[int, int], omitted: int, first: int = 0
    ) -> None:
        """Push the global adapters to clients with these rank limits, without ``omitted`` parts.

        ``first`` is the number of the ``push`` with the first part.
        """
        rounds = self.run.rounds
        client_parts = {
            # Without the last parts, which travel with the order.
            client: self._parts(client, limit, server_round)[: -omitted or None]
            for client, limit in rank_limits.items()
        }
        # Clients of low rank may have fewer parts.
        for part in range(max(map(len, client_parts.values()), default=0)):
            seats = [
                seat for seat in rounds.receiving() if part < len(client_parts.get(seat.client, ()))
            ]
            requests = [
                rounds.request(
                    "push",
                    seat.client,
                    server_round,
                    Order(rank_limit=rank_limits[seat.client]),
                    self._blobs(
                        seat.client, rank_limits[seat.client], client_parts[seat.client][part]
                    )
                    | self.adapters().along(seat.client),
                    part + first,
                )
                for seat in seats
            ]
            # Answers only confirm; ``exchange`` drops clients that fail.
            list(rounds.exchange(requests))

    def push_result(self, server_round: int) -> None:
        """Push the complete result after the last round to the clients, if they need it."""
        self.clock.record(self.adapters().rounds)
        if self._brings_result:
            largest = self.run.settings.lora.rank
            rank_limits = {seat.client: largest for seat in self.run.rounds.roster.active()}
            self.push(server_round + 1, rank_limits, omitted=0)

    def plan_of(self, client: int) -> AdapterPlan:
        """Return the adapters that a client of the round trains."""
        plan = self.adapters().plan_for(client, self.rank_limits[client])
        return of_round(plan, self.run.settings, self._round)

    @property
    def _trained(self) -> AdapterPlan:
        """Global adapters with the factors that are trained in the round."""
        return of_round(self.adapters().adapters, self.run.settings, self._round)

    def _parts(self, client: int, limit: int, server_round: int) -> list[list[str]]:
        return parts(self.adapters().plan_for(client, limit), self.run.settings, server_round)

    def _blobs(self, client: int, limit: int, keys: Iterable[str]) -> dict[str, bytes]:
        return {key: self.adapters().blob_for(client, key, limit) for key in keys}

    # ----- orders and replies ---------------------------------------------------------------------

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order to train; each part of the reply has complete blocks, or the head."""
        limit = self.rank_limits[client]
        # Round 1 sends no adapters: the seed determines them.
        later = server_round > 1
        last = self._parts(client, limit, server_round)[-1] if later else ()
        return ClientOrder(
            Order(rank_limit=limit),
            self._blobs(client, limit, last),
            self.adapters().along(client) if later else {},
            # Contracts of later parts need the rank that the client reported.
            fetch=lambda report, hashes: PartOrder(
                blob_sha256=hashes, rank_limit=limit, rank=report["rank"]
            ),
        )

    def note_part(self, seat: Seat, body: MessageBody) -> None:
        """Record rank, skipped steps, number of samples, and values out of reach of training.

        The values are those that the check of the contract decoded.
        """
        if body.header.kind == "train":
            report = self.reports[seat.client] = validate(self._report, body.fields)
            samples = {"samples": report.samples} if reports_samples(self.run.settings) else {}
            seat.note(**samples, lora_rank=report.rank, skipped_steps=report.skipped_steps)
            # A repeated first part starts the record again.
            self._faults[seat.client] = {}
        for key, tensors in body.tensors.items():
            if fault := self._fault(seat.client, key, tensors):
                self._faults[seat.client][key] = fault

    def _fault(self, client: int, key: str, tensors: Mapping[str, Tensor]) -> str:
        """Return the first tensor of a blob that training cannot have reached; empty if none."""
        # Values with which the client began, if it sent differences.
        initial: Mapping[str, Tensor] = {}
        if self.federation.sends_differences:
            initial = self.adapters().part_for(client, key, self.adapters().tensors(key))
        for name, sent in tensors.items():
            reach = next(bound for start, bound in self._reaches.items() if name.startswith(start))
            trained = sent
            # The trained value is what has to be finite: a difference can overflow it.
            if name in initial:
                trained = initial[name][tuple(map(slice, sent.shape))] + sent
            finite = bool(torch.isfinite(trained).all())
            # The bound applies to what was sent.
            if not finite or (sent.numel() and sent.abs().max().item() > reach.limit(key, name)):
                return f"{key} {name}: {reach.reason}"
        return ""

    def fault_of(self, client: int) -> str | None:
        """Return the first tensor with values that training cannot have reached, and why."""
        faults = self._faults[client]
        # In the order of the plan, so the reason does not depend on the order of arrival.
        return next((faults[key] for key in self.plan_of(client).shapes() if key in faults), None)

    # ----- aggregation ----------------------------------------------------------------------------

    def updates(self, server_round: int, inbox: Inbox, clients: list[int]) -> Updates:
        """Return the updates of a round's clients, without those that are far from the others.

        A client is left out of the round if the distance of its update from the mean of the other
        updates is more than ``federation.max-update-ratio`` times the median distance. Different
        directions are fine as long as all clients differ to the same degree. When the mean has
        converged, for example, each client's update is the opposite of the sum of the others. Only
        ``clipped-mean`` leaves clients out.
        """
        plans = {client: self.plan_of(client) for client in clients}
        ranks = {client: self.reports[client].rank for client in plans}
        # ``updates.products`` uses changes that are clipped already.
        updates = Updates(inbox, self.adapters(), plans, ranks, self.federation, self._limits)
        if len(clients) < MIN_CLIENTS or self._limits.off:
            return updates
        # (clients, clients)
        products = updates.products()
        distances = dict(zip(clients, distances_from_others(products), strict=True))
        usual = median_low(distances.values())
        # The small term tolerates rounding if all updates are nearly equal.
        limit = self._limits.max_ratio * usual + 1e-6 * float(products.diagonal().max().sqrt())
        far = [client for client in clients if distances[client] > limit]
        for client in far:
            self._far.note(client, server_round, distances[client], usual)
        self._far.tell(self.run.rounds, "distance")
        updates.leave_out(far)
        return updates

    def note_times(self, server_round: int, clients: Iterable[int]) -> None:
        """Record the duration of the round by the virtual clock, if the run has a fleet."""
        fleet = self.clock.fleet
        if fleet is None:
            return
        settings = self.run.settings
        # Virtual time depends on the plan and on bytes, not on this machine's speed.
        num_parameters = self.run.model.plan.num_parameters
        times = {}
        for client in clients:
            adapters = self.plan_of(client)
            limit = self.rank_limits[client]
            received = before_round(self.adapters().plan_for(client, limit), settings, server_round)
            num_bytes = bytes_of_round(adapters, received, settings, server_round)
            seconds = virtual_seconds(
                fleet, settings, client, server_round, num_parameters, adapters, num_bytes
            )
            times[client] = DeviceTime(seconds, num_bytes)
        note = RoundTime.of(server_round, times)
        self.adapters().note_round(note)
        self.run.progress.note("timed", f"timed        {note.in_words()}", **note.to_json())

    def samples_of(self, clients: Iterable[int]) -> dict[int, float]:
        """Return the clients' numbers of samples as weights, or 1 for each with equal weights."""
        weighed = self.federation.weighs_samples
        return {
            client: float(self.reports[client].samples) if weighed else 1.0 for client in clients
        }

    def fold(
        self, server_round: int, inbox: Inbox, clients: list[int], mean: Mean | None = None
    ) -> None:
        """Average the adapters of a round's clients, blob by blob, in client order.

        ``mean`` replaces the mean of the settings.
        """
        updates = self.updates(server_round, inbox, clients)
        # Clients that were left out do not delay the virtual round.
        self.note_times(server_round, updates.clients)
        weights = self.samples_of(updates.clients)
        self.average(updates, weights, self.limits_after(server_round), mean)

    def average(
        self,
        updates: Updates,
        claimed: Mapping[int, float],
        limits_after: Iterable[int],
        mean: Mean | None = None,
    ) -> None:
        """Replace the global adapters by the mean of the clients', blob by blob.

        ``claimed`` has the weights that clients claim, ``limits_after`` the rank limits with which
        the adapters are sent next. ``mean`` replaces the mean of the settings.
        """
        rounds = self.run.rounds
        # Claimed weights are limited first, so a client cannot buy influence by a large number.
        weights = count_claims(rounds, "weight", claimed)
        means = self._means(updates, weights, mean or self._mean)
        self.adapters().replace(means, limits_after)
        # After all blobs, one line per client.
        self._limits.tell(rounds)

    def average_sums(self, sums: Sums, clients: Sequence[int], limits_after: Iterable[int]) -> None:
        """Replace the global adapters by the mean of the clients', blob by blob.

        ``sums`` has the weighted values in fixed point (``value_scale``), and the weights.
        """
        settings = self.run.settings
        scale = value_scale(settings)
        total = sums.total_weight(settings, clients)
        shapes = self._trained.shapes()

        def mean_of(key: str) -> dict[str, Tensor]:
            tensors = self.adapters().tensors(key)
            for name, shape in shapes[key].items():
                # Rounding to float32 is the last step.
                values = sums.mean(key, name, scale, total)
                tensors[name] = values.view(shape).to(torch.float32)
            return tensors

        self.adapters().replace(self._blob_by_blob(mean_of, len(clients)), limits_after)

    def limits_after(self, server_round: int) -> list[int]:
        """Return the rank limits with which the global adapters are sent next.

        They are sent for training, and after the last round in full rank if clients evaluate the
        result.
        """
        # Nothing is sent after the last round unless clients evaluate the result.
        if server_round == self.federation.rounds:
            return [self.run.settings.lora.rank] if self._brings_result else []
        return [self._rank_of(seat) for seat in self.run.rounds.roster.active()]

    def _means(
        self, updates: Updates, weights: Mapping[int, float], mean: Mean
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the mean of each block; one matrix of all clients is in memory at a time."""
        adapters = self._trained
        in_order = [weights[client] for client in updates.clients]
        # Only a complete pair of A and B has a product; a single tensor has a mean of its own.
        has_products = adapters.factors == FACTORS and not adapters.bases
        # A trimmed mean works number by number, so it needs tensors and not products.
        by_tensor = self.federation.trim(len(updates.clients)) > 0 or not has_products

        def mean_of(key: str) -> dict[str, Tensor]:
            index = block_of_key(key)
            # Factors that are not trained keep their values.
            tensors = self.adapters().tensors(key)
            for adapter in adapters.blocks.get(index, ()) if index is not None else ():
                if by_tensor:
                    for name in adapters.trained_shapes(adapter):
                        tensors[name] = updates.mean(key, name, weights)
                    continue
                tensors |= mean(key, adapter, updates.factors(key, adapter), in_order)
            # Tensors that are trained as a whole, such as a classification head.
            for name in adapters.whole.get(key, {}):
                tensors[name] = updates.mean(key, name, weights)
            return tensors

        return self._blob_by_blob(mean_of, len(updates.clients))

    def _blob_by_blob(
        self, mean_of: Callable[[str], dict[str, Tensor]], num_clients: int
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the mean of each blob, and show progress."""
        keys = list(self.adapters().adapters.shapes())
        self.run.progress.begin("averaging", sum(block_of_key(key) is not None for key in keys))
        for key in keys:
            # One blob is made, stored and freed before the next.
            yield key, mean_of(key)
            if (index := block_of_key(key)) is not None:
                clients = count(num_clients, "client")
                self.run.progress.step("averaged", f"block {index} of {clients}", block=index)

    def _mean(
        self, key: str, adapter: Adapter, factors: list[Factors], weights: list[float]
    ) -> dict[str, Tensor]:
        if self.job.averages_updates:
            averaged = weighted_mean(factors, weights, adapter.rank, adapter.scaling)
        else:
            averaged = zero_padded_mean(factors, weights, adapter.rank)
        return adapter.named(averaged.b, averaged.a)


class Tuning(Method):
    """Base class of methods that train adapters and average them.

    The members of ``Method`` that are defined here call ``averager``; a method overrides the ones
    in which it differs.
    """

    WORDS = ProgressWords("adapters", "training", "trained")
    RESULT: ClassVar[type[Any]] = AdapterResult
    """Class of the result."""
    result: Any
    """Object of that class."""

    def __init__(
        self, run: Run, evaluation: ClientEvaluation, *of_result: Any, **of_averager: Any
    ) -> None:
        """Make result and averager.

        Parameters
        ----------
        of_result : arguments of the result after the checkpoint's blobs
        of_averager : arguments of the averager that are not the default
        """
        super().__init__(run, evaluation)
        self.result = self.RESULT(run.settings, run.model, run.checkpoint.blobs, *of_result)
        self.averager = AdapterAverager(run, self.adapters, **of_averager)

    def adapters(self) -> AdapterResult:
        """Return the global adapters, by default the result."""
        result: AdapterResult = self.result
        return result

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse adapters or NF4 that the model does not allow, and an unknown fleet."""
        # The value ``auto`` is checked later: it depends on whether the run is a simulation.
        fleet_of_run(settings, simulation=False)
        adapters = trained(model.plan, settings)
        adds_modules = adapters.bases or before_round(adapters, settings, 2).folded
        # ``torch.compile`` traces the base once; modules that are added per round are not in it.
        if adds_modules and settings.training.compile:
            raise InputError(
                f"training.compile = true: compiled code would leave out what {settings.method}"
                " adds to the base model in each round; set it to false"
            )
        if settings.training.base == "nf4":
            require_quantisable(model.plan)

    def description(self) -> str:
        """Return the main settings in words."""
        settings = self.run.settings
        lora = settings.lora
        training = settings.training
        size = of_all_rounds(self.averager.adapters().adapters, settings).num_parameters
        averaged = self.averager.job.averaged
        rule = settings.federation.rule_in_words
        return (
            f"rank {lora.rank} on {lora.targets}, {size:,} parameters, {averaged} averaged{rule},"
            f" {count(training.steps, 'step')} a round, base {training.base}"
        )

    def prepare(self, server_round: int, save: Callable[[], None]) -> Selection:
        """Select the round's clients, and push the global adapters to them."""
        return self.averager.prepare(server_round, self.averager.draw(server_round))

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order to train the global adapters."""
        return self.averager.order(server_round, client)

    def note_part(self, seat: Seat, body: MessageBody) -> None:
        """Record rank, skipped steps, number of samples, and values out of reach of training."""
        self.averager.note_part(seat, body)

    def fault_of(self, inbox: Inbox, client: int) -> str | None:
        """Return the first tensor with values that training cannot have reached, and why."""
        return self.averager.fault_of(client)

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Average the adapters blob by blob, in client order."""
        self.averager.fold(server_round, inbox, clients)

    def fold_sums(self, server_round: int, sums: Sums, clients: list[int]) -> None:
        """Average the adapters, of which only the sum is known."""
        averager = self.averager
        averager.note_times(server_round, clients)
        averager.average_sums(sums, clients, averager.limits_after(server_round))

    def state(self) -> dict[str, Any]:
        """Return the state of result and averager."""
        return super().state() | self.averager.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        self.averager.restore(state)
        super().restore(state)

    def push_result(self, server_round: int) -> None:
        """Push the result to the clients after the last round, if they need it."""
        self.averager.push_result(server_round)

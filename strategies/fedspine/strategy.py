"""FedSpine (Yao et al. 2025): devices prune and fine-tune in turn, each at its own ratio and rank.

A round has the paper's five stages. The server chooses a pruning ratio and a LoRA rank for every
device (``choice.py``). Each device cuts its model to that ratio, by the importance that it
measured in the round before. The global adapters are sent in the shapes of the smaller model and
with the device's first ranks. The device trains and measures. The server averages the updates row
by row over the devices that kept the row, each with a weight from the importance of its LoRA
modules (section 4.4). The outcome of the round trains the bandits.

In its first round a device trains the whole model, because nothing was measured before.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from flwr.app import Message

from espalier.amounts import count
from espalier.hf.opening.opened import OpenedModel
from espalier.messages.message import Letter
from espalier.methods.fedspine.contract import STRUCTURE, CutOrder, SpineReport
from espalier.methods.fedspine.settings import FedSpineSettings
from espalier.models.adapters import Adapter, AdapterPlan
from espalier.models.groups import Groups
from espalier.models.plan import block_key, block_of_key
from espalier.models.structure import kind_of, structured_plan
from espalier.settings.run import RunSettings
from pruning_kernels.lora.factor_importance import Terms, comparable, spectral_term
from pruning_kernels.lora.factor_means import KeptFactors
from pruning_kernels.lora.factors import Factors
from strategies.averaging.client_weights import count_claims
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.roster import Seat
from strategies.base.run import Run
from strategies.fedpetuning.strategy import FedPETuning
from strategies.fedspine.choice import Arm, Choices, arms_from_json, arms_to_json
from strategies.fedspine.coverage_mean import covered_mean, kept_map, part_of
from strategies.fedspine.model_fit import (
    require_falls,
    require_measured,
    require_share,
    require_whole_nf4_blocks,
)
from strategies.fedspine.result import DeviceRound, RefinedResult, RoundNote
from strategies.fedspine.reward import Outcome
from strategies.fleet.training_time import bytes_of_bits


class FedSpine(FedPETuning):
    """FedPETuning of devices that prune their models during the run.

    The parameters are those of ``FedPETuning``.
    """

    REPORT = SpineReport

    job: FedSpineSettings

    def __init__(self, run: Run, evaluation: ClientEvaluation | None = None) -> None:
        super().__init__(run, evaluation)
        self.groups = Groups.of(run.model.plan)
        self.choices = Choices(run.settings, self.groups.wanted(self.job))
        self._arms: dict[int, Arm] = {}
        """Ratio and rank of each device in the round; devices in their first round have none."""
        self._importance: dict[int, float] = {}
        """Importance I(B_total) of the round's devices."""
        self._questioned: set[int] = set()
        """Devices of the round that were asked to cut more."""
        self._kept_their_cut: set[int] = set()
        """Devices among them that cut nothing."""

    def new_result(self) -> RefinedResult:
        """Return the initial result: adapters made from the seed, and whole models."""
        return RefinedResult(self.run.settings, self.run.model, self.run.checkpoint.blobs)

    @property
    def refined(self) -> RefinedResult:
        """Global adapters, and the cut of each device."""
        assert isinstance(self.result, RefinedResult)
        return self.result

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse an impossible run before it starts.

        Impossible are a model without prunable groups, groups that no adapter measures, an
        unreachable pruning ratio, bandits that cannot learn, and a fleet with too few devices.
        """
        require_falls(settings)
        model.require_groups()
        super().require_fit(settings, model, capabilities)
        require_measured(settings, model.plan)
        require_whole_nf4_blocks(settings, model.plan)
        require_share(settings, model.plan)

    def summary(self) -> None:
        """Show the method and its main settings."""
        job = self.job
        settings = self.run.settings
        ranks = (
            f"ranks {self.choices.space.lowest_rank} to {settings.lora.rank}"
            if job.adaptive_rank
            else "one rank"
        )
        ranks = ranks if job.allocation != "fixed" else f"rank {job.usual_rank(settings.lora)}"
        steps = count(settings.training.steps, "step")
        text = f"{job.share:g} of blocks pruned, {ranks}, chosen by {job.allocation}, {steps}"
        fleet = settings.federation.fleet_name(job, simulation=self.run.simulation)
        times = f"times of the fleet {fleet}" if fleet else "times as clients measure them"
        self.run.progress.note("method", f"{settings.method:<12} {text}, {times}")

    def state(self) -> dict[str, Any]:
        """Return adapters, cuts, rounds, the bandits' state and the choices for the next round."""
        return super().state() | {
            "choices": self.choices.to_json(),
            "arms": arms_to_json(self._arms),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        super().restore(state)
        self.choices.restore(state["choices"])
        self._arms = arms_from_json(state["arms"])

    # ----- stage 1: configuration update ----------------------------------------------------------

    def before_round(self, server_round: int) -> bool:
        """Choose ratio and rank for every active device that has measured its groups."""
        if server_round == 1:
            return False
        measured = [
            seat.client for seat in self.rounds.roster.active() if self.choices.knows(seat.client)
        ]
        self._arms = {client: self.choices.arm(client, server_round) for client in measured}
        return True

    def limit_of(self, seat: Seat) -> int:
        """Return r_t, the rank of a device."""
        arm = self._arms.get(seat.client)
        return self.job.usual_rank(self.run.settings.lora) if arm is None else arm.rank

    # ----- stages 2 and 3: cuts and adapters to the devices ---------------------------------------

    def prepare(self, server_round: int) -> Iterator[list[Message]]:
        """Select the round's devices, request their cuts, and push the global adapters.

        The last part of the adapters is sent with the order.
        """
        self._questioned = set()
        self._kept_their_cut = set()
        self.draw(server_round)
        if server_round > 1:
            yield self._questions(server_round)
            yield from self.deliveries(self._limits, server_round, omitted=1)

    def _questions(self, server_round: int) -> list[Message]:
        """Return the cut requests to the devices that have not reached their ratio."""
        asked = [
            seat
            for seat in self.receiving()
            if seat.client in self._limits and self._has_to_cut(seat.client)
        ]
        self._questioned = {seat.client for seat in asked}
        return [
            self.rounds.request(
                "deliver",
                seat,
                server_round,
                CutOrder(pruned=self._arms[seat.client].pruned),
                self._bits(seat.client),
            )
            for seat in asked
        ]

    def _has_to_cut(self, client: int) -> bool:
        """Return True if a device's ratio of the round is above its present cut."""
        arm = self._arms.get(client)
        return arm is not None and not self.groups.reaches(
            self.refined.cut_of(client), arm.pruned, self.job
        )

    def note_delivered(self, letter: Letter) -> None:
        """Store a device's cut."""
        if STRUCTURE not in letter.blobs:
            return
        client = letter.header.client
        if not self.refined.take_cut(client, letter.blobs[STRUCTURE]):
            self._kept_their_cut.add(client)
            seat = self.rounds.roster.seats[client]
            text = (
                f"kept its cut {seat.site}: nothing new was measured, or nothing more can go; it"
                " trains what it had"
            )
            self.run.progress.note(
                "kept_cut", text, client=client, site=seat.site, round=letter.header.server_round
            )

    def first_delivery(self, server_round: int) -> int:
        """Return 1 in a round, because ``deliver`` 0 is the cut request; 0 after the rounds."""
        return 1 if server_round <= self.num_rounds else 0

    def part_blobs(self, server_round: int, client: int) -> Mapping[str, bytes]:
        """Return the bits of a device's cut, which determine the shapes; none in round 1."""
        return self._bits(client) if server_round > 1 else {}

    def _bits(self, client: int) -> dict[str, bytes]:
        return {STRUCTURE: self.refined.bits(client)}

    def adapters_for(self, client: int, limit: int) -> AdapterPlan:
        """Return the adapters in the shapes of a device's smaller model."""
        return self.refined.plan_for(client, limit)

    def adapter_for(self, client: int, key: str, adapter: Adapter) -> Adapter:
        """Return one adapter as a device of the round trains it."""
        index = block_of_key(key)
        assert index is not None
        plan = self.refined.plan_for(client, self._limits[client])
        return next(one for one in plan.blocks[index] if one.linear.name == adapter.linear.name)

    def blob_for(self, client: int, key: str, limit: int) -> bytes:
        """Return one blob of the global adapters in the shapes of a device's smaller model."""
        return self.refined.blob_for(client, key, limit)

    def part_for(self, client: int, key: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of B, or columns of A, that a device keeps."""
        return self.refined.part_for(client, key, {name: tensor})[name]

    def spread(
        self, client: int, key: str, name: str, change: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        """Return the change with a device's rows or columns at their places in the whole matrix."""
        index = block_of_key(key)
        adapters = self.averaged.adapters.blocks.get(index, ()) if index is not None else ()
        adapter = next((one for one in adapters if name in one.shapes()), None)
        if adapter is None:
            return super().spread(client, key, name, change, shape)
        keep, (_, side) = self._kept(client, key, adapter), kind_of(adapter.linear.name)
        whole = change.new_zeros(tuple(shape))
        if name == adapter.name_b and side == 0:
            whole[keep, : change.shape[1]] = change
        elif name == adapter.name_a and side == 1:
            whole[: change.shape[0], keep] = change
        else:
            return super().spread(client, key, name, change, shape)
        return whole

    @property
    def brings_result(self) -> bool:
        """True if devices need the result for their own models."""
        return self.evaluation.asked or self.lets_work_alone

    @property
    def lets_work_alone(self) -> bool:
        """True if devices write their models, even if nobody evaluates them."""
        return self.job.makes_alone

    def _limits_after(self, server_round: int) -> list[int]:
        """Return no limits: adapters are cut for each device when they are sent."""
        return []

    # ----- stage 4: reports of the devices, which train in client_app/methods/fedspine/device.py -----------------

    def note_report(self, seat: Seat, report: Mapping[str, Any]) -> None:
        """Record trained rank, skipped steps and the device's pruning ratio."""
        super().note_report(seat, report)
        seat.metrics |= {"pruned": self.groups.share(self.refined.cut_of(seat.client))}

    def _sent_values(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        """Yield the global adapters: no device begins with larger numbers than these."""
        for key in self.averaged.blobs:
            yield key, self.averaged.tensors(key)

    def settle(self, inbox: Inbox, clients: list[int]) -> None:
        """Compute the importance of the devices' LoRA modules."""
        claimed = {client: self._report(client).taylor for client in clients}
        taylor = count_claims(self.rounds, "importance", claimed, self.federation.max_weight_ratio)
        self._importance = comparable(
            {
                client: Terms(taylor[client], value)
                for client, value in self._spectral(inbox, clients)
            }
        )

    def note_round(self, server_round: int, clients: list[int]) -> None:
        """Record the time of each device, and update the bandits."""
        sent = {client: self.bytes_of(client, server_round) for client in clients}
        seconds = {
            client: self.seconds_of(client, server_round, sent[client]) for client in clients
        }
        outcomes = {client: self._outcome(client, seconds[client]) for client in clients}
        rewards = self.choices.learn(self._arms, outcomes, server_round)
        devices = {
            client: DeviceRound(
                pruned=self.groups.share(self.refined.cut_of(client)),
                rank=self._told[client].rank,
                seconds=seconds[client],
                num_bytes=sent[client],
                importance=self._importance[client],
                reward=rewards[client],
                kept_its_cut=client in self._kept_their_cut,
            )
            for client in clients
        }
        note = RoundNote.of(server_round, devices)
        self.refined.rounds = [*self.refined.rounds, note]
        self._show(note)

    def _show(self, note: RoundNote) -> None:
        pruned, ranks = (
            [getattr(own, name) for own in note.devices.values()] for name in ("pruned", "rank")
        )
        text = (
            f"refined      {fmean(pruned):.1%} pruned and rank {fmean(ranks):.3g} on average,"
            f" {note.in_words()}"
        )
        self.run.progress.note("refined", text, **note.to_json())

    def _report(self, client: int) -> SpineReport:
        told = self._told[client]
        assert isinstance(told, SpineReport)
        return told

    def _spectral(self, inbox: Inbox, clients: list[int]) -> list[tuple[int, float]]:
        """Return the second term of equation 14 for each device.

        It is computed from the adapters that were sent, so it does not rely on a device's claim.
        """
        sums: dict[int, list[float]] = {client: [] for client in clients}
        for index, adapter in self.averaged.adapters:
            for client, factors in zip(
                clients, self._factors(inbox, block_key(index), adapter, clients), strict=True
            ):
                sums[client].append(spectral_term([factors]))
        return [(client, fmean(values)) for client, values in sums.items()]

    def bytes_of(self, client: int, server_round: int) -> int:
        """Return the bytes of adapters and of cut bits."""
        adapters = self.adapters_for(client, self._limits[client])
        asked = client in self._questioned
        bits = bytes_of_bits(adapters, self.groups, self.run.settings, server_round, asked=asked)
        return super().bytes_of(client, server_round) + bits

    def seconds_of(self, client: int, server_round: int, num_bytes: int) -> float:
        """Return the seconds by the virtual clock, or as the device measured them."""
        return (
            self._report(client).seconds
            if self.fleet is None
            else super().seconds_of(client, server_round, num_bytes)
        )

    def parameters_of(self, client: int) -> int:
        """Return the number of parameters that a device has not removed."""
        return structured_plan(
            self.run.model.plan, self.refined.structure_of(client)
        ).num_parameters

    def _outcome(self, client: int, seconds: float) -> Outcome:
        told = self._report(client)
        arm = self._arms.get(client)
        before = self.choices.pruned.get(client, 0.0)
        after = before if arm is None or client in self._kept_their_cut else arm.pruned
        arrived = self.groups.reaches(self.refined.cut_of(client), self.choices.target, self.job)
        return Outcome(
            told.loss_before,
            told.loss_after,
            before,
            after,
            self._importance[client],
            seconds,
            arrived,
        )

    # ----- stage 5: aggregation -------------------------------------------------------------------

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Average the updates, then clear the caches of this round."""
        super().fold(server_round, inbox, clients)
        self.refined.forget_plans()

    def _claimed_weight(self, client: int) -> float:
        return (
            self._importance[client]
            if self.federation.client_weights == "importance"
            else super()._claimed_weight(client)
        )

    def mean_of(
        self, key: str, adapter: Adapter, factors: list[Factors], clients: list[int]
    ) -> Factors:
        """Return the mean of one matrix's updates over the devices that kept a row or column.

        Parts that only devices without a valid reply in this round keep are left unchanged.
        """
        maps = {
            seat.client: self._kept(seat.client, key, adapter)
            for seat in self.rounds.roster.active()
        }
        kept = [
            KeptFactors(own, maps[client]) for client, own in zip(clients, factors, strict=True)
        ]
        others = [own for client, own in maps.items() if client not in clients]
        tensors = self.averaged.tensors(key)
        elsewhere = torch.stack(others).any(dim=0) if others else torch.zeros_like(kept[0].keep)
        last = part_of(adapter, tensors[adapter.name_b], tensors[adapter.name_a], elsewhere)
        weights = [self._weights[client] for client in clients]
        return covered_mean(
            adapter, kept, weights, "keepers" if self.job.aggregation == "coverage" else "all", last
        )

    def _kept(self, client: int, key: str, adapter: Adapter) -> torch.Tensor:
        index = block_of_key(key)
        assert index is not None
        return kept_map(self.groups, self.refined.cut_of(client), index, adapter)

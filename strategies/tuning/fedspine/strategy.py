"""FedSpine (Yao et al. 2025): devices prune and fine-tune in turn, each at its own ratio and rank.

A round has the paper's five stages. The server chooses a pruning ratio and a LoRA rank for every
device (``choice.py``). Each device cuts its model to that ratio, by the importance that it
measured in the round before. The global adapters are sent in the shapes of the smaller model and
with the device's first ranks. The device trains and measures. The server averages the updates row
by row over the devices that kept the row, each with a weight from the importance of its LoRA
modules (section 4.4). The outcome of the round trains the bandits.

In its first round a device trains the whole model, because nothing was measured before.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Any

import torch

from espalier.amounts import count
from espalier.errors import InputError
from espalier.hf.nf4.blocks import BLOCK
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.local_baseline import BaselineOrder
from espalier.messages.message import MessageBody
from espalier.methods.tuning.fedspine import (
    STRUCTURE,
    CutOrder,
    FedSpineSettings,
    SpineReport,
    trained,
)
from espalier.models.adapters import Adapter, AdapterPlan
from espalier.models.groups import Groups
from espalier.models.plan import ModelPlan, block_key
from espalier.models.structure import GROUP_KINDS, READERS, group_size, kind_of, structured_plan
from espalier.settings.run import RunSettings
from pruning_kernels.lora.factor_means import Divisor, KeptFactors, PrunedSide, coverage_mean
from pruning_kernels.lora.factors import Factors
from pruning_kernels.lora.importance import Terms, comparable, spectral_term
from strategies.averaging.adapter_averager import Tuning
from strategies.averaging.client_weights import count_claims
from strategies.averaging.updates import Updates
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import Selection
from strategies.base.roster import Seat
from strategies.base.run import Run
from strategies.fleet import bytes_of_bits, bytes_of_round, virtual_seconds
from strategies.tuning.fedspine.choice import Arm, Choices
from strategies.tuning.fedspine.result import DeviceRound, RefinedResult, RoundNote
from strategies.tuning.fedspine.reward import Outcome

SIDES: tuple[PrunedSide, PrunedSide] = ("rows", "columns")


def require_falls(settings: RunSettings) -> None:
    """Refuse a bandit with one training step per round, because all rewards would be 0."""
    if settings.of(FedSpineSettings).allocation == "bandit" and settings.training.steps < 2:
        raise InputError(
            f"training.steps = {settings.training.steps}: a bandit learns from how far the loss"
            f" falls within a round; set it to 2 or more, or {settings.method}.allocation to fixed"
            " or random"
        )


def require_measured(settings: RunSettings, plan: ModelPlan) -> None:
    """Refuse prunable groups without adapters, from whose gradients their importance follows."""
    adapters = trained(plan, settings)
    names_by_kind = {kind: list[str]() for kind in GROUP_KINDS}
    # All blocks of a plan have the same matrices.
    for linear in plan.blocks[0].linears:
        names_by_kind[kind_of(linear.name)[0]].append(linear.name)
    for block in plan.blocks:
        adapted = {adapter.linear.name for adapter in adapters.blocks.get(block.index, ())}
        for kind, names in names_by_kind.items():
            # At least one adapter per kind and block: importance follows from its gradients.
            if not adapted & set(names):
                raise InputError(
                    f"lora.targets = '{settings.lora.targets}', lora.layers ="
                    f" '{settings.lora.layers}': {settings.method} measures {kind} by adapters that"
                    f" lie on them, and block {block.index} has none on {', '.join(names)}; set"
                    " both to all"
                )
    if settings.of(FedSpineSettings).score == "mask":
        _require_gradients_of_masks(settings, adapters, names_by_kind["groups"])


def _require_gradients_of_masks(
    settings: RunSettings, adapters: AdapterPlan, names: list[str]
) -> None:
    """Refuse a first block whose attention heads get no gradient; ``names`` are its matrices."""
    reader = READERS["groups"]
    adapted = {adapter.linear.name for adapter in adapters.blocks.get(0, ())}
    # Gradients reach the heads' output only above an adapter; in later blocks there always is one.
    before = [name for name in names if name != reader]
    if not adapted & set(before):
        raise InputError(
            f"lora.targets = '{settings.lora.targets}': {settings.method}.score = 'mask' needs an"
            f" adapter on {', '.join(before)} of the first block; add one of them, or set"
            f" {settings.method}.score to exact"
        )


def require_whole_nf4_blocks(settings: RunSettings, plan: ModelPlan) -> None:
    """Refuse cuts of an NF4 base whose rows would not be whole NF4 blocks."""
    if settings.training.base != "nf4":
        return
    multiple = settings.of(FedSpineSettings).channel_multiple
    group = group_size(plan, "attn.o", "groups")
    # The number of remaining channels has to be whole NF4 blocks in every row.
    if multiple % BLOCK:
        raise InputError(
            f"pruning.channel-multiple = {multiple}: with training.base = 'nf4' the"
            f" channels that stay have to be a multiple of {BLOCK}; set it to {BLOCK}"
        )
    if group % BLOCK:
        raise InputError(
            f"training.base = 'nf4': a group of attention has {group} features in attn.o, no"
            f" multiple of {BLOCK}, so that the matrix cannot be quantised without it; set"
            " training.base to 'bfloat16'"
        )


class FedSpine(Tuning):
    """Strategy of FedSpine: averaging of adapters of devices that prune during the run."""

    RESULT = RefinedResult
    result: RefinedResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        self.job = run.settings.of(FedSpineSettings)
        super().__init__(
            run,
            evaluation,
            rank_of=self._rank_of,
            brings_result=evaluation.asked or self.job.has_local_baseline,
            report=SpineReport,
        )
        self.groups = Groups.of(run.model.plan)
        # The target counts parameters of prunable groups only, which the settings may state
        # otherwise.
        self.choices = Choices(run.settings, self.groups.wanted(self.job))
        self._arms: dict[int, Arm] = {}
        """Ratio and rank of each device in the round; devices in their first round have none."""
        self._importance: dict[int, float] = {}
        """Importance I(B_total) of the round's devices."""
        self._questioned: set[int] = set()
        """Devices of the round that were asked to cut more."""
        self._kept_their_cut: set[int] = set()
        """Devices among them that cut nothing."""

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse groups that cannot be pruned or measured, and bandits that cannot learn."""
        require_falls(settings)
        model.require_groups(heads=True)
        super().require_fit(settings, model, capabilities)
        require_measured(settings, model.plan)
        require_whole_nf4_blocks(settings, model.plan)
        Groups.of(model.plan).reachable(settings.of(FedSpineSettings))

    def description(self) -> str:
        """Return the main settings in words."""
        job = self.job
        settings = self.run.settings
        ranks = "one rank"
        if job.allocation == "fixed":
            ranks = f"rank {job.usual_rank(settings.lora)}"
        elif job.adaptive_rank:
            ranks = f"ranks {self.choices.space.lowest_rank} to {settings.lora.rank}"
        chosen: str = job.allocation
        if job.learns_nothing(settings.federation):
            chosen += f" (no better than chance in {count(settings.federation.rounds, 'round')})"
        steps = count(settings.training.steps, "step")
        fleet = settings.federation.fleet_name(job, simulation=self.run.simulation)
        times = f"times of the fleet {fleet}" if fleet else "times as clients measure them"
        return (
            f"{job.pruning_ratio:g} of blocks pruned, {ranks}, chosen by {chosen}, {steps}, {times}"
        )

    def state(self) -> dict[str, Any]:
        """Return adapters, cuts, rounds, the bandits' state and the choices for the next round."""
        arms = {str(client): asdict(arm) for client, arm in sorted(self._arms.items())}
        return super().state() | {"choices": self.choices.to_json(), "arms": arms}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        super().restore(state)
        self.choices.restore(state["choices"])
        self._arms = {int(client): Arm(**arm) for client, arm in state["arms"].items()}

    # ----- stage 1: configuration update ----------------------------------------------------------

    def before_round(self, server_round: int) -> bool:
        """Choose ratio and rank for every active device that has measured its groups."""
        # Nothing is measured before the first round.
        if server_round == 1:
            return False
        # A device that joined late, or failed so far, trains once without a cut.
        measured = [
            seat.client for seat in self.rounds.roster.active() if self.choices.knows(seat.client)
        ]
        # The arms go to the checkpoint before a message is sent.
        self._arms = {client: self.choices.arm(client, server_round) for client in measured}
        return True

    def _rank_of(self, seat: Seat) -> int:
        """Return r_t, the rank of a device."""
        arm = self._arms.get(seat.client)
        return self.job.usual_rank(self.run.settings.lora) if arm is None else arm.rank

    # ----- stages 2 and 3: cuts and adapters to the devices ---------------------------------------

    def prepare(self, server_round: int, save: Callable[[], None]) -> Selection:
        """Select the round's devices, request their cuts, and push the global adapters."""
        limits = self.averager.draw(server_round)
        # Clients that lost their state catch up later; those at their ratio are not asked.
        self._questioned = {
            seat.client
            for seat in self.rounds.receiving()
            if server_round > 1 and seat.client in limits and self._has_to_cut(seat.client)
        }
        self._kept_their_cut = set()
        self._request_cuts(server_round)
        # The first ``push`` is the cut request.
        return self.averager.prepare(server_round, limits, first=1)

    def _has_to_cut(self, client: int) -> bool:
        """Return True if a device's ratio of the round is above its present cut."""
        arm = self._arms.get(client)
        # ``arm`` is None in a device's first round.
        return arm is not None and not self.groups.reaches(
            self.result.cut_of(client), arm.pruned, self.job
        )

    def _request_cuts(self, server_round: int) -> None:
        """Let the devices that have not reached their ratio cut more, and store their cuts."""
        requests = [
            self.rounds.request(
                "push",
                client,
                server_round,
                CutOrder(pruned=self._arms[client].pruned),
                self.result.along(client),
            )
            for client in sorted(self._questioned)
        ]
        # A list: all cuts are known before the adapters are cut to them.
        for body in list(self.rounds.exchange(requests)):
            client = body.header.client
            # No new bits: the device could not cut further.
            if not self.result.take_cut(client, body.blobs[STRUCTURE]):
                self._kept_their_cut.add(client)
                site = self.rounds.roster.seats[client].site
                why = (
                    "no new importance scores, or the target is reached; training continues with"
                    " the current model"
                )
                note = {"client": client, "site": site, "round": server_round}
                self.run.progress.note("kept_cut", f"kept its cut {site}: {why}", **note)

    def local_baseline_request(self, seat: Seat) -> BaselineOrder | None:
        """Return the order to write the device's model, even if nobody evaluates it."""
        return BaselineOrder() if self.job.has_local_baseline else None

    # ----- stage 4: training, which is in client_app/methods/tuning/fedspine.py -------------------

    def note_part(self, seat: Seat, body: MessageBody) -> None:
        """Record the device's pruning ratio, and what other tuning methods record."""
        super().note_part(seat, body)
        seat.note(pruned=self.groups.ratio(self.result.cut_of(seat.client)))

    # ----- stage 5: aggregation -------------------------------------------------------------------

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Average the updates, and update the bandits with the outcome of the round."""
        # 1. Updates without those far from the others.
        updates = self.averager.updates(server_round, inbox, clients)
        # 2. Importance and outcome of the round, before the weights that depend on them.
        self._importance = self._importance_of(updates)
        self._note_round(server_round, updates.clients)
        weights = self._weights(updates.clients)
        # Adapters are cut for each device when they are sent, so none are packed for ranks.
        # 3. Average row by row.
        self.averager.average(updates, weights, [], partial(self._mean, updates.clients))
        # The caches hold entries of outdated cuts.
        self.result.forget_plans()

    def _weights(self, clients: list[int]) -> dict[int, float]:
        """Return the devices' weights in the mean, before their limits."""
        federation = self.run.settings.federation
        weights = self.averager.samples_of(clients)
        if federation.client_weights.startswith("importance"):
            # Importance is relative to the mean of the round; it multiplies the other weights.
            return {client: self._importance[client] * weights[client] for client in clients}
        return weights

    def _importance_of(self, updates: Updates) -> dict[int, float]:
        """Return the importance of the devices' LoRA modules (equations 13 and 14).

        The second term follows from the adapters, so it does not rely on a device's claim.
        """
        claimed = {client: self._report(client).taylor for client in updates.clients}
        # Claimed by the devices, so it is limited like a weight.
        taylor = count_claims(self.rounds, "importance", claimed)
        spectral: dict[int, list[float]] = {client: [] for client in updates.clients}
        for index, adapter in self.result.adapters:
            # Equation 13: singular values of each module, as the server received it.
            all_factors = updates.factors(block_key(index), adapter)
            for client, factors in zip(updates.clients, all_factors, strict=True):
                spectral[client].append(spectral_term(factors))
        return comparable(
            {client: Terms(taylor[client], fmean(values)) for client, values in spectral.items()}
        )

    def _note_round(self, server_round: int, clients: list[int]) -> None:
        """Record the time of each device, and update the bandits."""
        # Bytes and times by the contracts, or as measured.
        num_bytes = {client: self._bytes_of(client, server_round) for client in clients}
        seconds = {
            client: self._seconds_of(client, server_round, num_bytes[client]) for client in clients
        }
        outcomes = {client: self._outcome(client, seconds[client]) for client in clients}
        # The bandits learn once per round, from all devices together.
        rewards = self.choices.learn(self._arms, outcomes, server_round)
        devices = {
            client: DeviceRound(
                pruned=self.groups.ratio(self.result.cut_of(client)),
                rank=self._report(client).rank,
                seconds=seconds[client],
                num_bytes=num_bytes[client],
                importance=self._importance[client],
                reward=rewards[client],
                kept_its_cut=client in self._kept_their_cut,
            )
            for client in clients
        }
        note = RoundNote.of(server_round, devices)
        self.result.note_round(note)
        pruned = fmean(device.pruned for device in devices.values())
        rank = fmean(device.rank for device in devices.values())
        text = f"refined      {pruned:.1%} pruned and rank {rank:.3g} on average, {note.in_words()}"
        self.run.progress.note("refined", text, **note.to_json())

    def _report(self, client: int) -> SpineReport:
        report = self.averager.reports[client]
        assert isinstance(report, SpineReport)
        return report

    def _bytes_of(self, client: int, server_round: int) -> int:
        """Return the bytes of adapters and of cut bits."""
        settings = self.run.settings
        adapters = self.averager.plan_of(client)
        asked = client in self._questioned
        bits = bytes_of_bits(adapters, self.groups, settings, server_round, asked=asked)
        return bytes_of_round(adapters, adapters, settings, server_round) + bits

    def _seconds_of(self, client: int, server_round: int, num_bytes: int) -> float:
        """Return the seconds by the virtual clock, or as the device measured them."""
        fleet = self.averager.clock.fleet
        if fleet is None:
            return self._report(client).seconds
        structure = self.result.structure_of(client)
        kept = structured_plan(self.run.model.plan, structure).num_parameters
        adapters = self.averager.plan_of(client)
        return virtual_seconds(
            fleet, self.run.settings, client, server_round, kept, adapters, num_bytes
        )

    def _outcome(self, client: int, seconds: float) -> Outcome:
        report = self._report(client)
        arm = self._arms.get(client)
        # Requested ratios, because the bandit chooses among these; the cut may exceed them
        # slightly.
        before = self.choices.pruned.get(client, 0.0)
        # A device that kept its cut has not reached the ratio.
        after = before if arm is None or client in self._kept_their_cut else arm.pruned
        importance = self._importance[client]
        arrived = self.groups.reaches(self.result.cut_of(client), self.choices.target, self.job)
        return Outcome(
            report.loss_before, report.loss_after, before, after, importance, seconds, arrived
        )

    def _mean(
        self,
        clients: list[int],
        key: str,
        adapter: Adapter,
        factors: list[Factors],
        weights: list[float],
    ) -> dict[str, torch.Tensor]:
        """Return the mean of one matrix's updates over the devices that kept a row or column.

        Parts that only devices without a valid reply in this round keep are left unchanged.
        """
        # Rows or columns of every device that takes part, also of those without a reply in this
        # round.
        maps = {
            seat.client: self.result.kept(seat.client, key, adapter)
            for seat in self.rounds.roster.active()
        }
        kept = [
            KeptFactors(update, maps[client])
            for client, update in zip(clients, factors, strict=True)
        ]
        others = [keep for client, keep in maps.items() if client not in clients]
        last = None
        # Devices without a reply keep their rows of the last update.
        if others:
            last = self.result.part_of(key, adapter, torch.stack(others).any(dim=0))
        divisor: Divisor = "keepers" if self.job.aggregation == "coverage" else "all"
        _, side = kind_of(adapter.linear.name)
        rank = adapter.rank
        side_mean = coverage_mean(kept, weights, SIDES[side], rank, adapter.scaling, divisor, last)
        return adapter.named(side_mean.b, side_mean.a)

"""Dry runs of the methods that train adapters."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, ClassVar

from espalier.hf.opening.opened import OpenedModel
from espalier.messages.blobs.cuts import pack_bits, read_bits
from espalier.messages.blobs.model_pieces import Manifest
from espalier.messages.message import MessageBody
from espalier.methods.fedpetuning import parts
from espalier.methods.fedspine import STRUCTURE, FedSpineSettings
from espalier.methods.hetlora import HetLoRASettings
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.models.groups import to_remove
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.lora.factors import kept_rank
from server_app.estimate.dry_runs.dry_run import DryRun
from server_app.estimate.exchange import HASH
from server_app.estimate.sizes import files_of
from server_app.estimate.uneven_cuts import UnevenCuts
from strategies.averaging.adapter_averager import AdapterAverager
from strategies.averaging.adapters import AdapterResult
from strategies.base.inbox import Inbox
from strategies.fedsoda.strategy import FedSoda
from strategies.fedsoda.sub_model import SubModelResult, sub_model_of
from strategies.fedspine.choice import Arm
from strategies.fedspine.result import RefinedResult
from strategies.fedspine.strategy import FedSpine
from strategies.hetlora import HetLoRA

AROUND_PART = 1024
ROUND_TRIPS = 2
"""Upper bound on the bytes of a part without blobs and hashes; transfers of a part per round."""


class AdapterShapes(AdapterResult):
    """Global adapters without values."""

    def __init__(
        self,
        settings: RunSettings,
        model: OpenedModel,
        store: BlobStore,
        adapters: AdapterPlan | None = None,
        first: Callable[[], Tensors] | None = None,
    ) -> None:
        super().__init__(settings, model, store, adapters, dict)

    def blob(self, key: str, limit: int) -> bytes:
        """Return no bytes in place of a blob."""
        return b""


class DryTuning(DryRun):
    """Dry run of a method that averages adapters."""

    RESULT: ClassVar[Any] = AdapterShapes
    averager: AdapterAverager

    @property
    def averaged(self) -> AdapterPlan:
        """Global adapters, which clients train and the server averages."""
        return self.averager.adapters().adapters

    def known_fields(self, request: MessageBody) -> dict[str, Any]:
        """Return the fields of a reply that are not numbers, and the rank of the adapters."""
        limit = request.fields.get("rank_limit", 0)
        return {"rank": limit, **super().known_fields(request)}


class DryHetLoRA(DryTuning, HetLoRA):
    """Dry run of HetLoRA, whose clients give up ranks only in the case of the least bytes."""

    @classmethod
    def open_questions(cls, settings: RunSettings) -> str:
        """Return what the size depends on: self-pruning, and ranks by capability."""
        job = settings.of(HetLoRASettings)
        open_ones = []
        if job.lowers_ranks and settings.federation.rounds > 2:
            open_ones.append("clients may give up ranks")
        if not job.ranks:
            open_ones.append("ranks follow the nodes' capability, which counts as equal here")
        return "; ".join(open_ones)

    def known_fields(self, request: MessageBody) -> dict[str, Any]:
        """Return the fields that are known; a client gives up ranks from the second round on."""
        known = super().known_fields(request)
        gives_up = self.case == "least" and self.job.lowers_ranks
        header = request.header
        if gives_up and header.kind == "train" and header.server_round > 1:
            known["rank"] = kept_rank(known["rank"], self.job.gamma)
        return known

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Adopt the ranks of the reports."""
        self._adopt_ranks(clients)


class RefinedShapes(RefinedResult):
    """Result of FedSpine without values."""

    def __init__(self, settings: RunSettings, *arguments: Any) -> None:
        super().__init__(settings, *arguments, None, dict)

    def blob_for(self, client: int, key: str, rank_limit: int) -> bytes:
        """Return no bytes in place of a blob."""
        return b""


class DryFedSpine(DryTuning, FedSpine):
    """Dry run of FedSpine.

    Where a bandit or chance chooses, the cases are these. ``least``: the target ratio as soon as
    possible, at the lowest rank. ``usual``: the fixed schedule, at the middle rank. ``most``: the
    device is asked to cut and cuts nothing, at the highest rank.

    If groups of all kinds compete, ``least`` cuts those with the largest adapters relative to their
    cost, ``most`` those with the smallest, and ``usual`` some of each.
    """

    RESULT = RefinedShapes

    @classmethod
    def open_questions(cls, settings: RunSettings) -> str:
        """Return what the size depends on: the choices of a bandit, and the cut groups."""
        job = settings.of(FedSpineSettings)
        open_ones = []
        if job.chooses:
            open_ones.append(f"ratios and ranks are chosen by {job.allocation}")
        if job.selection != "kind":
            open_ones.append("which groups go depends on the devices' text")
        return "; ".join(open_ones)

    def before_round(self, server_round: int) -> bool:
        """Choose ratio and rank of each device that took part in a round."""
        super().before_round(server_round)
        self._arms = {
            client: self._assumed(arm, server_round) for client, arm in self._arms.items()
        }
        return True

    def _assumed(self, arm: Arm, server_round: int) -> Arm:
        """Return the request to a device in this case, where it is not fixed."""
        space = self.choices.space
        if self.job.chooses_ratios:
            scheduled = self.choices.scheduled(arm.before, server_round).pruned
            target = self.choices.target
            ratios = {"least": target, "usual": scheduled, "most": target}
            arm = replace(arm, pruned=ratios[self.case])
        if self.job.chooses and self.job.adaptive_rank:
            usual = space.refinement(0.5, 0.5, 0.0).rank
            ranks = {"least": space.lowest_rank, "usual": usual, "most": space.highest_rank}
            arm = replace(arm, rank=ranks[self.case])
        return arm

    def _has_to_cut(self, client: int) -> bool:
        if client not in self._arms:
            return False
        # In the case of the most bytes a device is asked although it cannot cut more.
        share = self._arms[client].pruned
        return self.case == "most" or not self._reaches(self.result.bits(client), share)

    # Devices have the same few cuts, each of millions of groups.

    @cached_property
    def _reaches(self) -> Callable[[bytes, float], bool]:
        groups = self.groups
        return cache(lambda bits, share: groups.reaches(read_bits(groups, bits), share, self.job))

    @cached_property
    def _cut(self) -> Callable[[float], bytes]:
        return cache(self._cut_of)

    def known_blobs(self, request: MessageBody) -> dict[str, bytes]:
        """Return the cut with which a device answers a question."""
        client = request.header.client
        if "pruned" not in request.fields:
            return {}
        keeps = self.job.chooses_ratios and self.case == "most"
        cut = self.result.bits(client) if keeps else self._cut(self._arms[client].pruned)
        return {STRUCTURE: cut}

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Store the ratio of each device."""
        for client in clients:
            arm = self._arms.get(client)
            if arm is None or client in self._kept_their_cut:
                self.choices.pruned.setdefault(client, 0.0)
            else:
                self.choices.pruned[client] = arm.pruned

    def _cut_of(self, share: float) -> bytes:
        """Return the bits of a cut with this pruning ratio, from which only shapes are used.

        If the kinds of groups are fixed, the ratio is cut of each kind in each block.
        """
        if share and self.job.selection != "kind":
            return pack_bits(self._uneven.cut(share, self.case))
        groups = self.groups
        cut = groups.none
        multiple = self.job.channel_multiple
        pools = zip(groups.counts.tolist(), groups.pool_costs.tolist(), strict=True)
        for pool, (count, cost) in enumerate(pools):
            stay = max(1, count - -(-to_remove(cost * count, share) // cost))
            if share and pool % 2:
                stay = max(stay - stay % multiple, min(multiple, count))
            cut[groups.span(range(pool, pool + 1))][stay:] = True
        return pack_bits(cut)

    @cached_property
    def _uneven(self) -> UnevenCuts:
        run = self.run.settings
        adapters = self.averaged
        chooses = self.job.chooses and self.job.adaptive_rank
        lowest = self.choices.space.lowest_rank
        bits = len(pack_bits(self.groups.none))
        return UnevenCuts(
            self.groups,
            self.job,
            adapters,
            run.federation.wire_dtype,
            lowest if chooses else self.job.usual_rank(run.lora),
            ROUND_TRIPS * (len(parts(adapters, run)) - 1) * (AROUND_PART + bits),
        )


class SubModelShapes(SubModelResult):
    """Result of FedSODA without values, and without the files of its sub-model."""

    ADAPTERS = AdapterShapes

    def decide(self, dropped: list[int], starts: list[int], distances: list[float]) -> None:
        """Drop blocks of the emulator; all blocks have equal shapes."""
        self.dropped = dropped
        self.starts = starts
        model = sub_model_of(self.base, self.kept)
        files = files_of(self.settings, model)
        size = self.settings.part_bytes
        pieces = -(-sum(files.values()) // size)
        manifest = Manifest(
            names=list(files),
            sizes=list(files.values()),
            file_sha256=[HASH] * len(files),
            piece_bytes=size,
            piece_sha256=[HASH] * pieces,
        )
        self.begin(model, manifest)

    def piece(self, index: int) -> bytes:
        """Return no bytes in place of a piece."""
        return b""


class DryFedSoda(DryTuning, FedSoda):
    """Dry run of FedSODA, whose nodes hold the sub-model only in the case of the least bytes."""

    RESULT = SubModelShapes

    @classmethod
    def open_questions(cls, settings: RunSettings) -> str:
        """Return what the size depends on: the nodes that already have the sub-model."""
        return (
            "nodes that hold the sub-model from an earlier run do not receive it; simulated ones"
            " share one place for it"
        )

    def known_fields(self, request: MessageBody) -> dict[str, Any]:
        """Return the fields that are known, with the pieces of the sub-model that a node lacks."""
        offered = request.fields.get("piece_sha256", ())
        lacking = [] if self.case == "least" else list(range(len(offered)))
        return {"pieces": lacking, **super().known_fields(request)}

    def similar_groups(self, emulator: range) -> tuple[list[int], list[float]]:
        """Return groups one after the other, from the emulator's first block on."""
        apart = self.job.group_layers + 1
        return [emulator[0] + apart * group for group in range(self.job.groups)], []

    def align(self, emulator: AdapterResult, server_round: int, steps: int) -> None:
        """Align without training."""
        self.result.aligned = server_round

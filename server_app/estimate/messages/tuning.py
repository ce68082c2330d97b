"""Dry runs of the methods that train adapters: what each round leads to."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, ClassVar

import torch

from espalier.hf.structured.selection import lowest
from espalier.messages.blobs.cut_bits import pack_bits, read_bits
from espalier.messages.blobs.model_pieces import Manifest
from espalier.messages.message import MessageBody
from espalier.methods.tuning.adapters.tensors import parts
from espalier.methods.tuning.fedspine import STRUCTURE, FedSpineSettings
from espalier.methods.tuning.hetlora import HetLoRASettings
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.models.groups import Cut
from espalier.settings.run import RunSettings
from pruning_kernels.lora.factors import kept_rank
from server_app.estimate.messages.dry_run import HASH, DryRun
from server_app.estimate.messages.sub_model_files import files_of
from server_app.estimate.messages.uneven_cuts import uneven_cut
from strategies.averaging.adapter_averager import AdapterAverager
from strategies.averaging.adapters import AdapterResult
from strategies.base.inbox import Inbox
from strategies.tuning.fedsoda.strategy import FedSoda
from strategies.tuning.fedsoda.sub_model import SubModelResult, sub_model_of
from strategies.tuning.fedspine.choice import Arm
from strategies.tuning.fedspine.result import RefinedResult
from strategies.tuning.fedspine.strategy import FedSpine
from strategies.tuning.hetlora import HetLoRA

AROUND_PART = 1024
ROUND_TRIPS = 2
"""Upper bound on the bytes of a part without blobs and hashes; transfers of a part per round."""


class AdapterShapes(AdapterResult):
    """Global adapters without values."""

    def _begun(self, first: Callable[[], Tensors] | None) -> Tensors:
        return {}

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
        """Return the rank of the adapters."""
        return {"rank": request.fields.get("rank_limit", 0)}


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
        """Return the rank; a client gives up ranks from the second round on."""
        fields = super().known_fields(request)
        gives_up = self.case == "least" and self.job.lowers_ranks
        header = request.header
        if gives_up and header.kind == "train" and header.server_round > 1:
            fields["rank"] = kept_rank(fields["rank"], self.job.gamma)
        return fields

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Adopt the ranks of the reports."""
        self._adopt_ranks(clients)


class RefinedShapes(AdapterShapes, RefinedResult):
    """Result of FedSpine without values."""

    def blob_for(self, client: int, key: str, rank_limit: int) -> bytes:
        """Return no bytes in place of a blob."""
        return b""


class DryFedSpine(DryTuning, FedSpine):
    """Dry run of FedSpine, with bounds where a bandit or chance chooses.

    ``least``: the target ratio as soon as possible, at the lowest rank. ``most``: the device is
    asked to cut and cuts nothing, at the highest rank. If groups of all kinds compete, see
    ``uneven_cut``.
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
        self._arms = {client: self._assumed(arm) for client, arm in self._arms.items()}
        return True

    def _assumed(self, arm: Arm) -> Arm:
        """Return the request to a device in this case, where it is not fixed."""
        if self.job.chooses_ratios:
            arm = replace(arm, pruned=self.choices.target)
        if self.job.chooses and self.job.adaptive_rank:
            space = self.choices.space
            rank = space.lowest_rank if self.case == "least" else space.highest_rank
            arm = replace(arm, rank=rank)
        return arm

    def _has_to_cut(self, client: int) -> bool:
        arm = self._arms.get(client)
        return arm is not None and not self._reaches(self.result.bits(client), arm.pruned)

    # Devices have the same few cuts, each of millions of groups.

    @cached_property
    def _reaches(self) -> Callable[[bytes, float], bool]:
        groups = self.groups
        return cache(lambda bits, share: groups.reaches(read_bits(groups, bits), share, self.job))

    @cached_property
    def _cut(self) -> Callable[[float], bytes]:
        return cache(lambda share: pack_bits(self._cut_of(share)))

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

    def _cut_of(self, share: float) -> Cut:
        """Return a cut with this pruning ratio, from which only shapes are used."""
        if self.job.selection == "kind":
            # Shapes depend on the number of groups of each kind, so any scores will do.
            scores = torch.zeros(len(self.groups.costs), dtype=torch.float64)
            return lowest(self.groups, scores, self.job, share)
        run = self.run.settings
        chooses = self.job.chooses and self.job.adaptive_rank
        rank = self.choices.space.lowest_rank if chooses else self.job.usual_rank(run.lora)
        bits = len(pack_bits(self.groups.none))
        around = ROUND_TRIPS * (len(parts(self.averaged, run)) - 1) * (AROUND_PART + bits)
        return uneven_cut(self.groups, run, self.averaged, share, self.case, rank, around)


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
        missing = [] if self.case == "least" else list(range(len(offered)))
        return {"pieces": missing, **super().known_fields(request)}

    def similar_groups(self, emulator: range) -> tuple[list[int], list[float]]:
        """Return groups one after the other, from the emulator's first block on."""
        apart = self.job.group_layers + 1
        return [emulator[0] + apart * group for group in range(self.job.groups)], []

    def align(self, emulator: AdapterResult, server_round: int, steps: int) -> None:
        """Align without training."""
        self.result.note_alignment(server_round)

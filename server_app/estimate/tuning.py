"""Messages, memory and computation of the methods that train adapters on a frozen base."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, ClassVar

import torch

from espalier.hf.nf4.checkpoint import QuantisedCheckpoint
from espalier.hf.nf4.matrices import nf4_bytes
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.structured.selection import lowest
from espalier.messages.blobs.cuts import pack_bits, read_bits
from espalier.messages.blobs.model_pieces import Manifest
from espalier.messages.message import MessageBody
from espalier.methods.tuning.adapters.tensors import before_round, of_all_rounds, parts
from espalier.methods.tuning.fedsoda import FedSodaSettings
from espalier.methods.tuning.fedspine import STRUCTURE, FedSpineSettings
from espalier.methods.tuning.hetlora import HetLoRASettings
from espalier.methods.tuning.sft_p import SftPSettings
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.models.groups import Cut, Groups
from espalier.models.structure import GROUP_KINDS, group_size, kind_of
from espalier.settings.pruning import PersonalModelSettings
from espalier.settings.run import RunSettings
from espalier.settings.tables.federation import WireDtype
from pruning_kernels.lora.factors import kept_rank
from server_app.estimate.dry_run import HASH, Case, DryRun
from server_app.estimate.memory import Moment
from server_app.estimate.sizes import FLOAT32, Sizes, files_of
from server_app.estimate.step_memory import step_bytes
from server_app.estimate.traffic import RunTraffic
from server_app.estimate.work import EXPORT_SAMPLES, GRADIENT_AND_MOMENTS, Work, smaller
from strategies.averaging.adapter_averager import AdapterAverager
from strategies.averaging.adapters import AdapterResult
from strategies.base.inbox import Inbox
from strategies.fleet import training_operations
from strategies.tuning.fedsoda.strategy import FedSoda
from strategies.tuning.fedsoda.sub_model import SubModelResult, sub_model_of
from strategies.tuning.fedspine.choice import Arm
from strategies.tuning.fedspine.result import RefinedResult
from strategies.tuning.fedspine.strategy import FedSpine
from strategies.tuning.hetlora import HetLoRA

AROUND_PART = 1024
ROUND_TRIPS = 2
"""Upper bound on the bytes of a part without blobs and hashes; transfers of a part per round."""
AROUND_TENSOR = 32
"""Bytes per tensor by which blobs with equally many numbers may differ.

The difference comes from digits in the header and from the last block of NF4.
"""
WIRE_BYTES: dict[WireDtype, float] = {"float32": 4, "bfloat16": 2, "nf4": 0.5625}
"""Bytes per number on the wire."""
COPIES = 5
"""Number of copies of the trained tensors in memory.

They are the current values, those at the start of the round, the initial ones, and those that are
received and sent.
"""
BASE_BYTES = {"float32": 4, "bfloat16": 2}
GATES = 4
"""Number of places in a block where SFT-P's gates multiply."""

# ----- messages: what each round leads to -----


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
        known = super().known_fields(request)
        gives_up = self.case == "least" and self.job.lowers_ranks
        header = request.header
        if gives_up and header.kind == "train" and header.server_round > 1:
            known["rank"] = kept_rank(known["rank"], self.job.gamma)
        return known

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
            scores = torch.zeros(len(self.groups.costs), dtype=torch.float64)
            return lowest(self.groups, scores, self.job, share)
        run = self.run.settings
        chooses = self.job.chooses and self.job.adaptive_rank
        rank = self.choices.space.lowest_rank if chooses else self.job.usual_rank(run.lora)
        bits = len(pack_bits(self.groups.none))
        around = ROUND_TRIPS * (len(parts(self.averaged, run)) - 1) * (AROUND_PART + bits)
        return uneven_cut(self.groups, run, self.averaged, share, self.case, rank, around)


def uneven_cut(
    groups: Groups,
    run: RunSettings,
    adapters: AdapterPlan,
    share: float,
    case: Case,
    rank: int,
    around_parts: int = 0,
) -> Cut:
    """Return a bound for cuts with a pruning ratio, if groups of different kinds or blocks compete.

    The pruning ratio counts parameters, but messages contain adapters. All groups of a pool have
    the same number of parameters and of adapter values. ``least`` therefore cuts pools in the order
    of adapter values per parameter, until at least as many parameters are gone as from any device;
    ``most`` cuts in the opposite order, and stops before as many are gone.

    Parameters
    ----------
    rank : lowest rank of adapters
    around_parts : bytes by which messages with equally many numbers may differ, because they have
        more or fewer parts
    """
    job = run.of(FedSpineSettings)
    values = [0] * len(groups.counts)
    for index, adapter in adapters:
        kind, _ = kind_of(adapter.linear.name)
        size = group_size(groups.plan, adapter.linear.name, kind)
        values[2 * index + GROUP_KINDS.index(kind)] += size
    density = [value / cost for value, cost in zip(values, groups.pool_costs.tolist(), strict=True)]
    tensors = sum(1 + 2 * len(of_block) for of_block in adapters.blocks.values())
    bytes_around = AROUND_TENSOR * tensors + around_parts
    targets = groups.targets(share, job.selection)
    around = bytes_around / (WIRE_BYTES[run.federation.wire_dtype] * rank * len(targets))
    can_go = (groups.counts - groups.must_stay(job)).tolist()
    found = groups.none
    for pools, target in targets:
        # This many parameters, more or fewer, have ``around`` adapter values or more.
        slack = groups.room(pools, job) + around / min(density[pool] for pool in pools)
        largest = int(max(groups.pool_costs[pool] for pool in pools))
        left = target + slack + largest if case == "least" else target - slack
        for pool in sorted(pools, key=density.__getitem__, reverse=case == "least"):
            wanted = left / int(groups.pool_costs[pool])
            whole = math.ceil(wanted) if case == "least" else math.floor(wanted)
            gone = max(0, min(can_go[pool], whole))
            span = groups.span(range(pool, pool + 1))
            found[span.stop - gone : span.stop] = True
            left -= gone * int(groups.pool_costs[pool])
            if gone < can_go[pool]:
                break
    return found


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


# ----- memory and computation -----


OWN_CHECKED = (2, 16)
"""Samples and tokens on which a client compares its own model with the files."""


class Tuned(Work):
    """Work with a whole model in memory and adapters in it."""

    def __init__(self, traffic: RunTraffic) -> None:
        super().__init__(traffic)
        self.training = self.settings.training
        is_nf4 = self.training.base == "nf4"
        self.processes = ("nf4 client" if is_nf4 else "tuning client", "tuning server")
        self.tokens = self.settings.training_tokens
        assert isinstance(self.strategy, DryTuning)
        self.shared = of_all_rounds(self.strategy.averaged, self.settings)
        """Everything that clients train and the server averages."""
        self.base = Sizes(self.settings, self.opened)
        """Sizes of the model that clients train on."""

    @property
    def opened(self) -> OpenedModel:
        """Model that clients train on."""
        return self.model

    @property
    def adapters(self) -> AdapterPlan:
        """Largest adapters that a client trains in the model."""
        return self.shared

    def weights(self) -> Mapping[str, int]:
        """Return the bytes of the frozen base, as ``load_whole`` keeps it."""
        if self.training.base != "nf4":
            return {"the base": BASE_BYTES[self.training.base] * self.base.parameters}
        others = self.base.parameters - self.opened.plan.num_weights
        return {"the base": nf4_bytes(self.opened.plan.shapes) + self.base.computed * others}

    def client_files(self) -> dict[str, int]:
        """Return the bytes of the base in NF4."""
        if self.training.base != "nf4":
            return {}
        return {"the quantised base": nf4_bytes(self.opened.plan.shapes)}

    def step(self) -> int:
        """Return the bytes of a forward and backward pass.

        Over a base in NF4, the largest matrix is dequantised while it is used.
        """
        base = self.training.base
        dtype = torch.bfloat16 if base == "bfloat16" else self.base.dtype
        matrix = 2 * self.base.largest_matrix * self.base.computed if base == "nf4" else 0
        size = (self.training.batch_size, self.tokens)
        gated = isinstance(self.settings.job, SftPSettings)
        return matrix + step_bytes(self.opened, self.settings, self.adapters, dtype, *size, gated)

    def kept(self) -> Mapping[str, int]:
        """Return the bytes that a client keeps between messages: base and adapters."""
        copies = COPIES * FLOAT32 * self.shared.num_parameters
        largest = before_round(self.shared, self.settings, self.settings.federation.rounds + 1)
        shapes = [adapter.folded_shapes(largest.folded) for _, adapter in largest]
        numbers = sum(math.prod(shape) for own in shapes for shape in own.values())
        folded = {"folded updates, twice": 2 * FLOAT32 * numbers} if numbers else {}
        return {**self.weights(), "adapters and copies": copies, **folded}

    def worked(self, clients: int = 1) -> list[Moment]:
        """Return the moments of training: reading a matrix of the base, and a step."""
        base = self.base
        read = max(base.embeddings // 2, base.largest_matrix) * base.stored // 4
        moments = GRADIENT_AND_MOMENTS * FLOAT32 * self.shared.num_parameters
        trained = {**self.kept(), "gradients and moments": moments, "a step": self.step()}
        found = [
            Moment("loading the base", {**self.weights(), "a tensor as it is read": read}),
            Moment("a training step", trained),
        ]
        if self.keeps_models:
            # The base that the client trained on stays in memory while its own model is checked.
            checks = self.reread(*OWN_CHECKED, "checking its own model,")
            found += [moment.beside(self.kept()) for moment in checks]
        return found

    def evaluated(self) -> list[Moment]:
        """Return the moments of an evaluation in a process that keeps the model that it trained."""
        edited = 2 * FLOAT32 * self.base.largest_matrix
        tokens = self.settings.evaluation.sequence_length
        found = self.base.evaluation(self.num_evaluated(), tokens, edited=edited)
        return [moment.beside(self.kept()) for moment in found]

    def checked(self) -> list[Moment]:
        """Return the moments of the check of the adapter.

        peft loads it on transformers' model, while blocks of the base are read one by one. If each
        client has a model of its own, there is nothing to check.
        """
        if isinstance(self.settings.job, PersonalModelSettings):
            return []
        sizes = self.sizes
        name = "checking the adapter,"
        held = {"adapters, three times": 3 * FLOAT32 * self.adapters.num_parameters}
        if isinstance(self.model.checkpoint, QuantisedCheckpoint):
            others = sizes.parameters - self.plan.num_weights
            codes = 2 * nf4_bytes(self.plan.shapes)
            held = {"the whole model": codes + others * (sizes.computed + sizes.stored)}
        updates = {"updates of a matrix": 4 * FLOAT32 * sizes.largest_matrix}
        compared = self.reread(EXPORT_SAMPLES, self.settings.evaluation.sequence_length, name)
        return [
            moment.beside(held) for moment in (Moment(f"{name} its updates", updates), *compared)
        ]

    def operations(self) -> float:
        """Return the operations of a round with full sequences, as FedSpine's clock counts."""
        frozen = self.base.parameters - self.base.embeddings
        tokens = self.settings.tokens_of_round
        return training_operations(tokens, frozen, self.adapters.num_parameters)


class Masked(Tuned):
    """Work of SFT-P: a mask generator is also trained, and the model contains gates.

    Each client writes a smaller model.
    """

    @property
    def adapters(self) -> AdapterPlan:
        """LoRA without the generator, which is in ``whole`` and not a part of the model."""
        return replace(self.shared, whole={})

    def step(self) -> int:
        """Return the bytes of a pass with gates, whose results are kept for the backward pass."""
        places = GATES * len(self.plan.blocks)
        tokens = self.training.batch_size * self.tokens
        return super().step() + places * tokens * self.base.width * self.base.computed

    def result_parameters(self) -> int:
        """Return the parameters of the client that keeps most."""
        job = self.settings.of(SftPSettings)
        share = min(map(job.pruning_ratio_of_client, range(self.settings.num_clients)))
        if job.pruning_ratio_of == "model":
            return self.plan.num_parameters - round(share * self.plan.num_parameters)
        return smaller(self.plan, share)


class Spined(Tuned):
    """Work of FedSpine, whose devices write smaller models."""

    def result_parameters(self) -> int:
        """Return the parameters of a device's model after the last cut."""
        return smaller(self.plan, self.settings.of(FedSpineSettings).pruning_ratio)


class SubTuned(Tuned):
    """Work of FedSODA: clients train on the sub-model, the server drops blocks and aligns it."""

    @property
    def sub(self) -> SubModelResult:
        """Sub-model and its adapters."""
        assert isinstance(self.strategy, DryFedSoda)
        return self.strategy.result

    @property
    def opened(self) -> OpenedModel:
        """Sub-model that clients train on."""
        return self.sub.model

    def client_files(self) -> dict[str, int]:
        """Return the bytes of the sub-model, and of a piece while it arrives."""
        size = self.sub.manifest.num_bytes
        return {"the sub-model, and a piece of it": size + min(self.settings.part_bytes, size)}

    def server_files(self) -> dict[str, int]:
        """Return the bytes of the sub-model."""
        return {"sub-model/": self.sub.manifest.num_bytes}

    def aggregated(self) -> list[Moment]:
        """Return the moments of block comparison and alignment."""
        job = self.settings.of(FedSodaSettings)
        num_samples = (job.public_samples, self.settings.evaluation.sequence_length)
        moments = []
        hidden = self.sizes.hidden_states(*num_samples)
        if job.drop == "similar":
            compared = {"hidden states of a group": hidden * (job.group_layers + 1)}
            moments += self.sizes.walk(*num_samples, "comparing blocks,", compared)
        if self.sub.emulator is not None:
            moments.append(self._alignment(self.sub.emulator.adapters, hidden))
        return moments

    def _alignment(self, emulator: AdapterPlan, hidden: int) -> Moment:
        job = self.settings.of(FedSodaSettings)
        tokens = self.settings.evaluation.sequence_length
        both = self.adapters.joined(emulator)
        training = job.align_training(self.training, 1)
        settings = self.settings.model_copy(update={"training": training})
        batch = training.batch_size
        step = step_bytes(self.opened, settings, both, self.base.dtype, batch, tokens)
        taught = batch * tokens * self.sizes.vocabulary * FLOAT32 * 2
        outputs = taught + hidden * (len(self.sub.aligned_blocks) + 1)
        contents = {**self.weights(), "a step": step, "the full model's outputs": outputs}
        return Moment("aligning", contents)

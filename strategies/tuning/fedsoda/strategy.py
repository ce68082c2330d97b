"""FedSODA: federated fine-tuning of an adapter on a sub-model.

Paper: "Federated Fine-tuning of LLMs via Similarity Group Pruning and Orchestrated Distillation
Alignment".
Clients have no base model. The server drops blocks whose outputs are similar to those of an earlier
block (section 4.2). Clients receive the remaining blocks in NF4: a frozen emulator, and an adapter
(the last blocks), whose LoRA they train and the server averages (section 4.4). Before the first
round and every few rounds, the server aligns the sub-model with the full model: it trains LoRA in
the emulator on public text (section 4.3). At the end the adapter is plugged into the full model.

FedOT and FedBiOT are the same procedure with other settings: other blocks for the adapter, other
dropped blocks, and other alignment.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from espalier.amounts import count
from espalier.amounts import size as as_size
from espalier.errors import InputError
from espalier.hf.group_scores.similar_groups import (
    angular_distances,
    dropped_of_groups,
    evenly_dropped,
    similar_groups,
)
from espalier.hf.nf4.matrices import require_quantisable
from espalier.hf.opening.opened_model import OpenedModel, check_labels
from espalier.hf.stream.block_stream import BlockStream
from espalier.messages.blobs.model_pieces import BYTES, PIECE, Piece
from espalier.messages.tensor_blobs import pack_tensors
from espalier.methods.tuning.fedsoda import EmulatorPart, FedSodaSettings, SubModelOrder
from espalier.seeds import derive_seed
from espalier.settings.run import RunSettings
from espalier.storage.blobs import sha256
from espalier.training.adapted_model import AdaptedModel
from espalier.training.alignment import Alignment, Teacher
from strategies.averaging.adapter_averager import Tuning
from strategies.averaging.adapters import AdapterResult
from strategies.base.evaluation import ClientEvaluation
from strategies.base.method import ClientOrder, Selection
from strategies.base.public_samples import public_samples, require_public_text
from strategies.base.run import Run
from strategies.tuning.fedsoda.sub_model import SubModelResult, require_sub_model


class FedSoda(Tuning):
    """Strategy of FedSODA: averaging of an adapter on a sub-model that the server keeps aligned."""

    RESULT = SubModelResult
    result: SubModelResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        # Without a sub-model, which ``before_round`` makes.
        super().__init__(run, evaluation, run.folder.path / "sub-model")
        self.job = run.settings.of(FedSodaSettings)
        self._held: dict[int, int] = {}
        """Alignment round of the emulator's LoRA at each client with the sub-model; 0: none."""
        self._drawn: tuple[int, list[int]] = (0, [])
        """Round, and the clients that were selected for it, also in a resumed run.

        Clients that were dropped before the round's checkpoint are not replaced.
        """

    def adapters(self) -> AdapterResult:
        """Return the LoRA of the adapter; the emulator's is aligned by the server."""
        return self.result.adapter

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse encoders, too many dropped blocks, and public text that is an evaluation text."""
        check_labels(model.family, None, str(model.directory / "config.json"))
        super().require_fit(settings, model, capabilities)
        job = settings.of(FedSodaSettings)
        method = settings.method
        emulator = job.emulator_of(len(model.plan.blocks))
        needed = job.num_dropped + (job.groups if job.drop == "similar" else 1)
        if len(emulator) < needed:
            raise InputError(
                f"{method}.group-layers = {job.group_layers}, groups = {job.groups}: take {needed}"
                f" blocks, and the emulator has {len(emulator)}; lower them"
            )
        if job.emulator == "nf4":
            require_quantisable(model.plan)
        require_sub_model(model, job.num_dropped)
        require_public_text(settings, job)
        # An estimate may have a configuration only.
        if cls.reads_public_text(job) and model.has_tokenizer:
            cls.public_samples(settings, model)

    @staticmethod
    def reads_public_text(job: FedSodaSettings) -> bool:
        """Return True if the server compares blocks or aligns on public text."""
        return job.aligns or (job.drop == "similar" and job.group_layers > 0)

    @staticmethod
    def public_samples(settings: RunSettings, model: OpenedModel) -> Tensor:
        """Return samples of the public text, shape (samples, tokens), int64."""
        return public_samples(settings, settings.of(FedSodaSettings), model)

    def _public_sha256(self) -> str:
        """Return the hash of the samples that the server reads; empty if it reads none."""
        if not self.reads_public_text(self.job):
            return ""
        return sha256(self.samples.numpy().tobytes())

    @cached_property
    def samples(self) -> Tensor:
        """Samples of the public text, shape (samples, tokens), int64."""
        return self.public_samples(self.run.settings, self.run.model)

    def description(self) -> str:
        """Return the main settings in words."""
        job = self.job
        blocks = len(self.run.model.plan.blocks)
        aligned = "not aligned before round 1"
        if job.pre_align_steps:
            aligned = f"aligned before round 1 ({count(job.pre_align_steps, 'step')})"
        if job.realign_every:
            steps = count(job.realign_steps, "step")
            aligned += f", every {count(job.realign_every, 'round')} ({steps})"
        return (
            f"{job.num_dropped} of {count(blocks, 'block')} go ({job.drop}), the rest in"
            f" {job.emulator}, {aligned}"
        )

    def state(self) -> dict[str, Any]:
        """Return the sub-model, all LoRA, the clients' versions and the hash of the public text."""
        versions = {str(client): aligned for client, aligned in sorted(self._held.items())}
        state = {"held": versions, "public": self._public_sha256(), "drawn": list(self._drawn)}
        return super().state() | state

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        super().restore(state)
        self._held = {int(client): aligned for client, aligned in state["held"].items()}
        self._drawn = (state["drawn"][0], list(state["drawn"][1]))
        # A new alignment with other text would not be that of the interrupted run.
        if state["public"] != self._public_sha256():
            raise InputError(
                f"public.text = '{self.job.public_text}': is not the"
                " text that the run began with; put that one back, or start a new run"
            )
        # Clients hold the sub-model, so contracts are made of its plan.
        if self.result.dropped is not None:
            self.rounds.clients_have(self.result.model.plan)

    # ----- server work before a round -------------------------------------------------------------

    def before_round(self, server_round: int) -> bool:
        """Make the sub-model before round 1, and align it then and every few rounds."""
        job = self.job
        if server_round == 1:
            self._prune()
        steps = job.realign_steps if job.realigns_in(server_round) else 0
        # The first alignment has its own number of steps.
        if server_round == 1 and job.pre_align_steps:
            steps = job.pre_align_steps
        if steps and self.result.emulator is not None:
            self.align(self.result.emulator, server_round, steps)
        # A checkpoint, because neither pruning nor alignment may be repeated after messages were
        # sent.
        return server_round == 1 or steps > 0

    def _prune(self) -> None:
        """Select the blocks to drop: by similarity (algorithm 1), or at even distances."""
        job = self.job
        run = self.run
        emulator = job.emulator_of(len(run.model.plan.blocks))
        starts = list[int]()
        distances = list[float]()
        if job.drop == "uniform":
            dropped = evenly_dropped(emulator, job.num_dropped, job.uniform_rounding)
        else:
            starts, distances = self.similar_groups(emulator)
            dropped = dropped_of_groups(starts, job.group_layers)
        self.result.decide(dropped, starts, distances)
        # From now on messages refer to blocks of the sub-model.
        self.rounds.clients_have(self.result.model.plan)
        size = self.result.manifest.num_bytes
        gone = ", ".join(map(str, dropped)) or "none"
        text = f"sub-model    blocks {gone} go; {len(self.result.kept)} are left, {as_size(size)}"
        run.progress.note("sub_model", text, dropped=dropped, bytes=size)

    def similar_groups(self, emulator: range) -> tuple[list[int], list[float]]:
        """Return the first blocks of the groups to drop, and the angular distances of blocks."""
        job = self.job
        run = self.run
        run.progress.begin("comparing", 1)
        # Blocks are compared in the full model.
        stream = BlockStream(run.model, run.computing)
        distances = angular_distances(stream, self.samples, job.group_layers, emulator)
        starts = similar_groups(distances, job.group_layers, job.groups, emulator[0])
        run.progress.step("compared", f"outputs of {count(len(emulator), 'block')}")
        return starts, distances

    def align(self, emulator: AdapterResult, server_round: int, steps: int) -> None:
        """Align the emulator with the full model (section 4.3).

        Both models contain the present adapter; the paper does not specify this.
        """
        job = self.job
        run = self.run
        result = self.result
        training = job.align_training(run.settings.training, steps)
        # The student has LoRA in the emulator and the adapter; only the emulator's is trained.
        adapters = result.adapter.adapters.joined(emulator.adapters)
        student = AdaptedModel.load(result.model, run.computing, run.settings, adapters)
        alignment = Alignment(
            student=student,
            family=run.model.family,
            samples=self.samples,
            places=result.places(),
            settings=training,
            seed=derive_seed(run.settings.seed, "alignment", server_round=server_round),
        )
        run.progress.begin("aligning", 1)
        stream = BlockStream(run.model, run.computing)
        # The teacher is the full model with the same adapter.
        edits = result.written().edits
        teacher = Teacher.walked(
            stream, alignment.samples, alignment.numbers(), alignment.places.of_full(), edits
        )
        # Both start from their present global values.
        start = {key: emulator.tensors(key) for key in emulator.blobs}
        adapter = {key: result.adapter.tensors(key) for key in result.adapter.blobs}
        tensors, outcome = alignment.run(teacher, start, adapter)
        # Packed again for the clients, at the full rank.
        emulator.replace(tensors.items(), [run.settings.lora.rank])
        # Clients whose version differs receive the emulator's LoRA again.
        result.note_alignment(server_round)
        fall = f"objective {outcome.losses[0]:.4f} to {outcome.losses[-1]:.4f}"
        text = f"before round {server_round}: {count(steps, 'step')}, {fall}"
        run.progress.step("aligned", text, round=server_round, losses=outcome.losses)

    # ----- messages to the clients ----------------------------------------------------------------

    def prepare(self, server_round: int, save: Callable[[], None]) -> Selection:
        """Select the round's clients; push the sub-model, alignment and LoRA that they lack."""
        # A resumed run must not draw again: files were pushed to the first selection.
        if self._drawn[0] != server_round:
            self._drawn = (server_round, sorted(self.averager.draw(server_round)))
        clients = self._drawn[1]
        num_before = len(self._held)
        self._push_files(server_round, clients)
        if len(self._held) > num_before:
            # No client has been asked yet. With this checkpoint, a resumed run does not push the
            # files again.
            save()
        self._push_sub_model(server_round, clients)
        limits = dict.fromkeys(clients, self.run.settings.lora.rank)
        return self.averager.prepare(server_round, limits)

    def catch_up(self, server_round: int) -> Callable[[Sequence[int]], None]:
        """Return a function that pushes sub-model, alignment and LoRA to clients that lost them."""

        def push_again(lost: Sequence[int]) -> None:
            for client in lost:
                # It lost the files too, so it is offered all of them again.
                self._held.pop(client, None)
            self._push_sub_model(server_round, lost)
            if server_round > 1:
                limits = self.averager.rank_limits
                again = {client: limits[client] for client in limits if client in lost}
                self.averager.push(server_round, again, omitted=1)

        return push_again

    def push_result(self, server_round: int) -> None:
        """Push the sub-model to clients that evaluate and lack it, then the result if needed."""
        if self.evaluation.asked:
            active = [seat.client for seat in self.rounds.roster.active()]
            self._push_sub_model(server_round, active)
        self.averager.push_result(server_round)

    def _push_sub_model(self, server_round: int, clients: Collection[int]) -> None:
        """Push missing files of the sub-model, then the emulator's LoRA to outdated clients."""
        # Files first: LoRA without a model has no place.
        self._push_files(server_round, clients)
        aligned = self.result.aligned
        # Clients with no entry have failed; others with another version are outdated.
        stale = [client for client in clients if self._held.get(client, aligned) != aligned]
        if stale and (emulator := self.result.emulator) is not None:
            limit = self.run.settings.lora.rank
            part = EmulatorPart(blocks=self.result.aligned_blocks, aligned=aligned)
            self.rounds.push_all(server_round, part, lambda key: emulator.blob(key, limit), stale)
            self._held |= dict.fromkeys(stale, aligned)

    def _push_files(self, server_round: int, clients: Collection[int]) -> None:
        """Offer the sub-model to clients without it, and push the pieces that each one lacks."""
        without = [client for client in clients if client not in self._held]
        if not without:
            return
        manifest = self.result.manifest
        answers = self.rounds.push_parts(server_round, [(manifest, {})], without)
        # A client may have pieces of an interrupted push.
        missing = {body.header.client: body.fields["pieces"] for body in answers}
        # Each piece is read once and sent to all clients that lack it.
        for index in range(len(manifest.piece_sha256)):
            if receivers := [client for client, pieces in missing.items() if index in pieces]:
                size = manifest.piece_size(index)
                piece = Piece(model_sha256=manifest.sha256, index=index, size=size)
                data = np.frombuffer(self.result.piece(index), dtype=np.uint8)
                blobs = {PIECE: pack_tensors({BYTES: data})}
                self.rounds.push_parts(server_round, [(piece, blobs)], receivers)
        # 0 is older than any alignment, so its LoRA follows.
        self._held |= dict.fromkeys(missing, 0)

    # ----- round ----------------------------------------------------------------------------------

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order to train, with the hash and alignment of the sub-model."""
        order = self.averager.order(server_round, client)
        fields = SubModelOrder(
            **order.fields.model_dump(),
            model_sha256=self.result.manifest.sha256,
            aligned=self.result.aligned,
        )
        return replace(order, fields=fields)

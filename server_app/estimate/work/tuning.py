"""Memory and computation of the methods that train adapters on a frozen base."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from client_app.methods.tuning.personal_model import CHECKED
from espalier.hf.nf4.checkpoint import QuantisedCheckpoint
from espalier.hf.nf4.matrices import nf4_bytes
from espalier.hf.opening.opened_model import OpenedModel
from espalier.methods.tuning.adapters.tensors import before_round, of_all_rounds
from espalier.methods.tuning.fedsoda import FedSodaSettings
from espalier.methods.tuning.fedspine import FedSpineSettings
from espalier.methods.tuning.sft_p import SftPSettings
from espalier.models.adapters import AdapterPlan
from espalier.settings.pruning import PersonalModelSettings
from server_app.artifacts.outcome import A_FEW
from server_app.estimate.messages.traffic import RunTraffic
from server_app.estimate.messages.tuning import DryFedSoda, DryTuning
from server_app.estimate.work.memory import Moment
from server_app.estimate.work.sizes import FLOAT32, Sizes
from server_app.estimate.work.step_memory import step_bytes
from server_app.estimate.work.work import GRADIENT_AND_MOMENTS, Work, smaller
from strategies.fleet import training_operations
from strategies.tuning.fedsoda.sub_model import SubModelResult

COPIES = 5
"""Number of copies of the trained tensors in memory.

They are the current values, those at the start of the round, the initial ones, and those that are
received and sent.
"""
BASE_BYTES = {"float32": 4, "bfloat16": 2}
GATES = 4
"""Number of places in a block where SFT-P's gates multiply."""


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
        # Only the matrices of the blocks are quantised.
        others = self.base.parameters - self.opened.plan.num_weights
        return {"the base": nf4_bytes(self.opened.plan.shapes) + self.base.computed * others}

    def client_files(self) -> dict[str, int]:
        """Return the bytes of the base in NF4, and of frozen factors."""
        files = {}
        if self.training.base == "nf4":
            files["the quantised base"] = nf4_bytes(self.opened.plan.shapes)
        if frozen := self._frozen_bytes():
            files["frozen factors"] = frozen
        return files

    def _frozen_bytes(self) -> int:
        """Return the bytes of the frozen factors of Fed-SB."""
        if not self.shared.bases:
            return 0
        sizes = (math.prod(shape) for _, one in self.shared for shape in one.shapes().values())
        return FLOAT32 * sum(sizes)

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
        numbers = sum(
            math.prod(shape) for matrix_shapes in shapes for shape in matrix_shapes.values()
        )
        folded = {"folded updates, twice": 2 * FLOAT32 * numbers} if numbers else {}
        frozen = COPIES * self._frozen_bytes()
        frozen_copies = {"frozen factors and copies": frozen} if frozen else {}
        return {**self.weights(), "adapters and copies": copies, **folded, **frozen_copies}

    def worked(self, clients: int = 1) -> list[Moment]:
        """Return the moments of training: reading a matrix of the base, and a step."""
        base = self.base
        read = max(base.embeddings // 2, base.largest_matrix) * base.stored // 4
        moments = GRADIENT_AND_MOMENTS * FLOAT32 * self.shared.num_parameters
        trained = {**self.kept(), "gradients and moments": moments, "a step": self.step()}
        work_moments = [
            Moment("loading the base", {**self.weights(), "a tensor as it is read": read}),
            Moment("a training step", trained),
        ]
        if self.keeps_models:
            # The base that the client trained on stays in memory while its own model is checked.
            checks = self.reread(*CHECKED, "checking its own model,")
            work_moments += [moment.plus(self.kept()) for moment in checks]
        return work_moments

    def evaluated(self) -> list[Moment]:
        """Return the moments of an evaluation in a process that keeps the model that it trained."""
        edited = 2 * FLOAT32 * self.base.largest_matrix
        tokens = self.settings.evaluation.sequence_length
        moments = self.base.evaluation(self.num_evaluated(), tokens, edited=edited)
        return [moment.plus(self.kept()) for moment in moments]

    def checked(self) -> list[Moment]:
        """Return the moments of the check of the adapter.

        peft loads it on transformers' model, while blocks of the base are read one by one. If each
        client has a model of its own, there is nothing to check.
        """
        if isinstance(self.settings.job, PersonalModelSettings):
            return []
        sizes = self.sizes
        name = "checking the adapter,"
        resident = {"adapters, three times": 3 * FLOAT32 * self.adapters.num_parameters}
        if isinstance(self.model.checkpoint, QuantisedCheckpoint):
            others = sizes.parameters - self.plan.num_weights
            codes = 2 * nf4_bytes(self.plan.shapes)
            resident = {"the whole model": codes + others * (sizes.computed + sizes.stored)}
        updates = {"updates of a matrix": 4 * FLOAT32 * sizes.largest_matrix}
        compared = self.reread(A_FEW, self.settings.evaluation.sequence_length, name)
        return [
            moment.plus(resident) for moment in (Moment(f"{name} its updates", updates), *compared)
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
        if job.ratio_of == "model":
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

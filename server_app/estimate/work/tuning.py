"""Work of the methods that train adapters on a frozen base."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch

from espalier.hf.nf4.checkpoint import QuantisedCheckpoint
from espalier.hf.nf4.matrices import nf4_bytes
from espalier.hf.opening.opened import OpenedModel
from espalier.methods.fedsoda import FedSodaSettings
from espalier.methods.fedspine import FedSpineSettings
from espalier.methods.sft_p import SftPSettings
from espalier.models.adapters import AdapterPlan
from espalier.settings.pruning import PersonalModelSettings
from espalier.settings.task import TEXT
from server_app.estimate.dry_runs.tuning import DryFedSoda, DryTuning
from server_app.estimate.memory import Moment, all_beside
from server_app.estimate.sizes import FLOAT32, Sizes
from server_app.estimate.step_memory import step_bytes
from server_app.estimate.traffic import RunTraffic
from server_app.estimate.work.base import EXPORT_SAMPLES, OWN_SAMPLES, Work
from server_app.estimate.work.pruning import GRADIENT_AND_MOMENTS, smaller
from strategies.fedsoda.sub_model import SubModelResult
from strategies.fleet import FROZEN, TRAINED

COPIES = 5
"""Number of copies of the trained tensors in memory.

They are the current values, those at the start of the round, the initial ones, and those that are
received and sent.
"""
BYTES = {"float32": 4, "bfloat16": 2}
OWN_CHECKED = (2, 16)
"""Number of sequences and tokens in a client's check of its own model (``personal_model.py``)."""
GATES = 4
"""Number of places in a block where SFT-P's gates multiply."""


class Tuned(Work):
    """Work with a whole model in memory and adapters in it."""

    def __init__(self, traffic: RunTraffic) -> None:
        super().__init__(traffic)
        base = self.settings.training.base
        self.processes = ("nf4 client" if base == "nf4" else "tuning client", "tuning server")
        task = self.settings.task
        self.tokens = self.num_samples[1] if task.name == TEXT else task.max_tokens
        """Number of tokens in a training sequence."""

    @property
    def opened(self) -> OpenedModel:
        """Model that clients train on."""
        return self.model

    @cached_property
    def base(self) -> Sizes:
        """Sizes of the model that clients train on."""
        return Sizes(self.settings, self.opened)

    @property
    def shared(self) -> AdapterPlan:
        """Everything that clients train and the server averages."""
        assert isinstance(self.strategy, DryTuning)
        return self.strategy.averaged

    @property
    def adapters(self) -> AdapterPlan:
        """Largest adapters that a client trains in the model."""
        return self.shared

    def weights(self) -> Mapping[str, int]:
        """Return the bytes of the frozen base, as ``load_whole`` keeps it."""
        base = self.settings.training.base
        if base != "nf4":
            return {"the base": BYTES[base] * self.base.parameters}
        others = self.base.parameters - self.opened.plan.num_weights
        return {"the base": self._codes() + self.base.computed * others}

    def _codes(self) -> int:
        return nf4_bytes(self.opened.plan.shapes)

    def client_files(self) -> dict[str, int]:
        """Return the bytes of the base in NF4."""
        quantised = self.settings.training.base == "nf4"
        return {"the quantised base": self._codes()} if quantised else {}

    def step(self) -> int:
        """Return the bytes of a forward and backward pass.

        Over a base in NF4, the largest matrix is dequantised while it is used.
        """
        chosen = self.settings.training
        dtype = self.base.dtype if chosen.base != "bfloat16" else torch.bfloat16
        matrix = 2 * self.base.largest_matrix * self.base.computed if chosen.base == "nf4" else 0
        return matrix + step_bytes(
            self.opened, self.settings, self.adapters, dtype, chosen.batch_size, self.tokens
        )

    def kept(self) -> Mapping[str, int]:
        """Return the bytes that a client keeps between messages: base and adapters."""
        copies = COPIES * FLOAT32 * self.shared.num_parameters
        return {**self.weights(), "adapters and copies": copies}

    def worked(self, clients: int = 1, name: str = "") -> list[Moment]:
        """Return the moments of training: reading a matrix of the base, and a step."""
        base = self.base
        read = max(base.embeddings // 2, base.largest_matrix) * base.stored // 4
        moments = GRADIENT_AND_MOMENTS * FLOAT32 * self.shared.num_parameters
        trained = {**self.kept(), "gradients and moments": moments, "a step": self.step()}
        return [
            Moment("loading the base", {**self.weights(), "a tensor as it is read": read}),
            Moment("a training step", trained),
        ]

    def evaluated(self) -> list[Moment]:
        """Return the moments of an evaluation in a process that keeps the model that it trained."""
        num_samples = max(sum(self.texts.num_samples), OWN_SAMPLES * self.texts.own_text)
        edited = 2 * FLOAT32 * self.base.largest_matrix
        found = self.base.evaluation(num_samples, self.texts.sequence_length, edited=edited)
        return all_beside(found, self.kept())

    def finished(self) -> list[Moment]:
        """Return the moments of the check of the client's own model, if it writes one.

        The base that it trained on stays in memory during the check.
        """
        job = self.settings.job
        if not (isinstance(job, PersonalModelSettings) and job.keep_models):
            return []
        return all_beside(self.reread(*OWN_CHECKED, "checking its own model,"), self.kept())

    def aggregated(self) -> list[Moment]:
        """Return the moment of averaging."""
        numbers = FLOAT32 * self.adapters.num_parameters
        return [Moment("averaging", {"global adapters, a few times": 4 * numbers})]

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
        return all_beside([Moment(f"{name} its updates", updates), *compared], held)

    def operations(self) -> float:
        """Return the operations of a round with full sequences, as FedSpine's clock counts."""
        chosen = self.settings.training
        tokens = chosen.steps * chosen.accumulation * chosen.batch_size * self.tokens
        frozen = FROZEN * (self.base.parameters - self.base.embeddings)
        return tokens * (frozen + TRAINED * self.adapters.num_parameters)


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
        tokens = self.settings.training.batch_size * self.tokens
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
        job = self.settings.of(FedSpineSettings)
        return smaller(self.plan, job.pruning_ratio)


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
        piece = min(self.settings.part_bytes, size)
        return {"the sub-model, and a piece of it": size + piece}

    def server_files(self) -> dict[str, int]:
        """Return the bytes of the sub-model."""
        return {"sub-model/": self.sub.manifest.num_bytes}

    def received(self) -> Moment:
        """Return the moment at which a piece of the sub-model exists three times."""
        return Moment("receiving", {"a message, three times": 3 * self.message})

    def aggregated(self) -> list[Moment]:
        """Return the moments of block comparison, alignment, and averaging."""
        job = self.settings.of(FedSodaSettings)
        num_samples = (job.public_samples, self.settings.evaluation.sequence_length)
        moments = super().aggregated()
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
        training = job.align_training(self.settings.training, 1)
        settings = self.settings.model_copy(update={"training": training})
        batch = training.batch_size
        step = step_bytes(self.opened, settings, both, self.base.dtype, batch, tokens)
        taught = batch * tokens * self.sizes.vocabulary * FLOAT32 * 2
        outputs = taught + hidden * (len(self.sub.aligned_blocks) + 1)
        contents = {**self.weights(), "a step": step, "the full model's outputs": outputs}
        return Moment("aligning", contents)

"""Work of the methods that train adapters on a frozen base.

They are FedPETuning, HetLoRA, SFT-P, FedSpine and FedSODA.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch

from espalier.hf.nf4.checkpoint import QuantisedCheckpoint
from espalier.hf.nf4.matrices import nf4_bytes
from espalier.hf.opening.opened import OpenedModel
from espalier.methods.fedpetuning.contract import trained
from espalier.methods.fedsoda.contract import emulator_adapters
from espalier.methods.fedsoda.settings import FedSodaSettings
from espalier.methods.fedspine.settings import FedSpineSettings
from espalier.methods.sft_p import contract as sft_p
from espalier.methods.sft_p.settings import SftPSettings
from espalier.models.adapters import AdapterPlan
from espalier.settings.structured import PersonalModelSettings
from espalier.settings.task import TEXT
from espalier.training.costs.step_memory import step_bytes
from server_app.estimate.block_stream import FLOAT32, evaluation, walk
from server_app.estimate.memory import Memory, Moment, Process, all_beside
from server_app.estimate.sizes import Sizes
from server_app.estimate.sub_model import sub_model
from server_app.estimate.work.base import EXPORT_WINDOWS, OWN_WINDOWS, Work
from server_app.estimate.work.block_walk import smaller
from strategies.fleet.virtual_clock import FROZEN, TRAINED

COPIES = 5
"""Number of copies of the trained tensors in memory.

They are the current values, those at the start of the round, the initial ones, and those that are
received and sent.
"""
GRADIENT_AND_MOMENTS = 3
BYTES = {"float32": 4, "bfloat16": 2}
OWN_CHECKED = (2, 16)
"""Number of sequences and tokens in a client's check of its own model (``personal_model.py``)."""


class Tuned(Work):
    """Work with a whole model in memory and adapters in it."""

    @property
    def opened(self) -> OpenedModel:
        """Model that clients train on."""
        return self.model

    @cached_property
    def adapters(self) -> AdapterPlan:
        """Largest adapters that a client trains."""
        return trained(self.opened.plan, self.settings)

    @cached_property
    def base(self) -> Sizes:
        """Sizes of the model that clients train on."""
        return Sizes(self.settings, self.opened)

    @property
    def tokens(self) -> int:
        """Number of tokens in a training sequence."""
        return (
            self.settings.data.window_tokens
            if self.settings.task.name == TEXT
            else self.settings.task.max_tokens
        )

    def weights(self) -> Mapping[str, int]:
        """Return the bytes of the frozen base, as ``load_whole`` keeps it."""
        chosen = self.settings.training
        linears = self.opened.plan.num_weights
        others = self.base.parameters - linears
        if chosen.base != "nf4":
            return {"the base": BYTES[chosen.base] * self.base.parameters}
        shapes = [linear.shape for block in self.opened.plan.blocks for linear in block.linears]
        return {"the base": nf4_bytes(shapes) + self.base.computed * others}

    def dequantised(self) -> int:
        """Return the bytes of the largest matrix while it is used, for a base in NF4."""
        return (
            2 * self.base.largest_matrix * self.base.computed
            if self.settings.training.base == "nf4"
            else 0
        )

    def step(self) -> int:
        """Return the bytes of a forward and backward pass."""
        chosen = self.settings.training
        dtype = self.base.dtype if chosen.base != "bfloat16" else torch.bfloat16
        return (
            step_bytes(
                self.opened, self.settings, self.adapters, dtype, chosen.batch_size, self.tokens
            )
            + self.dequantised()
        )

    def trained_bytes(self) -> Mapping[str, int]:
        """Return the bytes of the trained tensors with gradients, moments and copies."""
        numbers = FLOAT32 * self.adapters.num_parameters
        return {
            "adapters and copies": COPIES * numbers,
            "gradients and moments": GRADIENT_AND_MOMENTS * numbers,
        }

    def training(self) -> list[Moment]:
        """Return the moments of training: reading a matrix of the base, and a step."""
        loading = {
            **self.weights(),
            "a tensor as it is read": (
                max(self.base.embeddings // 2, self.base.largest_matrix) * self.base.stored // 4
            ),
        }
        return [
            Moment("loading the base", loading),
            Moment(
                "a training step", {**self.weights(), **self.trained_bytes(), "a step": self.step()}
            ),
        ]

    @property
    def kind(self) -> Process:
        """Type of a client's process, which determines its libraries."""
        return "nf4 client" if self.settings.training.base == "nf4" else "tuning client"

    def evaluations(self) -> list[Moment]:
        """Return the moments of an evaluation in a process that keeps the model that it trained."""
        windows = max(sum(self.texts.num_windows), OWN_WINDOWS * self.texts.own_text)
        found = evaluation(
            self.base,
            windows,
            self.texts.window_tokens,
            edited=2 * FLOAT32 * self.base.largest_matrix,
        )
        return all_beside(
            found,
            {**self.weights(), "adapters and copies": self.trained_bytes()["adapters and copies"]},
        )

    def client(self) -> Memory:
        """Return the memory of training, then of the evaluation next to the trained model."""
        return Memory(self.kind, (*self.training(), *self.evaluations(), self.received()))

    def server(self, simulation: bool) -> Memory:
        """Return the memory of averaging, check of the adapter, evaluation, and baseline.

        The adapter is checked with a whole model. The centralized baseline trains like a client.
        """
        numbers = FLOAT32 * self.adapters.num_parameters
        averaging = Moment("averaging", {"global adapters, a few times": 4 * numbers})
        moments = [averaging, *self.checked(), *self.measured(), self.received()]
        if self.settings.makes_centralized(simulation=simulation):
            moments += self.training()
        return Memory("tuning server", tuple(moments))

    def checked(self) -> list[Moment]:
        """Return the moments of the check of the adapter.

        peft loads it on transformers' model, while blocks of the base are read one by one.
        """
        sizes = self.sizes
        name = "checking the adapter,"
        updates = {"updates of a matrix": 4 * FLOAT32 * sizes.largest_matrix}
        held = (
            {"the whole model": self.whole_base()}
            if isinstance(self.model.checkpoint, QuantisedCheckpoint)
            else {"adapters, three times": 3 * FLOAT32 * self.adapters.num_parameters}
        )
        compared = self.reread(EXPORT_WINDOWS, self.settings.evaluation.window_tokens, name)
        return all_beside([Moment(f"{name} its updates", updates), *compared], held)

    def whole_base(self) -> int:
        """Return the bytes of a base in NF4 in plain transformers and of its mapped files."""
        linears = [linear.shape for block in self.model.plan.blocks for linear in block.linears]
        others = self.sizes.parameters - self.model.plan.num_weights
        return 2 * nf4_bytes(linears) + others * (self.sizes.computed + self.sizes.stored)

    def operations(self) -> float:
        """Return the operations of a round with full sequences, as FedSpine's clock counts."""
        chosen = self.settings.training
        tokens = chosen.steps * chosen.accumulation * chosen.batch_size * self.tokens
        return tokens * (
            FROZEN * (self.base.parameters - self.base.embeddings)
            + TRAINED * self.adapters.num_parameters
        )


class Masked(Tuned):
    """Work of SFT-P: a mask generator is also trained, and the model contains gates.

    Each client writes a smaller model.
    """

    @cached_property
    def adapters(self) -> AdapterPlan:
        """LoRA without the generator, which is in ``whole`` and not a part of the model."""
        return replace(sft_p.lora_plan(self.opened.plan, self.settings), whole={})

    def trained_bytes(self) -> Mapping[str, int]:
        """Return the bytes of LoRA and generator, with gradients, moments and copies."""
        numbers = FLOAT32 * sft_p.trained(self.opened.plan, self.settings).num_parameters
        return {
            "adapters and copies": COPIES * numbers,
            "gradients and moments": GRADIENT_AND_MOMENTS * numbers,
        }

    def step(self) -> int:
        """Return the bytes of a forward and backward pass with gates.

        Gates multiply inputs or outputs at four places of each block. Their results are kept for
        the backward pass.
        """
        chosen = self.settings.training
        places = 4
        gated = (
            places
            * len(self.opened.plan.blocks)
            * chosen.batch_size
            * self.tokens
            * self.base.width
            * self.base.computed
        )
        return super().step() + gated

    def checked(self) -> list[Moment]:
        """Return no moments, because there is no model of all clients to check."""
        return []

    def result_parameters(self) -> int:
        """Return the parameters of the client that keeps most."""
        job = self.settings.of(SftPSettings)
        plan = self.model.plan
        share = min(job.share_of_client(client) for client in range(self.settings.num_clients))
        return plan.num_parameters - round(
            share * (plan.num_parameters if job.share_of == "model" else plan.num_weights)
        )

    def client(self) -> Memory:
        """Return the memory, including the check of the client's own model."""
        return with_own_model(self, super().client())


class Spined(Tuned):
    """Work of FedSpine: importances of groups are measured with LoRA's gradients during training.

    The server has no device's model.
    """

    def checked(self) -> list[Moment]:
        """Return no moments, because the common adapter is not checked on a model."""
        return []

    def result_parameters(self) -> int:
        """Return the parameters of a device's model after the last cut."""
        return smaller(self.model.plan, self.settings.of(FedSpineSettings))

    def client(self) -> Memory:
        """Return the memory, including the check of the device's own model."""
        return with_own_model(self, super().client())


def with_own_model(work: Tuned, memory: Memory) -> Memory:
    """Return a client's memory, including the check of its own model if it writes one.

    The base that it trained on stays in memory during the check.
    """
    job = work.settings.of(PersonalModelSettings)
    if not job.keep_models:
        return memory
    held = {**work.weights(), "adapters and copies": work.trained_bytes()["adapters and copies"]}
    own = work.reread(*OWN_CHECKED, "checking its own model,")
    return Memory(memory.process, (*memory.moments, *all_beside(own, held)))


class SubTuned(Tuned):
    """Work of FedSODA: clients train on the sub-model, the server drops blocks and aligns it."""

    @cached_property
    def opened(self) -> OpenedModel:
        """Sub-model that clients train on."""
        self.sub = sub_model(self.settings, self.model)
        return self.sub.model

    @cached_property
    def adapters(self) -> AdapterPlan:
        """LoRA of the adapter's blocks; the emulator's LoRA is not trained at clients."""
        return trained(self.opened.plan, self.settings)

    def received(self) -> Moment:
        """Return the moment at which a piece of the sub-model exists three times."""
        return Moment("receiving", {"a message, three times": 3 * self.message})

    def server(self, simulation: bool) -> Memory:
        """Return the memory of block comparison, alignment, and the steps of all tuning methods."""
        job = self.settings.of(FedSodaSettings)
        windows = job.public_windows
        tokens = self.settings.evaluation.window_tokens
        full = Sizes(self.settings, self.model)
        compared = {
            "hidden states of a group": full.hidden_states(windows, tokens) * (job.group_layers + 1)
        }
        moments = (
            walk(full, windows, tokens, compared, "comparing blocks,")
            if job.drop == "similar"
            else []
        )
        if job.aligns and self.sub_aligned():
            moments.append(self._alignment(job, windows, tokens, full))
        return Memory("tuning server", (*moments, *super().server(simulation).moments))

    def sub_aligned(self) -> list[int]:
        """Return the blocks whose LoRA is aligned."""
        # Access to ``opened`` sets ``self.sub``.
        _ = self.opened
        return self.sub.aligned_blocks

    def _alignment(self, job: FedSodaSettings, windows: int, tokens: int, full: Sizes) -> Moment:
        emulator = emulator_adapters(self.opened.plan, self.settings, self.sub_aligned())
        both = self.adapters.joined(emulator)
        settings = self.settings.model_copy(
            update={"training": job.align_training(self.settings.training, 1)}
        )
        batch = settings.training.batch_size
        step = step_bytes(self.opened, settings, both, self.base.dtype, batch, tokens)
        taught = batch * tokens * full.vocabulary * FLOAT32 * 2
        outputs = full.hidden_states(windows, tokens) * (len(self.sub_aligned()) + 1)
        return Moment(
            "aligning",
            {**self.weights(), "a step": step, "the full model's outputs": taught + outputs},
        )

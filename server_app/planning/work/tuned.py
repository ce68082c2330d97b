"""Work of the methods that train adapters over a frozen base: FedPETuning, HetLoRA, SFT-P, FedSpine, FedSODA."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch

from espalier.modeling.opened import OpenedModel
from espalier.modeling.quantised import nf4_bytes
from espalier.modeling.quantised_checkpoint import QuantisedCheckpoint
from espalier.settings.fedsoda import FedSodaSettings
from espalier.settings.fedspine import FedSpineSettings
from espalier.settings.personal import PersonalModelSettings
from espalier.settings.sft_p import SftPSettings
from espalier.settings.task import TEXT
from espalier.training.step_memory import step_bytes
from espalier.wire import sft_p
from espalier.wire.adapters import AdapterPlan
from espalier.wire.fedsoda import emulator_adapters
from espalier.wire.tuning import trained
from server_app.planning.memory import Memory, Moment, Process, all_beside
from server_app.planning.sizes import Sizes
from server_app.planning.streamed import FLOAT32, evaluation, walk
from server_app.planning.sub_model import sub_model
from server_app.planning.work.base import EXPORT_WINDOWS, OWN_WINDOWS, Work
from server_app.planning.work.by_block import smaller
from strategies.engine.virtual_clock import FROZEN, TRAINED

COPIES = 5
"""Of what is trained: the values, those that it began with and was first made with, and as it was brought and is sent."""
GRADIENT_AND_MOMENTS = 3
BYTES = {"float32": 4, "bfloat16": 2}
OWN_CHECKED = (2, 16)
"""Windows and tokens on which a client compares its own model (``client_app.own_model``)."""


class Tuned(Work):
    """A whole model in memory, and adapters in it."""

    @property
    def opened(self) -> OpenedModel:
        """The model that clients train on."""
        return self.model

    @cached_property
    def adapters(self) -> AdapterPlan:
        """What a client trains, at its largest."""
        return trained(self.opened.plan, self.settings)

    @cached_property
    def base(self) -> Sizes:
        """Sizes of the model that clients train on."""
        return Sizes(self.settings, self.opened)

    @property
    def tokens(self) -> int:
        """Of a training sequence."""
        return (
            self.settings.data.window_tokens
            if self.settings.task.name == TEXT
            else self.settings.task.max_tokens
        )

    def weights(self) -> Mapping[str, int]:
        """The frozen base, as ``load_whole`` holds it."""
        chosen = self.settings.training
        linears = self.opened.plan.num_weights
        others = self.base.parameters - linears
        if chosen.base != "nf4":
            return {"the base": BYTES[chosen.base] * self.base.parameters}
        shapes = [linear.shape for block in self.opened.plan.blocks for linear in block.linears]
        return {
            "the base": nf4_bytes(shapes, chosen.double_quantisation) + self.base.computed * others
        }

    def dequantised(self) -> int:
        """Bytes of the largest matrix while it is computed with, where the base is in NF4."""
        return (
            2 * self.base.largest_matrix * self.base.computed
            if self.settings.training.base == "nf4"
            else 0
        )

    def step(self) -> int:
        """Bytes of a forward and backward pass."""
        chosen = self.settings.training
        dtype = self.base.dtype if chosen.base != "bfloat16" else torch.bfloat16
        return (
            step_bytes(
                self.opened, self.settings, self.adapters, dtype, chosen.batch_size, self.tokens
            )
            + self.dequantised()
        )

    def trained_bytes(self) -> Mapping[str, int]:
        """What is trained, with gradients, moments and copies."""
        numbers = FLOAT32 * self.adapters.num_parameters
        return {
            "adapters and copies": COPIES * numbers,
            "gradients and moments": GRADIENT_AND_MOMENTS * numbers,
        }

    def training(self) -> list[Moment]:
        """Moments of training: a matrix while the base is loaded, and a step."""
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
        """Whose libraries a client has."""
        return "nf4 client" if self.settings.training.base == "nf4" else "tuning client"

    def evaluations(self) -> list[Moment]:
        """Moments of evaluating in a process that keeps the model that it trained."""
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
        """Training, then evaluation beside the model that is kept."""
        return Memory(self.kind, (*self.training(), *self.evaluations(), self.received()))

    def server(self, simulation: bool) -> Memory:
        """Averaging, the check of the adapter on a whole model, evaluation, and the baseline, which trains as a client does."""
        numbers = FLOAT32 * self.adapters.num_parameters
        averaging = Moment("averaging", {"global adapters, a few times": 4 * numbers})
        moments = [averaging, *self.checked(), *self.measured(), self.received()]
        if self.settings.makes_centralized(simulation=simulation):
            moments += self.training()
        return Memory("tuning server", tuple(moments))

    def checked(self) -> list[Moment]:
        """peft loads the adapter on transformers' model, while blocks of the base are streamed beside it."""
        sizes = self.sizes
        name = "checking the adapter,"
        updates = {"updates of a matrix": 4 * FLOAT32 * sizes.largest_matrix}
        if self.settings.export_check == "streamed" and not isinstance(
            self.model.checkpoint, QuantisedCheckpoint
        ):
            held = {"adapters, three times": 3 * FLOAT32 * self.adapters.num_parameters}
        else:
            held = {"the whole model": self.whole_base()}
        compared = self.reread(EXPORT_WINDOWS, self.settings.evaluation.window_tokens, name)
        return all_beside([Moment(f"{name} its updates", updates), *compared], held)

    def whole_base(self) -> int:
        """Bytes of the base as plain transformers loads it whole, and of its files, which are mapped while it does."""
        if isinstance(self.model.checkpoint, QuantisedCheckpoint):
            linears = [linear.shape for block in self.model.plan.blocks for linear in block.linears]
            others = self.sizes.parameters - self.model.plan.num_weights
            return 2 * nf4_bytes(linears, True) + others * (self.sizes.computed + self.sizes.stored)
        return self.reloaded(self.sizes.parameters).parts["the whole model"]

    def operations(self) -> float:
        """Steps of a round over full sequences, as FedSpine's clock counts them."""
        chosen = self.settings.training
        tokens = chosen.steps * chosen.accumulation * chosen.batch_size * self.tokens
        return tokens * (
            FROZEN * (self.base.parameters - self.base.embeddings)
            + TRAINED * self.adapters.num_parameters
        )


class Masked(Tuned):
    """SFT-P: a generator of masks is trained too, and gates stand in the model; each client writes a smaller model."""

    @cached_property
    def adapters(self) -> AdapterPlan:
        """LoRA alone: the generator is in ``whole``, and no part of the model."""
        return replace(sft_p.lora_plan(self.opened.plan, self.settings), whole={})

    def trained_bytes(self) -> Mapping[str, int]:
        """LoRA and generator."""
        numbers = FLOAT32 * sft_p.trained(self.opened.plan, self.settings).num_parameters
        return {
            "adapters and copies": COPIES * numbers,
            "gradients and moments": GRADIENT_AND_MOMENTS * numbers,
        }

    def step(self) -> int:
        """Gates multiply what four places of each block read and write, and keep that for the backward pass."""
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
        """There is no model of all: clients' models are made here one at a time, and evaluated."""
        return []

    def result_parameters(self) -> int:
        """Of the client that keeps most."""
        job = self.settings.of(SftPSettings)
        plan = self.model.plan
        share = min(job.share_of_client(client) for client in range(self.settings.num_clients))
        return plan.num_parameters - round(
            share * (plan.num_parameters if job.share_of == "model" else plan.num_weights)
        )

    def client(self) -> Memory:
        """Also its own model, loaded again."""
        return with_own_model(self, super().client())


class Spined(Tuned):
    """FedSpine: beside training, what units are worth is measured by gradients of LoRA; no device's model is at the server."""

    def checked(self) -> list[Moment]:
        """The adapter of all is checked on nothing."""
        return []

    def result_parameters(self) -> int:
        """Without the share that each device ends without."""
        return smaller(self.model.plan, self.settings.of(FedSpineSettings))

    def client(self) -> Memory:
        """Also its own model, loaded again."""
        return with_own_model(self, super().client())


def with_own_model(work: Tuned, memory: Memory) -> Memory:
    """A client that writes its own model, where it does, and checks it beside the base that it trained on."""
    job = work.settings.of(PersonalModelSettings)
    if not job.keep_models:
        return memory
    held = {**work.weights(), "adapters and copies": work.trained_bytes()["adapters and copies"]}
    if work.settings.export_check == "streamed":
        own = work.reread(*OWN_CHECKED, "checking its own model,")
    else:
        own = [Moment("loading its own model again", work.reloaded(work.result_parameters()).parts)]
    return Memory(memory.process, (*memory.moments, *all_beside(own, held)))


class SubTuned(Tuned):
    """FedSODA: clients train on the sub-model; the server prunes and aligns it with the full one."""

    @cached_property
    def opened(self) -> OpenedModel:
        """The sub-model."""
        self.sub = sub_model(self.settings, self.model)
        return self.sub.model

    @cached_property
    def adapters(self) -> AdapterPlan:
        """LoRA of the adapter's blocks; that of the emulator stays as it is."""
        return trained(self.opened.plan, self.settings)

    def received(self) -> Moment:
        """Also a piece of the sub-model."""
        return Moment("receiving", {"a message, three times": 3 * self.message})

    def server(self, simulation: bool) -> Memory:
        """Comparing blocks, aligning, and what all tuning methods do."""
        job = self.settings.of(FedSodaSettings)
        windows = job.public_windows
        tokens = job.public_window_tokens
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
        """Blocks whose LoRA is aligned."""
        _ = self.opened
        return self.sub.aligned_blocks

    def _alignment(self, job: FedSodaSettings, windows: int, tokens: int, full: Sizes) -> Moment:
        emulator = emulator_adapters(self.opened.plan, self.settings, self.sub_aligned())
        both = self.adapters.joined(emulator)
        settings = self.settings.model_copy(
            update={"training": job.align_training(self.settings.training, 1)}
        )
        step = step_bytes(self.opened, settings, both, self.base.dtype, job.align_batch, tokens)
        taught = job.align_batch * tokens * full.vocabulary * FLOAT32 * 2
        outputs = full.hidden_states(windows, tokens) * (len(self.sub_aligned()) + 1)
        return Moment(
            "aligning",
            {**self.weights(), "a step": step, "the full model's outputs": taught + outputs},
        )

"""Orchestrated distillation alignment (FedSODA, section 4.3).

The full model is the teacher. The public samples pass through it block by block, with the current
adapter inserted, so that it is never whole in memory. The outputs that the sub-model has to match
are kept, in memory or on disk. The sub-model with the same adapter is the student, and only the
LoRA of its emulator is trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from espalier.data.tasks.item import Batch
from espalier.hf.families import Family
from espalier.hf.stream.block_stream import Activations, BlockStream, head_logits, tokens_at_once
from espalier.hf.stream.edits import Edits
from espalier.models.adapters import Tensors
from espalier.progress import report_each
from espalier.settings.tables.training import TrainingSettings
from espalier.training.adapted_model import AdaptedModel, flattened
from espalier.training.loop import Loop, Trained
from espalier.training.sequences import numbered, sequences_of_steps

BETAS = (0.9, 0.95)
"""Betas of AdamW (section 6.1.2)."""


@dataclass(frozen=True)
class Places:
    """Pairs of block outputs that are compared, by block index in sub-model and full model."""

    between: Mapping[int, int]
    """Sub-model's block s_i -> full model's block t_i + n (L_inter)."""
    final: tuple[int, int]
    """Index of the emulator's last block in the sub-model and in the full model (L_final)."""

    def of_full(self) -> set[int]:
        """Return the blocks of the full model whose outputs are needed, without the last block."""
        return {*self.between.values(), self.final[1]}


@dataclass(frozen=True)
class Teacher:
    """Outputs of the full model for some samples."""

    numbers: Sequence[int]
    """Numbers of the samples among all public samples, ascending."""
    outputs: Mapping[int, Activations]
    """Outputs by block; their samples are in the order of ``numbers``."""
    last: Activations
    """Output of the last block, before the final norm."""

    @staticmethod
    @torch.no_grad()
    def walked(
        stream: BlockStream, samples: Tensor, numbers: Sequence[int], blocks: set[int], edits: Edits
    ) -> "Teacher":
        """Pass samples through the edited full model, with one block in memory at a time."""
        activations = stream.start(samples[list(numbers)])
        outputs = dict[int, Activations]()
        for block_plan in report_each(stream.model.plan.blocks, "teacher's block"):
            index = block_plan.index
            with stream.block(index, edits(index), index + 1) as block:
                activations.through(index, block)
            if index in blocks:
                outputs[index] = activations.copied()
        return Teacher(numbers, outputs, activations)


def predictions(whole: Any, family: Family, hidden: Tensor) -> Tensor:
    """Return the logits of the last block's hidden states.

    Final norm and head are applied as in the model's own code.
    """
    decoder = whole.get_submodule(family.blocks.rpartition(".")[0])
    parent, _, name = family.final_norm.rpartition(".")
    final_norm = getattr(whole.get_submodule(parent), name) if name else None
    if final_norm is not None:  # OPT-350M has none
        hidden = final_norm(hidden)
    if (projection := getattr(decoder, "project_out", None)) is not None:
        hidden = projection(hidden)
    return head_logits(whole, hidden)


@dataclass
class Alignment:
    """Alignment of a sub-model with the full model."""

    student: AdaptedModel
    """The sub-model, with LoRA in emulator and adapter."""
    family: Family
    samples: Tensor
    """Public samples, (samples, tokens), int64."""
    places: Places
    """Block outputs that are compared."""
    settings: TrainingSettings
    """Training settings; ``batch_size`` counts samples."""
    seed: int
    """Seed of each step's samples and of dropout."""

    def numbers(self) -> list[int]:
        """Return the numbers of the samples that the steps use, ascending."""
        steps = range(self.settings.steps)
        batch = self.settings.batch_size
        return sorted(sequences_of_steps(len(self.samples), batch, steps, self.seed))

    def run(
        self, teacher: Teacher, start: Tensors, adapter: Tensors
    ) -> tuple[dict[str, dict[str, Tensor]], Trained]:
        """Train the emulator's LoRA from ``start``; the adapter's LoRA is frozen.

        Returns the trained tensors and the result of the loop, and raises ``InputError`` if no step
        was finite.
        """
        self.student.set({**start, **adapter})
        trained = self.student.parameters
        index_of = {number: index for index, number in enumerate(teacher.numbers)}
        loop = Loop(
            self.student.whole,
            flattened({key: {name: trained[key][name] for name in start[key]} for key in start}),
            self.settings,
            len(self.samples),
            numbered,
            self.seed,
            self.settings.steps,
            loss=partial(self.distance, teacher=teacher, place=index_of),
            betas=BETAS,
        )
        with self.student.frozen(lambda key, _: key in adapter):
            outcome = loop.run(0, self.settings.steps)
        values = self.student.values()
        return {key: values[key] for key in start}, outcome

    def distance(
        self,
        whole: Any,
        batch: Batch,
        device: torch.device,
        teacher: Teacher,
        place: Mapping[int, int],
    ) -> Tensor:
        """Return the objective of equation 8, summed over the batch's samples: float32, ().

        Distances and divergence have the same weight (alpha = beta = 1).

        Distances of hidden states are mean squares, divided by the mean square of the teacher's
        states, as in FedBiOT's code. In deep layers some channels are thousands of times larger
        than others and would dominate raw sums. The divergence is a mean over tokens, so that it
        does not outweigh the distances by the sequence length.
        """
        # The labels of these batches are sample numbers, see ``numbered``.
        numbers = batch.labels.tolist()
        rows = [place[number] for number in numbers]
        output = whole(input_ids=self.samples[numbers].to(device), output_hidden_states=True)
        pairs = [*self.places.between.items(), self.places.final]
        total = torch.zeros((), device=device)
        # The first hidden state is the embedding's, so the output of block i has index i + 1.
        for student_block, teacher_block in pairs:
            target = teacher.outputs[teacher_block].of_samples(rows).to(device, torch.float32)
            states = output.hidden_states[student_block + 1].float()
            # (samples,)
            errors = (states - target).square().mean(dim=(1, 2))
            total = total + (errors / target.square().mean(dim=(1, 2)).clamp_min(1e-12)).sum()
        last = teacher.last.of_samples(rows).to(device, next(whole.parameters()).dtype)
        total = total + self._divergences(whole, last, output.logits).sum()
        return total.to(torch.float32)

    def _divergences(self, hf_model: Any, last: Tensor, logits: Tensor) -> Tensor:
        """Return KL(full model || sub-model) of each sample, averaged over its tokens (equation 7).

        The result is float32, (samples,). Logits are computed in pieces, so that memory stays
        bounded.
        """
        chunk_size = tokens_at_once(logits.shape[-1])
        samples = list[Tensor]()
        for hidden, sample_logits in zip(last, logits, strict=True):
            divergences = []
            for hidden_chunk, logits_chunk in zip(
                hidden.split(chunk_size), sample_logits.split(chunk_size), strict=True
            ):
                # The student's norm and head are those of the full model, and they are not trained.
                with torch.no_grad():
                    target = (
                        predictions(hf_model, self.family, hidden_chunk).float().log_softmax(dim=-1)
                    )
                divergences.append(
                    nn.functional.kl_div(
                        logits_chunk.float().log_softmax(-1),
                        target,
                        reduction="sum",
                        log_target=True,
                    )
                )
            samples.append(torch.stack(divergences).sum() / len(hidden))
        return torch.stack(samples)

"""Sizes of a model in memory, whole or block by block, from its plan and its files' headers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from espalier.hf.machine.computing import DTYPES
from espalier.hf.machine.traced_memory import traced
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import samples_per_batch, tokens_at_once
from espalier.messages.tensor_blobs import DTYPE_BYTES
from espalier.settings.run import RunSettings
from server_app.estimate.work.memory import Moment

FLOAT32 = 4
FLOAT64 = 8


@dataclass(frozen=True)
class Sizes:
    """Sizes of one model in one run."""

    settings: RunSettings
    model: OpenedModel

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation."""
        return DTYPES[self.settings.dtype]

    @property
    def computed(self) -> int:
        """Bytes per number in the computing dtype."""
        return self.dtype.itemsize

    @cached_property
    def stored(self) -> int:
        """Bytes per number in the model's files."""
        return DTYPE_BYTES[self.model.plan.blocks[0].linears[0].dtype]

    @property
    def read(self) -> int:
        """Bytes per number in the files, if a tensor that is read exists in both dtypes, or 0."""
        return 0 if self.stored == self.computed else self.stored

    @cached_property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.model.plan.blocks[0].linears[0].shape[1]

    @cached_property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.model.num_embeddings or 0

    @cached_property
    def largest_block(self) -> int:
        """Number of parameters of the largest block."""
        return max(block.num_parameters for block in self.model.plan.blocks)

    @cached_property
    def largest_matrix(self) -> int:
        """Number of weights of the largest matrix in a block, or of its stacked experts."""
        return max(
            size
            for block in self.model.plan.blocks
            for size in (
                *(linear.num_weights for linear in block.linears),
                *(math.prod(shape) for _, shape in block.others),
            )
        )

    @cached_property
    def embeddings(self) -> int:
        """Number of parameters before the blocks."""
        family = self.model.family
        return self._parameters_in(*family.file_names(f"{family.embeddings}."))

    @cached_property
    def head(self) -> int:
        """Number of parameters of the head, or of the embeddings if the two are tied."""
        return self._parameters_in(f"{self.model.family.head}.") or self.embeddings

    def _parameters_in(self, *prefixes: str) -> int:
        """Return the number of parameters of tensors whose names begin with a prefix."""
        tensors = self.model.checkpoint.tensors.items()
        return sum(math.prod(stored.shape) for name, stored in tensors if name.startswith(prefixes))

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.model.plan.num_parameters

    def hidden_states(self, num_samples: int, tokens: int) -> int:
        """Return the bytes of hidden states between two blocks, as far as they are in memory."""
        if self.settings.activations != "memory":
            # If they are stored on disk, one batch is in memory.
            num_samples = min(num_samples, samples_per_batch(tokens))
        return num_samples * tokens * self.width * self.computed

    def loaded(self, numbers: int, largest: int) -> int:
        """Return the bytes of tensors that are read one by one.

        All are in the computing dtype, and one is also in the files' dtype.
        """
        return numbers * self.computed + largest * self.read

    def logits(self, num_samples: int, tokens: int) -> int:
        """Return the bytes of two pieces of logits: one in use while the next is computed."""
        at_once = min(tokens_at_once(max(1, self.vocabulary)), num_samples * tokens)
        pieces = min(2, -(-num_samples * tokens // at_once))
        return pieces * at_once * self.vocabulary * self.computed

    def pass_through_block(self, num_samples: int, tokens: int) -> int:
        """Return the bytes of one batch on its way through a block.

        They are measured with tensors that have shapes but no data.
        """
        batch = min(num_samples, samples_per_batch(tokens))
        skeleton = self.model.new_skeleton()
        family = self.model.family
        blocks = skeleton.get_submodule(family.blocks)
        # One block is enough: a pass holds the tensors of one block at a time.
        del blocks[1:]
        decoder = skeleton.get_submodule(family.blocks.rpartition(".")[0])
        with torch.no_grad(), traced(decoder, self.dtype) as live:
            decoder(input_ids=torch.zeros(batch, tokens, dtype=torch.int64), use_cache=False)
            return live.most

    def walk(
        self,
        num_samples: int,
        tokens: int,
        name: str,
        watched: Mapping[str, int] | None = None,
        edited: int = 0,
    ) -> list[Moment]:
        """Return the moments of a pass that loads the blocks one by one, up to the last block.

        Parameters
        ----------
        watched : bytes of the statistics collected in a block, by kind
        edited : additional bytes for each matrix that is changed while it is read
        """
        if not num_samples:
            return []
        hidden = {"hidden states": self.hidden_states(num_samples, tokens)}
        embeddings = self.loaded(self.embeddings, self.embeddings)
        block = {"a block": self.largest_block * self.computed}
        read = self.largest_matrix * self.read + edited
        within = {"a batch in a block": self.pass_through_block(num_samples, tokens)}
        return [
            Moment(f"{name} embeddings", {**hidden, "embeddings": embeddings}),
            Moment(f"{name} loading a block", {**hidden, **block, "a matrix as it is read": read}),
            Moment(f"{name} passing a block", {**hidden, **block, **within, **(watched or {})}),
        ]

    def evaluation(
        self, num_samples: int, tokens: int, name: str = "evaluating,", edited: int = 0
    ) -> list[Moment]:
        """Return the moments of a pass that computes the losses of all sequences."""
        if not num_samples:
            return []
        hidden = {"hidden states": self.hidden_states(num_samples, tokens)}
        loading = {"the head": self.loaded(self.head, self.head)}
        logits = self.logits(num_samples, tokens)
        scoring = {"the head": self.head * self.computed, "logits": logits}
        return [
            *self.walk(num_samples, tokens, name, edited=edited),
            Moment(f"{name} the head", {**hidden, **loading}),
            Moment(f"{name} logits", {**hidden, **scoring}),
        ]

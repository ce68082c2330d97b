"""What a model's parts take in memory, from its plan and the headers of its files."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from espalier.modeling.block_stream import windows_per_batch
from espalier.modeling.computing import DTYPES
from espalier.modeling.logits import tokens_at_once
from espalier.modeling.opened import OpenedModel
from espalier.modeling.traced_memory import traced
from espalier.settings.run import RunSettings
from espalier.wire.payload import DTYPE_BYTES


@dataclass(frozen=True)
class Sizes:
    """Of one model in one run."""

    settings: RunSettings
    model: OpenedModel

    @property
    def dtype(self) -> torch.dtype:
        """Of what is computed."""
        return DTYPES[self.settings.dtype]

    @property
    def computed(self) -> int:
        """Bytes of a number that is computed."""
        return self.dtype.itemsize

    @cached_property
    def stored(self) -> int:
        """Bytes of a number in the model's files."""
        return DTYPE_BYTES[self.model.plan.blocks[0].linears[0].dtype]

    @property
    def is_converted(self) -> bool:
        """Whether what is read is held twice for a moment, in the files' dtype and in the computing one."""
        return self.stored != self.computed

    @cached_property
    def width(self) -> int:
        """Of the residual stream."""
        return self.model.plan.blocks[0].linears[0].shape[1]

    @cached_property
    def vocabulary(self) -> int:
        """Tokens."""
        return self.model.num_embeddings or 0

    @cached_property
    def largest_block(self) -> int:
        """Numbers of the largest block."""
        return max(block.num_parameters for block in self.model.plan.blocks)

    @cached_property
    def largest_matrix(self) -> int:
        """Numbers of the largest matrix of a block."""
        return max(
            linear.num_weights for block in self.model.plan.blocks for linear in block.linears
        )

    @cached_property
    def embeddings(self) -> int:
        """Numbers of what stands before the blocks."""
        prefix = tuple(self.model.family.file_names(f"{self.model.family.embeddings}."))
        tensors = self.model.checkpoint.tensors.items()
        return sum(math.prod(stored.shape) for name, stored in tensors if name.startswith(prefix))

    @cached_property
    def head(self) -> int:
        """Numbers of what stands behind the blocks and is loaded for logits: the head, or the embeddings that it is tied to."""
        prefix = f"{self.model.family.head}."
        tensors = self.model.checkpoint.tensors.items()
        own = sum(math.prod(stored.shape) for name, stored in tensors if name.startswith(prefix))
        return own or self.embeddings

    @property
    def parameters(self) -> int:
        """All numbers."""
        return self.model.plan.num_parameters

    def hidden_states(self, windows: int, tokens: int) -> int:
        """Bytes of hidden states of windows between two blocks, where they stay in memory."""
        held = (
            windows
            if self.settings.activations == "memory"
            else min(windows, windows_per_batch(tokens))
        )
        return held * tokens * self.width * self.computed

    def loaded(self, numbers: int, largest: int) -> int:
        """Bytes of tensors while they are read one at a time: all of them as computed, and one as it is stored."""
        return numbers * self.computed + (largest * self.stored if self.is_converted else 0)

    def logits(self, windows: int, tokens: int) -> int:
        """Bytes of two pieces of logits: one that is looked at while the next is made."""
        at_once = min(tokens_at_once(max(1, self.vocabulary)), windows * tokens)
        pieces = min(2, -(-windows * tokens // at_once))
        return pieces * at_once * self.vocabulary * self.computed

    def pass_through_block(self, windows: int, tokens: int) -> int:
        """Bytes that one batch of windows takes on its way through a block, found by going through it without numbers."""
        batch = min(windows, windows_per_batch(tokens))
        skeleton = self.model.new_skeleton()
        family = self.model.family
        blocks = skeleton.get_submodule(family.blocks)
        del blocks[1:]
        decoder = skeleton.get_submodule(family.blocks.rpartition(".")[0])
        with torch.no_grad(), traced(decoder, self.dtype) as live:
            decoder(input_ids=torch.zeros(batch, tokens, dtype=torch.int64), use_cache=False)
            return live.most

"""Language model with logits made by hand."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig


class ModelOfLogits(nn.Module):
    """Model that has a head, as those of Hugging Face do; this head returns its input.

    Parameters
    ----------
    vocabulary : number of words
    logits : function from input ids (B, T) to logits (B, T, vocabulary)
    """

    def __init__(self, vocabulary: int, logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.config = PretrainedConfig()
        self.made = logits
        self.head = nn.Linear(vocabulary, vocabulary, bias=False)
        self.head.weight.data = torch.eye(vocabulary)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = True
    ) -> Any:
        states = self.made(input_ids)
        return SimpleNamespace(logits=self.head.to(states.device)(states))

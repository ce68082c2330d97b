"""Model of two tensors: the logits of the next token are a row of a matrix plus a shared vector."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from espalier.data.tasks.encoding import Encoded
from espalier.data.tasks.item import Batch, collate
from espalier.settings.tables.training import TrainingSettings
from espalier.training.loop import Loop
from espalier.training.sequences import sequences_of_step

VOCABULARY = 6
SEED = 9
RATE = 0.05
TOTAL = 20
SEQUENCES = [
    Encoded((1, 2, 3, 4, 5), 4), Encoded((2, 5), 1), Encoded((0, 3, 3), 1),
    Encoded((4, 4, 1, 0, 2, 3), 2), Encoded((5, 1, 2), 2),
]  # fmt: skip


class Rows(nn.Module):
    """Model whose two parameters are drawn from ``seed``."""

    def __init__(self, seed: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.shift = nn.Parameter(torch.randn(VOCABULARY, generator=generator))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids] + self.shift)


def batch_of(numbers: Sequence[int]) -> Batch:
    return collate([SEQUENCES[number] for number in numbers], 0)


def loop_of(
    model: Rows,
    names: Sequence[str] = ("table", "shift"),
    max_gradient_norm: float = math.inf,
    **settings: Any,
) -> Loop:
    given = {"batch_size": 2, "learning_rate": RATE} | settings
    parameters = {name: getattr(model, name) for name in names}
    chosen = TrainingSettings(**given)
    return Loop(
        model,
        parameters,
        chosen,
        len(SEQUENCES),
        batch_of,
        SEED,
        TOTAL,
        max_gradient_norm=max_gradient_norm,
    )


def predicted(step: int, batch: int = 2) -> list[tuple[int, int]]:
    """Return (previous token, token) of every prediction that a step counts, one by one."""
    pairs = []
    for number in sequences_of_step(len(SEQUENCES), batch, step, SEED):
        ids = SEQUENCES[number].token_ids
        pairs += [
            (ids[place - 1], ids[place])
            for place in range(len(ids) - SEQUENCES[number].answer_tokens, len(ids))
        ]
    return pairs


def mean_loss(model: Rows, step: int, batch: int = 2) -> Tensor:
    """Return the mean of -log p over a step's predictions, computed one by one."""
    losses = []
    for before, token in predicted(step, batch):
        row = model.table[before] + model.shift
        losses.append(row.exp().sum().log() - row[token])
    return torch.stack(losses).mean()

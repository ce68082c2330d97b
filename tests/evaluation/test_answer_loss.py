"""Loss on answers against logits whose softmax is known by hand."""

import math

import pytest
import torch
from model_of_logits import ModelOfLogits
from torch import Tensor

from espalier.corpora.tasks.encoding import Encoded
from espalier.evaluation.answer_loss import mean_answer_loss

pytestmark = pytest.mark.usefixtures("tests_on_device")

VOCABULARY = 8


def counted(input_ids: Tensor) -> Tensor:
    """Give half of the probability to the next number, and share the rest out evenly."""
    logits = torch.zeros(*input_ids.shape, VOCABULARY)
    return logits.scatter_(2, ((input_ids + 1) % VOCABULARY)[..., None], math.log(VOCABULARY - 1))


COUNTING = ModelOfLogits(VOCABULARY, counted)
RIGHT, WRONG = math.log(2), math.log(2 * (VOCABULARY - 1))


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_every_token_of_an_answer_counts_as_much(batch_size: int, device: torch.device) -> None:
    encoded = [Encoded((1, 5, 6, 7), 2), Encoded((3, 0), 1), Encoded((2, 3, 4, 5, 0, 1), 4)]
    loss, tokens = mean_answer_loss(COUNTING, encoded, batch_size=batch_size, device=device)
    assert tokens == 7
    assert loss == pytest.approx((2 * RIGHT + WRONG + 3 * RIGHT + WRONG) / 7, rel=1e-6)


def test_with_the_prompt_every_token_but_the_first_counts(device: torch.device) -> None:
    loss, tokens = mean_answer_loss(COUNTING, [Encoded((1, 5, 6, 7), 1), Encoded((0, 1), 1)], "all", device=device)
    assert tokens == 4
    assert loss == pytest.approx((WRONG + 3 * RIGHT) / 4, rel=1e-6)

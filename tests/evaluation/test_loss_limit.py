"""Losses on a client's own items are limited.

A model with huge weights then reveals no more of an item than others do.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.data.tasks.encoding import Encoded
from espalier.data.tasks.scored_items import ScoredItems
from espalier.errors import EspalierError
from espalier.evaluation.perplexity import bounded
from espalier.evaluation.scores import score
from espalier.messages.contract import check
from espalier.messages.evaluation import OWN_LOSS_LIMIT, Texts, contract
from espalier.messages.message import Header, MessageBody
from tests.evaluation.model_of_logits import ModelOfLogits
from tests.run_names import BY_HAND

pytestmark = pytest.mark.usefixtures("tests_on_device")

HEADER = {
    "schema_version": 1,
    "kind": "evaluate",
    "method": "m",
    "lineage": BY_HAND,
    "server_round": 1,
    "client": 0,
}


class Always:
    """Encoder that gives the same logits to every text."""

    config = SimpleNamespace(pad_token_id=0)

    def __init__(self, logits: list[float]) -> None:
        self.logits = torch.tensor(logits)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(logits=self.logits.expand(len(input_ids), -1))


def of_classes(*answers: int) -> ScoredItems:
    requests = tuple(Encoded((0, 1), 0) for _ in answers)
    return ScoredItems(requests, (1,) * len(answers), answers, (1,) * len(answers))


@pytest.mark.parametrize("huge", [1e6, 3e38, math.inf, math.nan])
def test_item_loss_is_clipped_at_limit(huge: float, device: torch.device) -> None:
    found = score(Always([0.0, huge]), of_classes(0, 0, 1, 1, 1), True, 2, device, 20.0)["loss"]
    # A loss that is not a number counts as the limit.
    wrong = 5 if math.isnan(huge) or math.isinf(huge) else 2
    assert found == pytest.approx(wrong * 20.0 / 5)


def test_token_loss_is_clipped_at_limit(device: torch.device) -> None:
    """Items end in 1 0 and 1 2; the logits are 0, 0 and 1e6, so token 2 has no loss."""
    written = ScoredItems((Encoded((0, 1, 0), 2), Encoded((0, 1, 2), 2)), (1, 1), (0, 0), (1, 1))
    always = ModelOfLogits(
        3, lambda input_ids: torch.tensor([0.0, 0.0, 1e6]).to(device).expand(*input_ids.shape, -1)
    )
    found = score(always, written, False, 2, device, 20.0)["loss"]
    assert found == pytest.approx((20.0 + 20.0 + 20.0 + 0.0) / 4)


def test_without_a_limit_losses_are_what_they_are(device: torch.device) -> None:
    assert score(Always([0.0, 1e6]), of_classes(0, 1), True, 2, device)["loss"] == pytest.approx(
        5e5
    )
    losses = torch.tensor([1.0, 2e6])
    assert torch.equal(bounded(losses, None), losses)


@pytest.mark.parametrize("loss", [OWN_LOSS_LIMIT + 0.001, -0.001])
def test_the_contract_lets_no_other_loss_through(loss: float) -> None:
    texts = Texts(names=[], num_samples=[], sequence_length=2, own_text=True)
    header = Header.model_validate({**HEADER, "attempt": 1, "part": 0, "num_parts": 1})
    report = {"losses": [], "own_losses": [1.0, 2.0, loss], "test_scores": [], "seconds": 1.0}
    with pytest.raises(EspalierError, match=r"own_losses are not between 0 and 20"):
        check(MessageBody(header, report), contract("m", texts, True).up)
    check(
        MessageBody(header, report | {"own_losses": [1.0, 2.0, OWN_LOSS_LIMIT]}),
        contract("m", texts, True).up,
    )

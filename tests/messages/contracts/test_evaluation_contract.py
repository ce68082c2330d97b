"""Possible losses and scores in a client's report of its own result."""

import pytest

from espalier.errors import EspalierError, ProtocolError
from espalier.messages.contract import check
from espalier.messages.evaluation import Losses, Texts, contract
from espalier.messages.message import UNREAD, MessageBody, validate

TEXTS = Texts(
    names=["public"],
    num_samples=[1],
    sequence_length=4,
    own_text=False,
    test_metrics=["loss", "acc"],
)


def held_against(loss: float, scores: list[float]) -> None:
    told = Losses(losses=[loss], own_losses=[], test_scores=scores, seconds=0.0)
    check(MessageBody(UNREAD, told.model_dump()), contract("fedpetuning", TEXTS, own_text=False).up)


@pytest.mark.parametrize(("loss", "scores"), [(0.0, [0.0, 0.0]), (12.5, [80.0, 1.0])])
def test_what_there_can_be_is_taken(loss: float, scores: list[float]) -> None:
    held_against(loss, scores)


@pytest.mark.parametrize(
    ("loss", "scores"),
    [
        (-0.1, [1.0, 1.0]),
        (700.1, [1.0, 1.0]),
        (1.0, [-1.0, 0.5]),
        (1.0, [1.0, 1.01]),
        (1.0, [1.0, -0.5]),
    ],
)
def test_what_there_cannot_be_is_refused(loss: float, scores: list[float]) -> None:
    with pytest.raises(EspalierError, match="Losses: "):
        held_against(loss, scores)


def test_a_reply_without_scores_is_refused() -> None:
    """The server reads every field of a reply that matches its contract."""
    told = Losses(losses=[1.5], own_losses=[], test_scores=[], seconds=0.0).model_dump()
    del told["test_scores"]
    with pytest.raises(
        ProtocolError, match="Losses: missing, surplus or out of range: test_scores"
    ):
        validate(Losses, told)

"""Contract of ``evaluate``: public token windows down, mean losses up."""

from typing import Annotated

from pydantic import Field

from espalier.settings.mistakes import Mistake
from espalier.wire.contract import Contract, Side
from espalier.wire.messages import MOST_SECONDS, Scalars
from espalier.wire.payload import TensorSpec

OWN_TEXT_MODELS = ("dense", "local_only", "federated")
"""The models that a client evaluates on its own held-out text, in order of ``Losses.own_losses``."""


class Texts(Scalars):
    """Which public texts the windows belong to, how many windows each has, and whether the client's own text counts too."""

    names: list[str]
    num_windows: list[Annotated[int, Field(ge=1)]]
    window_tokens: int = Field(ge=2)
    own_text: bool


class Losses(Scalars):
    """Mean next-token losses in nats."""

    losses: list[float]
    """Of the client's local result, per public text."""
    own_losses: list[float]
    """Of ``OWN_TEXT_MODELS`` on the client's own held-out text; empty if it was not asked for."""
    own_windows: int = Field(ge=0)
    """Windows of the own held-out text that were evaluated."""
    seconds: float = Field(ge=0, le=MOST_SECONDS)


WINDOWS_BLOB = "public-windows"


OWN_LOSS_DIGITS = 3
"""Decimals to which a loss on a client's own text is rounded."""


def contract(method: str, texts: Texts, own_text: bool) -> Contract:
    """The contract of an evaluation by a client; ``own_text`` is what the run's settings say."""
    if texts.own_text != own_text:
        raise Mistake("Texts: own_text is not what evaluation.own-text says")
    if not len(set(texts.names)) == len(texts.names) == len(texts.num_windows):
        raise Mistake(f"Texts: {len(set(texts.names))} different names, {len(texts.num_windows)} numbers of windows")
    windows = {
        name: TensorSpec("I32", (count, texts.window_tokens))
        for name, count in zip(texts.names, texts.num_windows, strict=True)
    }
    own = len(OWN_TEXT_MODELS) if texts.own_text else 0

    def a_loss_per_text(report: Scalars) -> None:
        if isinstance(report, Losses) and (len(report.losses), len(report.own_losses)) != (len(texts.names), own):
            found = f"{len(report.losses)} losses for {len(texts.names)} texts, {len(report.own_losses)} own for {own}"
            raise Mistake(f"Losses: {found}")
        if isinstance(report, Losses) and any(loss != round(loss, OWN_LOSS_DIGITS) for loss in report.own_losses):
            raise Mistake(f"Losses: own_losses have more than {OWN_LOSS_DIGITS} decimals")

    return Contract(
        kind="evaluate",
        method=method,
        down=Side(Texts, {WINDOWS_BLOB: windows} if windows else {}),
        up=Side(Losses, check_scalars=a_loss_per_text),
        observer="how well the client's own local result predicts public text, one number per text; with "
        "`evaluation.own-text`, where the site allows it, how well the dense, its own and the federated model predict its own "
        "held-out text: one number each, a mean over at least 1000 words rounded to three decimals, and how many windows that "
        "has (who may ask for many such means, of other windows or models, can narrow down single words); and how long it took",
    )

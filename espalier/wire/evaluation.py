"""Contract of ``evaluate``: public token windows down, one mean loss per text up."""

from typing import Annotated

from pydantic import Field

from espalier.settings.mistakes import Mistake
from espalier.wire.contract import Contract, Side
from espalier.wire.messages import Scalars
from espalier.wire.payload import TensorSpec


class PublicText(Scalars):
    """Which public texts the windows belong to, and how many windows each has."""

    names: list[str] = Field(min_length=1)
    num_windows: list[Annotated[int, Field(ge=1)]]
    window_tokens: int = Field(ge=2)


class LocalLoss(Scalars):
    """Mean next-token loss in nats of the client's local result, per public text."""

    losses: list[float]
    seconds: float = Field(ge=0)


WINDOWS_BLOB = "public-windows"


def contract(method: str, text: PublicText) -> Contract:
    """The contract of an evaluation on public text."""
    if not len(set(text.names)) == len(text.names) == len(text.num_windows):
        raise Mistake(f"PublicText: {len(set(text.names))} different names, {len(text.num_windows)} numbers of windows")
    windows = {
        name: TensorSpec("I32", (count, text.window_tokens)) for name, count in zip(text.names, text.num_windows, strict=True)
    }

    def a_loss_per_text(report: Scalars) -> None:
        if isinstance(report, LocalLoss) and len(report.losses) != len(text.names):
            raise Mistake(f"LocalLoss: {len(report.losses)} losses for {len(text.names)} texts")

    return Contract(
        kind="evaluate",
        method=method,
        down=Side(PublicText, {WINDOWS_BLOB: windows}),
        up=Side(LocalLoss, check_scalars=a_loss_per_text),
        observer="how well the client's own local result predicts public text: one number per text; and how long it took",
    )

"""Contract of ``alone``: a client makes by itself what its rounds did not leave; the result stays there, to be evaluated.

Tuning clients train alone in as many steps as all rounds have; clients of iterative FedPrLLM prune the model without the
others' decisions; late clients of SFT-P fit their embedding. That takes as long as the rounds did, so it is no part of the
evaluation.
"""

from pydantic import Field

from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.contract import Contract, Side
from espalier.wire.messages import MOST_SECONDS, Letter, Scalars, validate

OBSERVER = (
    "that the client has made what it makes by itself, which stays there, and how long it took"
)


class Alone(Scalars):
    """What a client makes alone."""

    rank_limit: int = Field(0, ge=0)
    """Rank of the adapters of a client that no round has asked; 0: as the settings say."""
    fits: bool = False
    """The client was in no round, and fits its embedding (SFT-P)."""


class AloneReport(Scalars):
    """What a client says of it."""

    seconds: float = Field(ge=0, le=MOST_SECONDS)


def contract(request: Letter, settings: RunSettings) -> Contract:
    """The contract of an ``alone`` message; it is for the last round of a run.

    Raises
    ------
    Mistake
        The rounds of such a run leave a local-only result, or no adapter has such a rank.
    """
    if not settings.job.makes_alone:
        raise Mistake(
            f"message: clients of {settings.method} make nothing alone after their rounds"
        )
    largest = settings.lora.largest_rank if settings.tunes else 0
    order = validate(Alone, request.scalars)
    if order.fits and not settings.job.fits_alone(settings.federation):
        raise Mistake(f"message: clients of {settings.method} have nothing to fit")
    if order.rank_limit > largest:
        raise Mistake(f"message: rank_limit is above {largest}, the largest rank of an adapter")
    return Contract(
        kind="alone",
        method=settings.method,
        down=Side(Alone),
        up=Side(AloneReport),
        observer=f"{OBSERVER}{_sent_with(settings)}",
    )


def _sent_with(settings: RunSettings) -> str:
    """With which settings there is such a message, where it is not usual."""
    given = settings.job.MAKES_ALONE_WITH.items()
    chosen = ", ".join(f"`{key}` = {_words(value)}" for key, value in given)
    return f"; it is sent with {chosen} alone" if chosen else ""


def _words(value: str | int | tuple[str, ...]) -> str:
    if isinstance(value, int):
        return f"`{value}` or more"
    return " or ".join(f"`{one}`" for one in (value if isinstance(value, tuple) else (value,)))

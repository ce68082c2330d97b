"""Contract of ``local_baseline``: a client computes a result that its rounds did not produce.

The result stays at the client, which evaluates it later. It is the local baseline in methods whose
rounds leave none: clients that tune (or train the layer of LLM-Streamline) train on their own data
for as many steps as all rounds have, and clients of iterative FedPrLLM prune the model without the
decisions of others. In SFT-P and FedSpine the client writes its personal model; an SFT-P client
that took part in no round fits its embedding first. This work can take as long as the rounds did,
so it has a message of its own and is not part of the evaluation.
"""

from pydantic import Field

from espalier.errors import ProtocolError
from espalier.messages.contract import Contract, Side
from espalier.messages.message import MAX_SECONDS, Fields, MessageBody, validate
from espalier.settings.run import RunSettings

OBSERVER = (
    "That the client has made its local baseline or its own model, which stays there, and how long"
    " it took."
)


class BaselineOrder(Fields):
    """Fields of the request."""

    rank_limit: int = Field(0, ge=0)
    """Largest adapter rank of a client that no round has asked; 0: the rank of the settings."""
    fits: bool = False
    """True if the client took part in no round and fits its embedding (SFT-P)."""


class BaselineReport(Fields):
    """Fields of the reply."""

    seconds: float = Field(ge=0, le=MAX_SECONDS)
    """Duration of the work in seconds."""


def contract(request: MessageBody, settings: RunSettings) -> Contract:
    """Return the contract of a ``local_baseline`` message, which belongs to the last round.

    Raises ProtocolError if clients of this method compute nothing on their own, have nothing to
    fit, or if no adapter has such a rank.
    """
    if not settings.job.has_local_baseline:
        raise ProtocolError(
            f"message: clients of {settings.method} compute no local baseline after their rounds"
        )
    max_rank = settings.lora.rank if settings.tunes else 0
    order = validate(BaselineOrder, request.fields)
    # Only SFT-P has clients that join late.
    if order.fits and not settings.job.fits_local_baseline(settings.federation):
        raise ProtocolError(f"message: clients of {settings.method} have nothing to fit")
    if order.rank_limit > max_rank:
        raise ProtocolError(
            f"message: rank_limit is above {max_rank}, the largest rank of an adapter"
        )
    conditions = []
    # The observer sentence names the settings with which the message is sent.
    for key, value in settings.job.MAKES_LOCAL_BASELINE_WITH.items():
        values = value if isinstance(value, tuple) else (value,)
        conditions.append(f"`{key}` = {' or '.join(f'`{option}`' for option in values)}")
    sent_with = f" It is sent only with {', '.join(conditions)}." if conditions else ""
    return Contract(
        kind="local_baseline",
        method=settings.method,
        down=Side(BaselineOrder),
        up=Side(BaselineReport),
        observer=OBSERVER + sent_with,
    )

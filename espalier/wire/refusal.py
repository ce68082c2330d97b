"""Contract of ``refused``: the server tells a node why it takes no part in the run, so that the site's own log says so.

Covers: what a site logs of it is one short line of printable characters. Does not cover: whether it is true.
"""

from pydantic import Field, field_validator

from espalier.wire.contract import Contract, Side
from espalier.wire.messages import NoScalars, Scalars
from espalier.wire.printable import printable, without_control

MOST_CHARACTERS = 2000
OBSERVER = "that the node has heard that it takes no part"


class Refusal(Scalars):
    """Reason why a node takes no part."""

    reason: str = Field(max_length=MOST_CHARACTERS + 40)

    @field_validator("reason")
    @classmethod
    def _is_printable(cls, reason: str) -> str:
        """A site's terminal shows it: one line without control characters."""
        if reason != without_control(reason, keep=""):
            raise ValueError("not one line of printable characters")
        return reason

    @staticmethod
    def because(reason: str) -> "Refusal":
        """Return the refusal for a reason, which may quote what a node wrote."""
        return Refusal(reason=printable(reason, MOST_CHARACTERS))


def contract(method: str) -> Contract:
    """Return the contract of a refusal, the same for all methods."""
    return Contract(
        kind="refused", method=method, down=Side(Refusal), up=Side(NoScalars), observer=OBSERVER
    )

"""Contract of ``refused``: the server tells a node the reason why it cannot take part in the run.

The site's own log then has the reason.

Covers: the site logs one short line of printable characters.
Does not cover: the truth of the reason.
"""

from pydantic import Field, field_validator

from espalier.identity.names import printable, without_control
from espalier.messages.contract import Contract, Side
from espalier.messages.message import Fields, NoFields

MAX_CHARACTERS = 2000
"""Maximum number of characters of a reason."""
OBSERVER = "That the node has received the refusal."


class Refusal(Fields):
    """Reason why a node cannot take part."""

    # ``printable`` may append a note after the last permitted character.
    reason: str = Field(max_length=MAX_CHARACTERS + 40)

    @field_validator("reason")
    @classmethod
    def _is_printable(cls, reason: str) -> str:
        """Accept only one line without control characters, because a site's terminal shows it."""
        if reason != without_control(reason, keep=""):
            raise ValueError("not one line of printable characters")
        return reason

    @staticmethod
    def because(reason: str) -> "Refusal":
        """Return the refusal for a reason, which may quote text of a node."""
        return Refusal(reason=printable(reason, MAX_CHARACTERS))


def contract(method: str) -> Contract:
    """Return the contract of a refusal, which is the same for all methods."""
    return Contract(
        kind="refused", method=method, down=Side(Refusal), up=Side(NoFields), observer=OBSERVER
    )

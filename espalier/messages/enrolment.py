"""Contracts of ``enrol`` and ``refused``.

A node states its identity, its program and its base model. If it cannot take part, the server tells
it why, so that the site's own log has the reason, as one short line of printable characters.

If the server has the sites' public keys (``site-keys``), the request has a nonce, and the reply has
a signature of the site's name by its key (``signed_name``). The contract of other runs has no room
for either.
"""

import re
from typing import Literal

from pydantic import Field, field_validator

from espalier.identity.names import printable, without_control
from espalier.messages.contract import Contract, Side
from espalier.messages.message import Fields, NoFields
from espalier.messages.signed_name import NONCE_BYTES

MAX_CAPABILITY = 1e9
"""Maximum value of a site's capability."""
VERSION = r"^[A-Za-z0-9.+_-]*$"
"""Pattern of a version."""

MAX_SIGNATURE = 264
"""Maximum number of hexadecimal digits of a signature: that of a 521-bit key."""

NO_MODEL = "0" * 64
"""Value in place of the base model's hash if clients of the method need no base model."""


class Enrolment(Fields):
    """Statement of a node about itself."""

    site: str = Field(max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    code_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    model_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    device: Literal["cpu", "cuda"]
    threads: int = Field(ge=1)
    capability: float = Field(gt=0, le=MAX_CAPABILITY)
    """Computing capability of the site, stated or measured."""
    measured: bool
    """True if the capability was measured; stated and measured values cannot be compared."""
    approval: bool
    """True if replies of the site wait for approval by a person."""
    python: str = Field(max_length=32, pattern=VERSION)
    torch: str = Field(max_length=64, pattern=VERSION)


class Challenge(Fields):
    """Request for a signed enrolment."""

    nonce: str = Field(pattern=rf"^[0-9a-f]{{{2 * NONCE_BYTES}}}$")
    """Random number of this request, hexadecimal."""


class SignedEnrolment(Enrolment):
    """Statement of a node about itself, signed with the site's key."""

    signature: str = Field("", max_length=MAX_SIGNATURE, pattern=r"^([0-9a-f]{2})*$")
    """Signature by the site's key, hexadecimal.

    It is empty if the node has no key. The server refuses such a node with a readable reason.
    """

    def unsigned(self) -> Enrolment:
        """Return the statement that the signature covers."""
        return Enrolment(**self.model_dump(exclude={"signature"}))


MAX_CHARACTERS = 2000
"""Maximum number of characters of the reason of a refusal."""


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


TELLS = (
    "The site's name, hashes of its program and base model, its device, threads and capability,"
    " whether a person there approves its replies, and versions."
)
SIGNED = (
    " Only in runs with `site-keys`: a signature of all this, which proves that the sender has the"
    " site's key."
)

_REFUSED_BY = re.compile(r"site ([A-Za-z0-9._-]{1,64}): ")


def refusal(site: str, reason: str) -> str:
    """Return the error text of a node that refuses to enrol.

    The site name comes first, if there is one, since the server does not know the site yet.
    """
    return f"site {site}: {reason}" if site else reason


def refused_by(text: str) -> tuple[str, str]:
    """Split the text of ``refusal`` into site name and reason.

    The name is a claim of the sender. It is empty if the text has none.
    """
    # A node writes this text itself, so the name proves nothing.
    match = _REFUSED_BY.match(text)
    return (match[1], text[match.end() :]) if match else ("", text)


def contract(method: str, *, signed: bool) -> Contract:
    """Return the contract of an enrolment, which is the same for all methods.

    Parameters
    ----------
    signed : True if the server has the sites' public keys
    """
    return Contract(
        kind="enrol",
        method=method,
        down=Side(Challenge if signed else NoFields),
        up=Side(SignedEnrolment if signed else Enrolment),
        observer=TELLS + SIGNED if signed else TELLS,
    )


def refused_contract(method: str) -> Contract:
    """Return the contract of a refusal, which is the same for all methods."""
    return Contract(
        kind="refused",
        method=method,
        down=Side(Refusal),
        up=Side(NoFields),
        observer="That the node has received the refusal.",
    )

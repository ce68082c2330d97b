"""Contract of ``enrol``: who a node is, and whether it runs the same program on the same model.

Where the run's server has the sites' public keys (``site-keys``), the request brings a number that was never used before, and
the reply says the site's name with its key (``signed_name``). In other runs there is room for neither.
"""

import re
from typing import Literal

from pydantic import Field

from espalier.wire.contract import Contract, Side
from espalier.wire.messages import NoScalars, Scalars
from espalier.wire.signed_name import NONCE_BYTES

MOST_CAPABILITY = 1e9
VERSION = r"^[A-Za-z0-9.+_-]*$"

MOST_SIGNATURE = 264
"""Hexadecimal digits of a signature by a key of 521 bits."""

NO_MODEL = "0" * 64
"""In place of the base model's hash, where the method does without it at the clients."""


class Enrolment(Scalars):
    """What a node says of itself."""

    site: str = Field(max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    code_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    model_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    device: Literal["cpu", "cuda"]
    threads: int = Field(ge=1)
    capability: float = Field(gt=0, le=MOST_CAPABILITY)
    """How much the site can compute, as it states or measured it."""
    measured: bool
    """Whether the capability was measured; stated and measured ones cannot be compared."""
    approval: bool
    """True if replies of the site wait for approval by a person."""
    python: str = Field(max_length=32, pattern=VERSION)
    torch: str = Field(max_length=64, pattern=VERSION)


class Challenge(Scalars):
    """What a site is asked to sign with its name."""

    nonce: str = Field(pattern=rf"^[0-9a-f]{{{2 * NONCE_BYTES}}}$")


class SignedEnrolment(Enrolment):
    """What a node says of itself, with its key."""

    signature: str = Field("", max_length=MOST_SIGNATURE, pattern=r"^([0-9a-f]{2})*$")
    """By the site's key; empty of a node that gives none, which the server refuses in words."""

    def told(self) -> Enrolment:
        """What is signed of it."""
        return Enrolment(**self.model_dump(exclude={"signature"}))


TELLS = (
    "the site's name, hashes of its program and base model, its device, threads and capability, "
)
TELLS += "whether a person there approves its replies, and versions"
SIGNED = (
    "; in runs with `site-keys` alone a signature of all this, which proves that who sent it has"
    " the site's key"
)

_REFUSED_BY = re.compile(r"site ([A-Za-z0-9._-]{1,64}): ")


def refusal(site: str, reason: str) -> str:
    """What a node says that refuses to enrol: the reason, behind the site's name if it has one; nobody knows it yet."""
    return f"site {site}: {reason}" if site else reason


def refused_by(text: str) -> tuple[str, str]:
    """The site and the reason that ``refusal`` put together; the name is a claim, and empty where none is told."""
    named = _REFUSED_BY.match(text)
    return (named[1], text[named.end() :]) if named else ("", text)


def contract(method: str, *, signed: bool) -> Contract:
    """The contract of an enrolment, the same for all methods; ``signed``: the run's server has the sites' public keys."""
    return Contract(
        kind="enrol",
        method=method,
        down=Side(Challenge if signed else NoScalars),
        up=Side(SignedEnrolment if signed else Enrolment),
        observer=TELLS + SIGNED if signed else TELLS,
    )

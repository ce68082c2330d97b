"""Contract of ``enrol``: who a node is, and whether it runs the same program on the same model."""

import re
from typing import Literal

from pydantic import Field

from espalier.wire.contract import Contract, Side
from espalier.wire.messages import NoScalars, Scalars

MOST_CAPABILITY = 1e9
VERSION = r"^[A-Za-z0-9.+_-]*$"

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
    python: str = Field(max_length=32, pattern=VERSION)
    torch: str = Field(max_length=64, pattern=VERSION)


_REFUSED_BY = re.compile(r"site ([A-Za-z0-9._-]{1,64}): ")


def refusal(site: str, reason: str) -> str:
    """What a node says that refuses to enrol: the reason, behind the site's name if it has one; nobody knows it yet."""
    return f"site {site}: {reason}" if site else reason


def refused_by(text: str) -> tuple[str, str]:
    """The site and the reason that ``refusal`` put together; the name is a claim, and empty where none is told."""
    named = _REFUSED_BY.match(text)
    return (named[1], text[named.end() :]) if named else ("", text)


def contract(method: str) -> Contract:
    """The contract of an enrolment, the same for all methods."""
    return Contract(
        kind="enrol",
        method=method,
        down=Side(NoScalars),
        up=Side(Enrolment),
        observer="the site's name, hashes of its program and base model, its device, threads and capability, and versions",
    )

"""Messages: a header, fields and blobs. ``espalier.messages.records`` converts them for Flower.

Errors about a refused message are short and printable.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from espalier.errors import ProtocolError
from espalier.identity.names import LINEAGE, NO_LINEAGE, printable, without_control

SCHEMA_VERSION = 3

S = TypeVar("S", bound="Fields")

Kind = Literal[
    "enrol", "train", "fetch", "shares", "masked", "confirm", "unmask", "push", "local_baseline",
    "evaluate", "refused"
]  # fmt: skip


MAX_NAME = 64
"""Maximum number of characters in the name of a field."""
MAX_NAMES = 8
"""Maximum number of wrong fields or records that an error names."""

MAX_SECONDS = 1e9
"""Maximum duration in seconds that a client may report, about 30 years."""


class Fields(BaseModel):
    """Base class of the fields of a message; undeclared fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class NoFields(Fields):
    """Fields of a message that has none."""


class Failure(Fields):
    """Fields of a failed reply; they never quote data."""

    reason: str = Field(max_length=4000)
    """Error text."""
    lost: bool = False
    """True if the client lost state of earlier rounds.

    It can continue after the server pushes the decisions since then.
    """

    @field_validator("reason")
    @classmethod
    def _is_printable(cls, reason: str) -> str:
        """Refuse control characters except line ends: the server's terminal shows the reason."""
        if reason != without_control(reason):
            raise ValueError("control characters")
        return reason


class Header(Fields):
    """Header of every message."""

    schema_version: int
    """Version of the message format."""
    kind: Kind
    method: str = Field(max_length=64)
    lineage: str = Field(max_length=64, pattern=LINEAGE)
    """Name of the run."""
    server_round: int = Field(ge=0)
    """Number of the round; 0 before the first."""
    client: int = Field(ge=-1)
    """Number of the client; -1 before it has one."""
    attempt: int = Field(ge=1)
    """Number of the attempt, from 1."""
    part: int = Field(ge=0)
    """Number of the part, from 0."""
    num_parts: int = Field(ge=1)
    """Number of parts of the reply."""
    status: Literal["ok", "failed"] = "ok"


def request_header(
    method: str,
    kind: Kind,
    server_round: int,
    client: int = 0,
    part: int = 0,
    lineage: str = NO_LINEAGE,
) -> Header:
    """Return the header of the first attempt of a request."""
    return Header(
        schema_version=SCHEMA_VERSION,
        kind=kind,
        method=method,
        lineage=lineage,
        server_round=server_round,
        client=client,
        attempt=1,
        part=part,
        num_parts=1,
    )


UNREAD = request_header("", "enrol", 0, client=-1)
"""Header of the reply to a request that could not be read."""


@dataclass
class MessageBody:
    """Content of a message without Flower's envelope."""

    header: Header
    fields: dict[str, Any] = field(default_factory=dict)
    """Values of the fields by name."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Safetensors blobs by key."""
    tensors: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Decoded tensors of blobs, by key and name, if a check kept them (``contract.check``)."""


def failure(header: Header, reason: str, lost: bool = False) -> MessageBody:
    """Return a failed reply.

    Parameters
    ----------
    reason : error text. It is cut to 4000 characters, and control characters are replaced.
    lost : True if the client lost state of earlier rounds
    """
    # Unicode normalization may lengthen the text, so cut it again afterwards.
    failure = Failure(reason=without_control(reason[:4000])[:4000], lost=lost)
    return MessageBody(header.model_copy(update={"status": "failed"}), failure.model_dump())


def validate(model: type[S], values: Mapping[str, Any]) -> S:
    """Check fields against their description and return them as an instance.

    Raises
    ------
    ProtocolError
        If fields are wrong; the error names them without their values.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        names = {
            ".".join(str(part) for part in detail["loc"])
            # Names of fields only; values may be private.
            for detail in error.errors(include_url=False, include_input=False)
        }
        raise ProtocolError(
            f"{model.__name__}: missing, surplus or out of range: {named(names)}"
        ) from None


def named(names: set[str]) -> str:
    """Return the first few of the names that a sender chose, sorted and made printable."""
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(printable(name, MAX_NAME) for name in nsmallest(MAX_NAMES, names)) + rest

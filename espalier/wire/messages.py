"""Messages: a header, the scalars of the kind, and blobs; to and from Flower's records."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from espalier.settings.mistakes import Mistake
from espalier.wire.payload import from_record, to_record

SCHEMA_VERSION = 1

S = TypeVar("S", bound="Scalars")

Kind = Literal["enrol", "train", "fetch", "deliver", "evaluate"]
FLOWER_TYPES: dict[Kind, str] = {
    "enrol": "query.enrol",
    "train": "train",
    "fetch": "query.fetch",
    "deliver": "query.deliver",
    "evaluate": "evaluate",
}
"""Flower's message type of each kind."""


MOST_SECONDS = 1e9
"""A client's report of how long it worked is below 30 years."""


class Scalars(BaseModel):
    """Scalars of one kind of message in one direction; nothing else may be in it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class NoScalars(Scalars):
    """No scalars."""


class Failure(Scalars):
    """What a client says when it could not do its part; it never quotes data."""

    reason: str = Field(max_length=4000)

    @field_validator("reason")
    @classmethod
    def _is_printable(cls, reason: str) -> str:
        """A reason is shown on the server's terminal: no control characters but line ends."""
        if reason != _printable(reason):
            raise ValueError("control characters")
        return reason


class Header(Scalars):
    """What every message says of itself."""

    schema_version: int
    kind: Kind
    method: str = Field(max_length=64)
    lineage: str = Field(max_length=64, pattern=r"^[A-Za-z0-9-]+$")
    server_round: int = Field(ge=0)
    rank: int = Field(ge=-1)
    attempt: int = Field(ge=1)
    part: int = Field(ge=0)
    num_parts: int = Field(ge=1)
    status: Literal["ok", "failed"] = "ok"


UNREAD = Header(
    schema_version=SCHEMA_VERSION,
    kind="enrol",
    method="",
    lineage="unread",
    server_round=0,
    rank=-1,
    attempt=1,
    part=0,
    num_parts=1,
)
"""Header of the reply to a request that could not be read."""


@dataclass
class Letter:
    """The content of a message, apart from Flower's envelope."""

    header: Header
    scalars: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)


def write(letter: Letter) -> RecordDict:
    """Lay a letter out in Flower's records."""
    return RecordDict(
        {
            "header": ConfigRecord(letter.header.model_dump()),
            "scalars": ConfigRecord(cast(Any, letter.scalars)),
            "blobs": to_record(letter.blobs),
        }
    )


def read(content: RecordDict) -> Letter:
    """Read a letter from Flower's records.

    Raises
    ------
    Mistake
        Records are missing or surplus, the header is malformed, or its schema version is unknown here.
    """
    if set(content) != {"header", "scalars", "blobs"}:
        raise Mistake(f"message: records are {', '.join(sorted(map(str, content)))[:200]}, expected header, scalars and blobs")
    header, scalars, blobs = content["header"], content["scalars"], content["blobs"]
    if not (isinstance(header, ConfigRecord) and isinstance(scalars, ConfigRecord) and isinstance(blobs, ArrayRecord)):
        raise Mistake("message: header and scalars must be config records, blobs an array record")
    version = header.get("schema_version")
    if version != SCHEMA_VERSION:
        raise Mistake(
            f"message: schema version {str(version)[:20]} is unknown here, this program speaks version {SCHEMA_VERSION}; "
            "install the same release of espalier on server and nodes"
        )
    return Letter(validate(Header, dict(header)), dict(scalars), from_record(blobs))


def failure(header: Header, reason: str) -> Letter:
    """A reply that says why the work was not done."""
    return Letter(header.model_copy(update={"status": "failed"}), Failure(reason=_printable(reason)[:4000]).model_dump())


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in text)


def validate(model: type[S], values: Mapping[str, Any]) -> S:
    """Check scalars against their description.

    Raises
    ------
    Mistake
        Naming the fields that are wrong, without their values.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        names = sorted({".".join(str(part) for part in detail["loc"])[:64] for detail in error.errors()})
        raise Mistake(f"{model.__name__}: missing, surplus or out of range: {', '.join(names)}") from None


def address(letter: Letter, node_id: int, ttl: float) -> Message:
    """Put a letter into an envelope for a node; Flower forgets it after ``ttl`` seconds."""
    return Message(write(letter), dst_node_id=node_id, message_type=FLOWER_TYPES[letter.header.kind], ttl=ttl)


def num_bytes(content: RecordDict) -> int:
    """Bytes of all values and names of a message: text and blobs as they are, a number 8, a truth value 1."""
    return sum(len(str(name)) + _num_bytes(value) for record in content.values() for name, value in record.items())


def _num_bytes(value: Any) -> int:
    if isinstance(value, Array):
        return len(value.data)
    if isinstance(value, list):
        return sum(map(_num_bytes, value))
    if isinstance(value, str):
        return len(value.encode())
    return len(value) if isinstance(value, bytes) else 1 if isinstance(value, bool) else 8

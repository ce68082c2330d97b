"""Messages: a header, the scalars of the kind, and blobs; to and from Flower's records.

Covers: how many records, fields, values and characters a message has is bounded before anything in it is looked at, and what
is told of a message that is refused is short and can be printed.
Does not cover: what Flower itself spends on unpacking a message before it hands it out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any, Literal, TypeVar, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from espalier.settings.lineage import LINEAGE, NO_LINEAGE
from espalier.settings.mistakes import Mistake
from espalier.wire.payload import MOST_BLOBS, from_record, to_record
from espalier.wire.printable import printable, without_control

SCHEMA_VERSION = 3

S = TypeVar("S", bound="Scalars")

Kind = Literal["enrol", "train", "fetch", "deliver", "alone", "evaluate", "refused"]
FLOWER_TYPES: dict[Kind, str] = {
    "enrol": "query.enrol",
    "train": "train",
    "fetch": "query.fetch",
    "deliver": "query.deliver",
    "alone": "train.alone",
    "evaluate": "evaluate",
    "refused": "query.refused",
}
"""Flower's message type of each kind."""


MOST_FIELDS = 32
"""In a record of scalars; each of them has a name of at most 64 characters."""
MOST_NAME = 64
MOST_VALUES = 65_536
"""In a field that is a list; the longest have one value per matrix of the model."""
MOST_TEXT = 64 * MOST_BLOBS
"""Characters of a field's text, all values together; the longest is a hash for each blob."""
TOLD_NAMES = 8
"""Of wrong fields or records, as many are named."""

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
    lost: bool = False
    """It lost what earlier rounds left it, and could go on if it were brought what was decided since."""

    @field_validator("reason")
    @classmethod
    def _is_printable(cls, reason: str) -> str:
        """A reason is shown on the server's terminal: no control characters but line ends."""
        if reason != without_control(reason):
            raise ValueError("control characters")
        return reason


class Header(Scalars):
    """What every message says of itself."""

    schema_version: int
    kind: Kind
    method: str = Field(max_length=64)
    lineage: str = Field(max_length=64, pattern=LINEAGE)
    server_round: int = Field(ge=0)
    client: int = Field(ge=-1)
    attempt: int = Field(ge=1)
    part: int = Field(ge=0)
    num_parts: int = Field(ge=1)
    status: Literal["ok", "failed"] = "ok"


RECORDS = ("header", "scalars", "blobs")

UNREAD = Header(
    schema_version=SCHEMA_VERSION,
    kind="enrol",
    method="",
    lineage=NO_LINEAGE,
    server_round=0,
    client=-1,
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
        Records are missing or surplus, larger than any message needs, the header is malformed, or its schema version is
        unknown here.
    """
    if set(content) != set(RECORDS):
        raise Mistake(
            f"message: records are {_named({str(name) for name in content})}, expected header,"
            " scalars and blobs"
        )
    header = content["header"]
    scalars = content["scalars"]
    blobs = content["blobs"]
    if not (
        isinstance(header, ConfigRecord)
        and isinstance(scalars, ConfigRecord)
        and isinstance(blobs, ArrayRecord)
    ):
        raise Mistake("message: header and scalars must be config records, blobs an array record")
    _require_bounded("header", header)
    _require_bounded("scalars", scalars)
    version = header.get("schema_version")
    if version != SCHEMA_VERSION:
        raise Mistake(
            f"message: schema version {printable(str(version), 20)} is unknown here, this program"
            f" speaks version {SCHEMA_VERSION}; install the same release of espalier on server and"
            " nodes"
        )
    return Letter(validate(Header, dict(header)), dict(scalars), from_record(blobs))


def failure(header: Header, reason: str, lost: bool = False) -> Letter:
    """A reply that says why the work was not done, and whether that is because earlier rounds' state was lost."""
    told = Failure(reason=without_control(reason[:4000])[:4000], lost=lost)
    return Letter(header.model_copy(update={"status": "failed"}), told.model_dump())


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
        names = {
            ".".join(str(part) for part in detail["loc"])
            for detail in error.errors(include_url=False, include_input=False)
        }
        raise Mistake(
            f"{model.__name__}: missing, surplus or out of range: {_named(names)}"
        ) from None


def _require_bounded(name: str, record: ConfigRecord) -> None:
    """Refuse a record of more fields, values or characters than any message needs; nothing in it is quoted."""
    if len(record) > MOST_FIELDS:
        raise Mistake(
            f"message: {name} has {len(record)} fields, at most {MOST_FIELDS} are allowed"
        )
    for key, value in record.items():
        values = value if isinstance(value, list) else [value]
        if len(key) > MOST_NAME or len(values) > MOST_VALUES:
            raise Mistake(
                f"message: {name} has a name of {len(key)} characters, or {len(values)} values; too"
                " many"
            )
        if sum(len(text) for text in values if isinstance(text, str | bytes)) > MOST_TEXT:
            raise Mistake(f"message: {name} has a field of more than {MOST_TEXT} characters")


def _named(names: set[str]) -> str:
    """The first few of the names that a sender chose, in order."""
    rest = f" and {len(names) - TOLD_NAMES} more" if len(names) > TOLD_NAMES else ""
    return ", ".join(printable(name, MOST_NAME) for name in nsmallest(TOLD_NAMES, names)) + rest


def address(letter: Letter, node_id: int, ttl: float) -> Message:
    """Put a letter into an envelope for a node; Flower forgets it after ``ttl`` seconds."""
    return Message(
        write(letter), dst_node_id=node_id, message_type=FLOWER_TYPES[letter.header.kind], ttl=ttl
    )


def num_bytes(content: RecordDict) -> int:
    """Bytes of all values and names of a message: text and blobs as they are, a number 8, a truth value 1."""
    return sum(
        len(str(name)) + _num_bytes(value)
        for record in content.values()
        for name, value in record.items()
    )


def _num_bytes(value: Any) -> int:
    if isinstance(value, Array):
        return len(value.data)
    if isinstance(value, list) and value and not isinstance(value[0], str | bytes):
        return len(value) * _num_bytes(value[0])  # Flower's lists hold values of one type
    if isinstance(value, list):
        return sum(map(_num_bytes, value))
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    return len(value) if isinstance(value, bytes) else 1 if isinstance(value, bool) else 8

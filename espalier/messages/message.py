"""Messages: a header, fields and blobs, and their conversion to and from Flower's records.

Covers: the numbers of records, fields, values and characters of a message are limited before its
content is read. Errors about a refused message are short and printable.
Does not cover: the resources that Flower itself uses to unpack a message before it passes it on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any, Literal, TypeVar, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from espalier.errors import ProtocolError
from espalier.identity.lineage import LINEAGE, NO_LINEAGE
from espalier.identity.printable import printable, without_control
from espalier.messages.tensor_blobs import MAX_BLOBS, from_record, to_record

SCHEMA_VERSION = 3

S = TypeVar("S", bound="Fields")

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
"""Message type in Flower, by kind."""


MAX_FIELDS = 32
"""Maximum number of fields in a record."""
MAX_NAME = 64
"""Maximum number of characters in the name of a field."""
MAX_VALUES = 65_536
"""Maximum number of values in a list; the longest lists have one value per matrix of the model."""
MAX_TEXT = 64 * MAX_BLOBS
"""Maximum number of characters in a field, over all values; the longest has a hash per blob."""
TOLD_NAMES = 8
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


RECORDS = ("header", "fields", "blobs")

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
class MessageBody:
    """Content of a message without Flower's envelope."""

    header: Header
    fields: dict[str, Any] = field(default_factory=dict)
    """Values of the fields by name."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Safetensors blobs by key."""
    tensors: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Decoded tensors of blobs, by key and name, if a check kept them (``contract.check``)."""


def write(body: MessageBody) -> RecordDict:
    """Convert the content of a message to Flower's records."""
    return RecordDict(
        {
            "header": ConfigRecord(body.header.model_dump()),
            "fields": ConfigRecord(cast(Any, body.fields)),
            "blobs": to_record(body.blobs),
        }
    )


def read(content: RecordDict) -> MessageBody:
    """Read the content of a message from Flower's records.

    Raises
    ------
    ProtocolError
        If records are missing, surplus or too large, if the header is malformed, or if its schema
        version is unknown.
    """
    if set(content) != set(RECORDS):
        raise ProtocolError(
            f"message: records are {_named({str(name) for name in content})}, expected header,"
            " fields and blobs"
        )
    header = content["header"]
    fields = content["fields"]
    blobs = content["blobs"]
    if not (
        isinstance(header, ConfigRecord)
        and isinstance(fields, ConfigRecord)
        and isinstance(blobs, ArrayRecord)
    ):
        raise ProtocolError(
            "message: header and fields must be config records, blobs an array record"
        )
    # Limit the size of both records before any value is read.
    _require_bounded("header", header)
    _require_bounded("fields", fields)
    version = header.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ProtocolError(
            f"message: schema version {printable(str(version), 20)} is unknown here, this program"
            f" speaks version {SCHEMA_VERSION}; install the same release of espalier on server and"
            " nodes"
        )
    return MessageBody(validate(Header, dict(header)), dict(fields), from_record(blobs))


def failure(header: Header, reason: str, lost: bool = False) -> MessageBody:
    """Return a failed reply.

    Parameters
    ----------
    header
        Header of the request.
    reason
        Error text. It is cut to 4000 characters, and control characters are replaced.
    lost
        True if the client lost state of earlier rounds.
    """
    # Unicode normalization may lengthen the text, so cut it again afterwards.
    told = Failure(reason=without_control(reason[:4000])[:4000], lost=lost)
    return MessageBody(header.model_copy(update={"status": "failed"}), told.model_dump())


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
            for detail in error.errors(include_url=False, include_input=False)
        }
        raise ProtocolError(
            f"{model.__name__}: missing, surplus or out of range: {_named(names)}"
        ) from None


def _require_bounded(name: str, record: ConfigRecord) -> None:
    """Check the numbers of fields, values and characters of a record; errors quote no content."""
    if len(record) > MAX_FIELDS:
        raise ProtocolError(
            f"message: {name} has {len(record)} fields, at most {MAX_FIELDS} are allowed"
        )
    for key, value in record.items():
        values = value if isinstance(value, list) else [value]
        if len(key) > MAX_NAME or len(values) > MAX_VALUES:
            raise ProtocolError(
                f"message: {name} has a name of {len(key)} characters, or {len(values)} values; too"
                " many"
            )
        if sum(len(text) for text in values if isinstance(text, str | bytes)) > MAX_TEXT:
            raise ProtocolError(f"message: {name} has a field of more than {MAX_TEXT} characters")


def _named(names: set[str]) -> str:
    """Return the first few of the names that a sender chose, sorted and made printable."""
    rest = f" and {len(names) - TOLD_NAMES} more" if len(names) > TOLD_NAMES else ""
    return ", ".join(printable(name, MAX_NAME) for name in nsmallest(TOLD_NAMES, names)) + rest


def address(body: MessageBody, node_id: int, ttl: float) -> Message:
    """Wrap a message for a node; Flower may delete it after ``ttl`` seconds."""
    return Message(
        write(body), dst_node_id=node_id, message_type=FLOWER_TYPES[body.header.kind], ttl=ttl
    )


def num_bytes(content: RecordDict) -> int:
    """Return the size of all names and values of a message in bytes.

    Text and blobs count with their length, a number with 8 bytes and a bool with 1.
    """
    return sum(
        len(str(name)) + _num_bytes(value)
        for record in content.values()
        for name, value in record.items()
    )


def _num_bytes(value: Any) -> int:
    if isinstance(value, Array):
        return len(value.data)
    if isinstance(value, list) and value and not isinstance(value[0], str | bytes):
        # All values of a list in Flower's records have the same type.
        return len(value) * _num_bytes(value[0])
    if isinstance(value, list):
        return sum(map(_num_bytes, value))
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    return len(value) if isinstance(value, bytes) else 1 if isinstance(value, bool) else 8

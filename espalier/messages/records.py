"""Conversion of messages to Flower's records and back.

Covers: the numbers of records, fields, values and characters of a message are limited before its
content is read.
Does not cover: the resources that Flower itself uses to unpack a message before it passes it on,
up to 2 GiB per message.
"""

from collections.abc import Mapping
from typing import Any, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from espalier.errors import ProtocolError
from espalier.identity.names import printable
from espalier.messages.message import (
    MAX_NAME,
    SCHEMA_VERSION,
    Header,
    Kind,
    MessageBody,
    named,
    validate,
)
from espalier.messages.tensor_blobs import MAX_BLOBS, MAX_KEY

FLOWER_TYPES: dict[Kind, str] = {
    "enrol": "query.enrol",
    "train": "train",
    "fetch": "query.fetch",
    "shares": "query.shares",
    "masked": "query.masked",
    "confirm": "query.confirm",
    "unmask": "query.unmask",
    "push": "query.push",
    "local_baseline": "train.local_baseline",
    "evaluate": "evaluate",
    "refused": "query.refused",
}
"""Message type in Flower, by kind."""

MAX_FIELDS = 32
"""Maximum number of fields in a record."""

MAX_VALUES = 65_536
"""Maximum number of values in a list; the longest lists have one value per matrix of the model."""

MAX_TEXT = 64 * MAX_BLOBS
"""Maximum number of characters in a field, over all values; the longest has a hash per blob."""

RECORDS = ("header", "fields", "blobs")

STYPE = "safetensors"
"""Serialization type of the blobs in Flower's records."""


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

    Raises ProtocolError if records are missing, surplus or too large, if the header is malformed,
    or if its schema version is unknown.
    """
    if set(content) != set(RECORDS):
        raise ProtocolError(
            f"message: records are {named({str(name) for name in content})}, expected header,"
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


def to_record(blobs: Mapping[str, bytes]) -> ArrayRecord:
    """Put blobs into a Flower record."""
    return ArrayRecord(
        {key: Array(dtype="", shape=(), stype=STYPE, data=blob) for key, blob in blobs.items()}
    )


def from_record(record: ArrayRecord) -> dict[str, bytes]:
    """Take blobs out of a Flower record.

    Raises ProtocolError if there are too many blobs, a key is too long, or an array has another
    serialization.
    """
    if len(record) > MAX_BLOBS:
        raise ProtocolError(f"payload: {len(record)} blobs, a message has at most {MAX_BLOBS}")
    for key, array in record.items():
        if len(key) > MAX_KEY:
            raise ProtocolError(f"payload: a key of {len(key)} characters, {MAX_KEY} are allowed")
        if array.stype != STYPE or array.dtype or tuple(array.shape):
            raise ProtocolError(f"payload {str(key)!r}: serialisation is not '{STYPE}'")
    return {key: array.data for key, array in record.items()}

"""Messages: header, fields and blobs, to and from Flower's records."""

from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from pydantic import Field

from espalier.errors import EspalierError
from espalier.flower.shared_nodes import play_task
from espalier.messages.message import (
    SCHEMA_VERSION,
    Failure,
    Fields,
    Header,
    MessageBody,
    NoFields,
    failure,
    request_header,
    validate,
)
from espalier.messages.records import FLOWER_TYPES, address, num_bytes, read, write
from tests.run_names import BY_HAND

HEADER = request_header("fedprllm", "train", 1, client=3, lineage=BY_HAND).model_dump(
    exclude={"status"}
)
SECRET = "Anna K., born 1961"


class Example(Fields):
    """Fields of a message kind that exists only in these tests."""

    seconds: float = Field(ge=0)
    tokens: int = 0
    losses: list[float] = Field(default_factory=list)


def body(**changes: Any) -> MessageBody:
    return MessageBody(
        Header(**HEADER | changes), {"seconds": 1.5, "names": ["a", "b"]}, {"block-0000": b"blob"}
    )


def record(**changes: Any) -> RecordDict:
    """Return the records of a valid message with replacements; None removes a record."""
    records = dict(write(body())) | changes
    return RecordDict({key: value for key, value in records.items() if value is not None})


def test_what_is_written_is_read() -> None:
    found = read(write(body()))
    assert found.header.model_dump() == HEADER | {"status": "ok"}
    assert found.fields == {"seconds": 1.5, "names": ["a", "b"]}
    assert found.blobs == {"block-0000": b"blob"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fields": None}, "records are blobs, header"),
        ({"extra": ConfigRecord({"note": SECRET})}, "records are blobs, extra, fields, header"),
        ({"blobs": ConfigRecord({})}, "blobs an array record"),
        ({"header": MetricRecord({})}, "config records"),
        ({"fields": ArrayRecord({})}, "config records"),
    ],
)
def test_other_records_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(EspalierError, match=told) as caught:
        read(record(**changes))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, "1", None])
def test_unknown_schema_version_is_refused(version: object) -> None:
    header = {
        key: value
        for key, value in (HEADER | {"status": "ok", "schema_version": version}).items()
        if value is not None
    }
    with pytest.raises(EspalierError, match="same release"):
        read(record(header=ConfigRecord(header)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "gossip"),
        ("lineage", "../.."),
        ("lineage", "models"),
        ("lineage", "egress"),
        ("lineage", BY_HAND + "\n"),
        ("lineage", BY_HAND.upper()),
        ("lineage", ""),
        ("lineage", "x" * 65),
        ("method", "x" * 65),
        ("server_round", -1),
        ("server_round", 1.0),
        ("client", -2),
        ("attempt", 0),
        ("part", -1),
        ("num_parts", 0),
        ("status", SECRET),
        ("note", SECRET),
    ],
)
def test_malformed_header_names_the_field_alone(field: str, value: Any) -> None:
    with pytest.raises(EspalierError, match=f"Header: .*{field}") as caught:
        read(record(header=ConfigRecord(HEADER | {field: value})))
    assert SECRET not in str(caught.value)


def test_a_header_without_a_field_names_it() -> None:
    header = {key: value for key, value in HEADER.items() if key != "client"}
    with pytest.raises(EspalierError, match=r"Header: .*client"):
        read(record(header=ConfigRecord(header)))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"seconds": "1.0"},
        {"seconds": SECRET},
        {"seconds": 1.0, "tokens": 1.5},
        {"seconds": 1.0, "tokens": True},
        {"seconds": 1.0, "losses": [float("nan")]},
        {"seconds": 1.0, "losses": [SECRET]},
        {"seconds": 1.0, "surplus": SECRET},
    ],
)
def test_invalid_scalars_are_refused_unquoted(
    values: dict[str, Any],
) -> None:
    with pytest.raises(EspalierError, match="Example: missing, surplus or out of range") as caught:
        validate(Example, values)
    assert SECRET not in str(caught.value)


def test_scalars_as_described_are_taken() -> None:
    assert validate(Example, {"seconds": 1, "losses": [0.5]}).losses == [0.5]
    assert validate(NoFields, {}) == NoFields()


def test_a_reason_has_a_limit() -> None:
    assert validate(Failure, {"reason": "x" * 4000})
    with pytest.raises(EspalierError):
        validate(Failure, {"reason": "x" * 4001})


@pytest.mark.parametrize("kind", ["enrol", "train", "evaluate", "fetch"])
def test_message_has_flower_s_message_type(kind: str) -> None:
    play_task()
    message = address(body(kind=kind), 42, 60.0)
    assert message.metadata.dst_node_id == 42
    assert message.metadata.ttl == 60.0
    assert message.metadata.message_type == FLOWER_TYPES[kind]  # type: ignore[index]
    assert read(message.content).header.kind == kind


def test_bytes_on_paper() -> None:
    """Names and text count in UTF-8; a number has 8 bytes, a truth value 1, an empty list 0."""
    content = RecordDict(
        {
            "fields": ConfigRecord(
                {"n": 7, "x": 1.5, "yes": True, "ids": [1, 2], "word": "ä", "none": []}
            ),
            "blobs": write(body()).array_records["blobs"],
        }
    )
    names = len("n" + "x" + "yes" + "ids" + "word" + "none" + "block-0000")
    assert num_bytes(content) == names + 8 + 8 + 1 + 16 + 2 + len(b"blob")


def test_number_lists_are_sized_without_loop() -> None:
    class Watched(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("every number was looked at")

    content = RecordDict({"fields": ConfigRecord({"ids": [0]})})
    dict.__setitem__(content["fields"]._data, "ids", Watched(range(1000)))
    assert num_bytes(content) == len("ids") + 8000


TOO_MUCH: dict[str, dict[str, Any]] = {
    "fields": {f"field-{number}": 1 for number in range(33)},
    "a name": {"n" * 65: 1},
    "values": {"ids": list(range(65_537))},
    "text": {"note": "x" * 262_145},
    "many texts": {"notes": ["x" * 64] * 4097},
    "bytes": {"data": b"x" * 262_145},
}


@pytest.mark.parametrize("fields", TOO_MUCH.values(), ids=TOO_MUCH.keys())
@pytest.mark.parametrize("place", ["header", "fields"])
def test_oversize_record_is_refused_unvalidated(
    fields: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("was validated")

    monkeypatch.setattr("espalier.messages.message.validate", fail)
    given = HEADER | fields if place == "header" else fields
    with pytest.raises(EspalierError) as caught:
        read(record(**{place: ConfigRecord(given)}))
    assert len(str(caught.value)) < 120


def test_only_a_few_records_or_fields_are_named() -> None:
    with pytest.raises(EspalierError, match=r"and 92 more") as caught:
        read(RecordDict({f"record-{number:03d}": ConfigRecord({}) for number in range(100)}))
    assert "record-007" in str(caught.value)
    assert "record-008" not in str(caught.value)
    with pytest.raises(EspalierError, match=r"field-07 and 24 more"):
        validate(NoFields, {f"field-{number:02d}": 1 for number in range(32)})


def test_sender_s_names_are_made_printable() -> None:
    with pytest.raises(EspalierError) as caught:
        validate(NoFields, {"\x1b[2J\n\u202eall is well": 1})
    assert str(caught.value) == "NoFields: missing, surplus or out of range: ?[2J; ?all is well"


def test_failure_has_no_escape_sequences() -> None:
    told = failure(Header(**HEADER), "first\n\x1b[31msecond\u2066\x00").fields["reason"]
    assert told == "first\n?[31msecond??"
    assert validate(Failure, {"reason": told})

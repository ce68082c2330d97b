"""The byte ledger: sums and entries, compared with values computed by hand."""

import json
import struct
from pathlib import Path
from typing import Any

from espalier.messages.ledger import Ledger, timed_in
from espalier.messages.message import SCHEMA_VERSION, Header, MessageBody
from espalier.messages.records import num_bytes, write
from tests.run_names import BY_HAND

HEADER = b'{"a":{"dtype":"U64","shape":[2],"data_offsets":[0,16]}}'.ljust(56)
BLOB = struct.pack("<Q", len(HEADER)) + HEADER + bytes(16)


def body(blobs: dict[str, bytes], client: int = 2) -> MessageBody:
    header = Header(
        schema_version=SCHEMA_VERSION,
        kind="train",
        method="fedprllm",
        lineage=BY_HAND,
        server_round=1,
        client=client,
        attempt=3,
        part=1,
        num_parts=4,
    )
    return MessageBody(header, {"seconds": 1.5}, blobs)


def record(ledger: Ledger, direction: Any, client: int, sent: MessageBody) -> int:
    """Record a message and return its bytes by Flower's own count."""
    content = write(sent)
    ledger.record(direction, client, sent, content)
    return num_bytes(content)


def test_message_has_an_entry_plus_one_per_blob() -> None:
    entries: list[dict[str, Any]] = []
    size = record(Ledger(entries.append), "up", 2, body({"block-0001": BLOB, "block-0000": BLOB}))
    assert [entry["block"] for entry in entries] == [None, "block-0000", "block-0001"]
    assert [entry["raw_bytes"] for entry in entries] == [size - 2 * len(BLOB), 16, 16]
    assert sum(entry["wire_bytes"] for entry in entries) == size
    common = {
        "lineage": BY_HAND,
        "round": 1,
        "client": 2,
        "direction": "up",
        "kind": "train",
        "attempt": 3,
        "part": 1,
    }
    for entry in entries:
        assert {key: entry[key] for key in common} == common


def test_bytes_are_summed_by_client_and_direction() -> None:
    ledger = Ledger(lambda _: None)
    up = record(ledger, "up", 0, body({"block-0000": BLOB}))
    up += record(ledger, "up", 0, body({}))
    down = record(ledger, "down", 1, body({}))
    assert ledger.state() == [[0, up, 0], [1, 0, down]]
    assert (ledger.total().up, ledger.total().down) == (up, down)


def test_enrolment_counts_for_no_client() -> None:
    entries: list[dict[str, Any]] = []
    ledger = Ledger(entries.append)
    record(ledger, "up", -1, body({}, client=-1))
    assert len(entries) == 1
    assert ledger.state() == []


def test_a_resumed_run_goes_on_with_the_sums() -> None:
    ledger = Ledger(lambda _: None)
    ledger.restore([[0, 10, 20], [3, 1, 2]])
    size = record(ledger, "up", 3, body({}, client=3))
    assert ledger.state() == [[0, 10, 20], [3, 1 + size, 2]]


def test_round_time_is_noted_once_across_resumes(tmp_path: Path) -> None:
    """Other entries, a torn line and invalid entries in the ledger's file do no harm."""
    entries: list[dict[str, Any]] = []
    ledger = Ledger(entries.append)
    for client, seconds in ((0, 1.5), (1, 2.5), (0, 1.5)):
        ledger.record_round("by-hand", 1, client, seconds)
    resumed = Ledger(entries.append)
    file = tmp_path / "ledger.jsonl"
    lines = [json.dumps(entry) for entry in [*entries, {"kind": "train", "round": 2, "client": 0}]]
    spoilt = [
        lines[0][:-9],
        '{"kind": "round"}',
        '[{"kind": "round"}]',
        '{"kind": "round", "round": [1], "client": 2}',
    ]
    file.write_bytes("\n".join([*lines, *spoilt, "[]", ""]).encode() + b"\xff\n")
    resumed.restore([], timed_in(file))
    assert list(timed_in(tmp_path / "none.jsonl")) == []
    for number, client in ((1, 0), (1, 2), (2, 0)):
        resumed.record_round("by-hand", number, client, 3.5)
    assert [(entry["round"], entry["client"], entry["virtual_seconds"]) for entry in entries] == [
        (1, 0, 1.5),
        (1, 1, 2.5),
        (1, 2, 3.5),
        (2, 0, 3.5),
    ]


def test_a_hostile_blob_does_not_end_the_run() -> None:
    header = b'{"a":{"dtype":"U64","shape":[1],"data_offsets":[]}}'
    record(
        Ledger(lambda _: None),
        "up",
        2,
        body({"block-0000": struct.pack("<Q", len(header)) + header + bytes(8)}),
    )


def test_a_hostile_scalar_does_not_end_the_run() -> None:
    sent = body({})
    sent.fields["blob_sha256"] = []
    content = write(sent)
    Ledger(lambda _: None).record("up", 2, sent, content)


def test_refused_reply_is_one_entry() -> None:
    entries: list[dict[str, Any]] = []
    ledger = Ledger(entries.append)
    sent = body({"block-0001": BLOB, "block-0000": b"nonsense"})
    content = write(sent)
    ledger.record_refused(2, sent.header.model_copy(update={"attempt": 1}), content)
    (entry,) = entries
    assert (entry["block"], entry["raw_bytes"], entry["wire_bytes"]) == (
        None,
        None,
        num_bytes(content),
    )
    assert (entry["attempt"], entry["direction"], entry["refused"]) == (1, "up", True)
    assert ledger.state() == [[2, num_bytes(content), 0]]

"""Valid messages of every method and kind for a small model, as the basis of mutations.

They are requests, and replies that their contracts allow.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random
from typing import Annotated, Any, Literal, get_args, get_origin

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from benchmarks.fuzz.headers import changed_blob
from benchmarks.fuzz.mutations import scalar, word
from espalier.errors import EspalierError
from espalier.messages.contract import Contract, check, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.enrolment import Enrolment, SignedEnrolment
from espalier.messages.evaluation import Losses
from espalier.messages.ledger import Ledger
from espalier.messages.message import Header, Kind, MessageBody, validate
from espalier.messages.records import STYPE, num_bytes, read, write
from espalier.messages.signed_name import is_signed, statement
from espalier.messages.sums import secure_sum
from espalier.messages.tensor_blobs import TensorSpec
from espalier.methods.examples import (
    HASH,
    KINDS,
    PART_BYTES,
    asked,
    is_sent,
    plan_of,
    request,
    rounds,
    settings_for,
)
from espalier.models.plan import ModelPlan
from espalier.settings.registry import METHODS
from espalier.settings.run import RunSettings, parse
from espalier.storage.blobs import sha256

SETTINGS = {
    "evaluation.texts": "public=public.txt",
    "evaluation.sequence-length": 4,
    "part-bytes": PART_BYTES,
}
SITE_KEY = ec.derive_private_key(1, ec.SECP384R1()).public_key()
HALF = struct.pack("<Q", 0x5555555555555555)
"""Word of a mask that prunes every second weight."""
ONE = struct.pack("<Q", 1)
"""Word of a number in fixed point, or a count."""
TOLD: dict[type, tuple[Any, ...]] = {
    int: (8, 0, 1),
    float: (0.5, 0.0),
    bool: (False, True),
    str: ("a", HASH),
}
"""Values of a reply's fields by type; the first one that the contract allows is used."""
Records = dict[str, Any]
"""Records of a message by name."""


@dataclass(frozen=True)
class Exchange:
    """Request and a reply that fits it."""

    settings: RunSettings
    request: MessageBody
    reply: MessageBody

    def plan(self) -> ModelPlan:
        """Return the plan of the model that the letters refer to."""
        return plan_of(self.settings.method)


def exchanges() -> list[Exchange]:
    """Return one exchange per method, kind and form."""
    return [
        _exchange(run, kind, server_round, fields)
        for method in METHODS
        for kind in KINDS
        if is_sent(method, kind)
        for more in ([{}, {"site-keys": ""}] if kind == "enrol" else [{}])
        for run in [parse({**settings_for(method, kind), **SETTINGS, **more})]
        for server_round in rounds(method, kind)
        for fields in asked(run, kind, server_round)
    ]


def _exchange(
    run: RunSettings, kind: Kind, server_round: int, fields: Mapping[str, Any]
) -> Exchange:
    asking = request(run, kind, server_round, fields)
    plan = partial(plan_of, run.method)
    down = contract_for(asking, plan, run).down
    asking.blobs = {key: _blob(specs) for key, specs in down.blobs.items()}
    # This contract may depend on the request's blobs, so they are set first.
    up = contract_for(asking, plan, run).up
    blobs = {key: _blob(specs) for key, specs in up.blobs.items()}
    if kind == "fetch":
        asking.fields["blob_sha256"] = [sha256(blob) for blob in blobs.values()]
    contract = contract_for(asking, plan, run)
    check(asking, contract.down)
    header = asking.header.model_copy(update={"num_parts": contract.num_parts})
    return Exchange(run, asking, _reply(run, asking, contract, header, blobs))


def _reply(
    run: RunSettings,
    asking: MessageBody,
    contract: Contract,
    header: Header,
    blobs: dict[str, bytes],
) -> MessageBody:
    """Return the first reply that the contract allows."""
    mistakes = []
    for told in _told(run, asking, contract, blobs):
        reply = MessageBody(header, told, blobs)
        try:
            check_reply(reply, asking, contract)
        except EspalierError as error:
            mistakes.append(str(error))
        else:
            return reply
    raise ValueError(f"{run.method} {header.kind}: no reply was found: {mistakes[-1]}")


def _told(
    run: RunSettings, asking: MessageBody, contract: Contract, blobs: Mapping[str, bytes]
) -> Iterator[dict[str, Any]]:
    kind = asking.header.kind
    fields = contract.up.fields.model_fields
    if kind == "enrol":
        who = {
            "site": "a",
            "code_sha256": HASH,
            "model_sha256": HASH,
            "device": "cpu",
            "threads": 1,
            "capability": 1.0,
        }
        described = {"measured": False, "approval": False, "python": "3.11.7", "torch": "2.7.0"}
        known = Enrolment.model_validate(who | described).model_dump()
        yield known | ({"signature": "0" * 192} if "signature" in fields else {})
    elif kind == "evaluate":
        yield Losses(
            losses=[1.5], own_losses=[1.0, 2.0, 1.5], test_scores=[], seconds=0.5
        ).model_dump()
    elif kind in secure_sum.KINDS:
        yield secure_sum.sized_fields(asking)
    else:
        known = (
            {"blob_sha256": _hashes(run, asking, contract, blobs)}
            if "blob_sha256" in fields
            else {}
        )
        free = {
            name: _values(field.annotation) for name, field in fields.items() if name not in known
        }
        for values in product(*free.values()):
            yield known | dict(zip(free, values, strict=True))


def _values(kind: Any) -> Sequence[Any]:
    """Return possible values of a field by its type."""
    if get_origin(kind) is Annotated:
        return _values(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return get_args(kind)
    return [[_values(get_args(kind)[0])[1]], []] if get_origin(kind) is list else TOLD[kind]


def _hashes(
    run: RunSettings, asking: MessageBody, contract: Contract, blobs: Mapping[str, bytes]
) -> list[str]:
    """Return the hashes of the blobs of all parts of a reply, in order."""
    hashes = [sha256(blob) for blob in blobs.values()]
    server_round = asking.header.server_round
    for part in range(1, contract.num_parts):
        fetch = request(run, "fetch", server_round, asked(run, "fetch", server_round)[0], part)
        fetch.blobs = asking.blobs
        specs = contract_for(fetch, partial(plan_of, run.method), run).up.blobs
        hashes += [sha256(_blob(of_blob)) for of_blob in specs.values()]
    return hashes


def _blob(specs: Mapping[str, TensorSpec]) -> bytes:
    """Return a blob with masks that prune every second weight, small integers, and zeros."""
    header = {}
    data = b""
    for name, spec in sorted(
        specs.items(), key=lambda item: (-item[1].num_bytes // max(1, _numel(item[1])), item[0])
    ):
        # Packed masks are flat; numbers in fixed point have a row of low and one of high words.
        word = HALF if len(spec.shape) == 1 and spec.shape != (1,) else ONE
        part = word * (spec.num_bytes // 8) if spec.dtype == "U64" else bytes(spec.num_bytes)
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [len(data), len(data) + len(part)],
        }
        data += part
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def _numel(spec: TensorSpec) -> int:
    total = 1
    for size in spec.shape:
        total *= size
    return total


def changed_records(random: Random, body: MessageBody) -> RecordDict:
    """Return the records of a message with some values, names or types changed."""
    content: Records = dict(write(body))
    for _ in range(random.choice((0, 1, 1, 2, 4))):
        random.choice(_CHANGES)(random, content)
    return RecordDict(content)


def _change_field(random: Random, content: Records) -> None:
    record = content.get(random.choice(("header", "fields")))
    if not isinstance(record, ConfigRecord):
        return
    name = random.choice([*record, _name(random)])
    if random.random() < 0.2:
        record.pop(name, None)
    elif name in record and isinstance(record[name], int | float) and random.random() < 0.5:
        record[name] = type(record[name])(random.choice((0, 1, 2, 3, 10**9, -1)))
    else:
        record[name] = scalar(random)


def _many_fields(random: Random, content: Records) -> None:
    content["fields"] = ConfigRecord(
        {f"{_name(random)}{number}": 1 for number in range(random.choice((5, 40, 400)))}
    )


def _change_blob(random: Random, content: Records) -> None:
    record = content.get("blobs")
    if not isinstance(record, ArrayRecord):
        return
    key = random.choice([*record, _name(random)])
    data = record[key].data if key in record else b""
    if random.random() < 0.2:
        record.pop(key, None)
        return
    stype = STYPE if random.random() < 0.95 else word(random)[:100].replace("\ud800", "")
    record[key] = Array(dtype="", shape=(), stype=stype, data=changed_blob(random, data))


def _many_blobs(random: Random, content: Records) -> None:
    if random.random() < 0.02:
        content["blobs"] = ArrayRecord(
            {f"block-{n:04d}": Array("", (), STYPE, b"") for n in range(random.choice((10, 5000)))}
        )


def _change_records(random: Random, content: Records) -> None:
    name = random.choice(("header", "fields", "blobs", _name(random)))
    if random.random() < 0.3:
        content.pop(name, None)
    else:
        content[name] = random.choice((ConfigRecord({}), MetricRecord({"a": 1.0}), ArrayRecord({})))


def _name(random: Random) -> str:
    return word(random)[:200] or "x"


_CHANGES = (
    _change_field,
    _change_field,
    _change_field,
    _change_blob,
    _change_blob,
    _many_fields,
    _many_blobs,
    _change_records,
)


def _as_a_line(entry: dict[str, Any]) -> None:
    json.dumps(entry, allow_nan=False)


def letters(random: Random, known: list[Exchange]) -> Iterator[None]:
    """Receive a changed request as a client does, or a changed reply as the server does."""
    exchange = random.choice(known)
    ledger = Ledger(_as_a_line)
    if random.random() < 0.3:
        content = changed_records(random, exchange.request)
        yield
        body = read(content)
        check(body, contract_for(body, exchange.plan, exchange.settings).down)
        return
    content = changed_records(random, exchange.reply)
    yield
    num_bytes(content)
    ledger.record_refused(0, exchange.request.header, content)
    body = read(content)
    check_reply(
        body, exchange.request, contract_for(exchange.request, exchange.plan, exchange.settings)
    )
    if "nonce" in exchange.request.fields and body.header.status == "ok":
        _require_unsigned(body, exchange.request)
    ledger.record("up", 0, body, content)


def _require_unsigned(body: MessageBody, asking: MessageBody) -> None:
    """Check that a changed signature is not accepted."""
    signed = validate(SignedEnrolment, body.fields)
    text = statement(signed.unsigned(), asking.fields["nonce"], asking.header.lineage, 1)
    if is_signed(SITE_KEY, text, signed.signature):
        raise ValueError("a signature was found by chance")

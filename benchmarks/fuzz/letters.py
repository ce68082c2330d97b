"""Good messages of every method and kind for a small model, to be changed: requests, and replies that their contracts allow."""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from benchmarks.fuzz.headers import changed_blob
from benchmarks.fuzz.mutations import scalar, word
from espalier.settings.run import METHODS, RunSettings, parse
from espalier.storage.blobs import sha256
from espalier.wire.contract import check, check_reply
from espalier.wire.contracts import contract_for
from espalier.wire.enrolment import Enrolment
from espalier.wire.evaluation import Losses, Texts
from espalier.wire.ledger import Ledger
from espalier.wire.messages import SCHEMA_VERSION, Header, Kind, Letter, NoScalars, num_bytes, read, write
from espalier.wire.payload import STYPE, TensorSpec
from espalier.wire.plan import BlockPlan, LinearPlan, ModelPlan

SHAPES = {
    "attn.q": (64, 64), "attn.k": (64, 64), "attn.v": (64, 64), "attn.o": (64, 64),
    "mlp.gate": (256, 64), "mlp.up": (256, 64), "mlp.down": (64, 256),
}  # fmt: skip
LINEARS = tuple(LinearPlan(name, name, shape, "BF16") for name, shape in SHAPES.items())
BLOCKS = tuple(BlockPlan(index, LINEARS) for index in range(3))
PLAN = ModelPlan(BLOCKS[:2], 0)
BROUGHT = ModelPlan(BLOCKS, 0)
"""The model of clients that are brought one: an emulator of one block, and an adapter of two."""
SETTINGS = {
    "evaluation.own-text": True, "evaluation.texts": "public=public.txt", "evaluation.window-tokens": 4,
    "lora.targets": "attn.q", "part-bytes": 1024, "llm-pruner.spare-first": 0, "llm-pruner.spare-last": 0,
    "fedsoda.adapter-layers": 2,
}  # fmt: skip
KINDS: tuple[Kind, ...] = ("enrol", "train", "fetch", "deliver", "evaluate")
HALF = struct.pack("<Q", 0x5555555555555555)
"""A word of a mask that prunes every second weight."""
HASH = "0" * 64
DELIVERED: dict[str, dict[str, Any]] = {
    "model": {"names": ["config.json"], "sizes": [8], "file_sha256": [HASH], "piece_bytes": 8, "piece_sha256": [HASH]},
    "piece": {"model_sha256": HASH, "index": 0, "size": 8},
    "emulator": {"blocks": [0], "aligned": 1},
}
"""What FedSODA's clients are brought beside the adapter's LoRA, by the word that says so."""
Records = dict[str, Any]
"""A message's records by name."""


@dataclass(frozen=True)
class Exchange:
    """A request and a reply that fits it."""

    settings: RunSettings
    request: Letter
    reply: Letter

    def plan(self) -> ModelPlan:
        """The model that the letters are about."""
        return plan_of(self.settings)


def plan_of(settings: RunSettings) -> ModelPlan:
    """The model of a run's letters."""
    return PLAN if settings.job.NEEDS_BASE_MODEL else BROUGHT


def exchanges() -> list[Exchange]:
    """One per method, kind and form."""
    alone = {method: parse({"method": method, **SETTINGS}).job.makes_alone for method in METHODS}
    return [
        _exchange(method, kind, server_round, what)
        for method in METHODS
        for kind in KINDS
        if kind != "alone" or alone[method]
        for server_round, what in _forms(method, kind)
    ]


def _exchange(method: str, kind: Kind, server_round: int, what: str) -> Exchange:
    settings = parse({"method": method, **SETTINGS})
    plan = partial(plan_of, settings)
    header = Header(
        schema_version=SCHEMA_VERSION,
        kind=kind,
        method=method,
        lineage="run-1",
        server_round=server_round,
        client=0,
        attempt=1,
        part=1 if kind == "fetch" else 0,
        num_parts=1,
    )
    request = Letter(header, _asked(method, kind, server_round, what))
    up = contract_for(request, plan, settings).up
    blobs = {key: _blob(specs) for key, specs in up.specs(NoScalars()).items()}
    if kind == "fetch":
        request.scalars["blob_sha256"] = [sha256(blob) for blob in blobs.values()]
    contract = contract_for(request, plan, settings)
    request.blobs = {key: _blob(specs) for key, specs in contract.down.specs(NoScalars()).items()}
    contract = contract_for(request, plan, settings)  # which may depend on the blobs that came
    told = {"pieces": [0]} if what == "model" else _told(method, kind, server_round, blobs)
    reply = Letter(header.model_copy(update={"num_parts": contract.num_parts}), told, blobs)
    check(request, contract.down)
    check_reply(reply, request, contract)
    return Exchange(settings, request, reply)


def _forms(method: str, kind: Kind) -> Sequence[tuple[int, str]]:
    """The round of each form that such a message has, and what is brought where that is not the method's result."""
    rounds = _rounds(method, kind)
    if (method, kind) != ("fedsoda", "deliver"):
        return [(server_round, "") for server_round in rounds]
    return [*((rounds[0], what) for what in DELIVERED), (rounds[0] + 1, "")]


def _rounds(method: str, kind: Kind) -> Sequence[int]:
    """Rounds in which there is such a message, one of each form."""
    settings = parse({"method": method, **SETTINGS})
    rounds = settings.job.ROUNDS_THAT_DIFFER
    last = settings.job.last_rounds(settings.federation, lambda: len(PLAN.blocks), settings.num_clients)[0]
    delivery = settings.job.FIRST_DELIVERY if len(rounds) == 1 else last + 1
    single = {"enrol": 0, "alone": last, "evaluate": last, "deliver": delivery, "fetch": rounds[-1]}
    return [single[kind]] if kind in single else rounds


def _asked(method: str, kind: Kind, server_round: int, what: str) -> dict[str, Any]:
    if what:
        return {"what": what, **DELIVERED[what]}
    if kind == "evaluate":
        texts = Texts(names=["public"], num_windows=[2], window_tokens=4, own_text=True)
        return texts.model_dump()
    if kind == "enrol" or (method == "fedprllm" and kind == "train"):
        return {}
    if method in ("flap", "llm-pruner", "slicegpt"):
        return {"blob_sha256": [HASH]} if kind == "fetch" else {}
    if method == "llm-streamline":
        start = {} if (kind, server_round) == ("train", 1) else {"start": 0}
        return start | ({"blob_sha256": [HASH]} if kind == "fetch" else {})
    if method == "fedprllm":
        return {"blob_sha256": [HASH]} if kind == "fetch" else {"num_voters": [3], "decided": len(PLAN.blocks)}
    if method == "fedspallm":
        layers: dict[str, Any] = {"blocks": [0, 1]}
        versions = {"versions": [0, 0] if kind == "train" else [1, 1]}
        of_kind: dict[Kind, dict[str, Any]] = {
            "train": layers | versions,
            "fetch": layers | {"blob_sha256": [HASH]},
            "deliver": layers | versions | {"num_kept": [linear.num_weights // 2 for linear in LINEARS] * 2},
        }
        return of_kind[kind]
    if (method, kind) == ("fedspine", "deliver"):
        return {"pruned": 0.1}
    named = {"model_sha256": HASH, "aligned": 1} if (method, kind) == ("fedsoda", "train") else {}
    more = {"rank": 8, "blob_sha256": [HASH]} if kind == "fetch" else named
    return {"rank_limit": 4 if kind == "alone" else 8} | more


def _told(method: str, kind: Kind, server_round: int, blobs: Mapping[str, bytes]) -> dict[str, Any]:
    if kind == "enrol":
        who = {"site": "a", "code_sha256": HASH, "model_sha256": HASH, "device": "cpu", "threads": 1, "capability": 1.0}
        return Enrolment(**who, measured=False, python="3.11.7", torch="2.7.0").model_dump()  # type: ignore[arg-type]
    if kind == "evaluate":
        told = Losses(losses=[1.5], own_losses=[1.0, 2.0, 1.5], seconds=0.5)
        return told.model_dump()
    if kind == "alone":
        return {"seconds": 0.5}
    if kind != "train":
        return {}
    number = {"sft-p": 3, "slicegpt": 5}.get(method, 2)  # blobs beside those of the blocks, or one for each norm
    hashes = {"seconds": 0.5, "blob_sha256": [sha256(blob) for blob in blobs.values()] * number}
    if method == "llm-streamline":
        of_all = len(LINEARS) if server_round > 1 else 1
        hashes["blob_sha256"] = [sha256(blob) for blob in blobs.values()] * of_all
        return hashes | ({"samples": 8, "skipped_steps": 0} if server_round > 1 else {"tokens": 64})
    more: dict[str, dict[str, Any]] = {
        "fedprllm": {},
        "flap": {"tokens": 64},
        "llm-pruner": {},
        "slicegpt": {"samples": 8},
        "fedspallm": {"calibration_windows": 0, "damping": 0.01},
    }
    tuned = {"samples": 0 if method in ("hetlora", "sft-p", "fedspine") else 8, "skipped_steps": 0, "rank": 8}
    measured = {"loss_before": 2.5, "loss_after": 2.25, "taylor": 0.5} if method == "fedspine" else {}
    return hashes | more.get(method, tuned | measured)


def _blob(specs: Mapping[str, TensorSpec]) -> bytes:
    """Masks that prune every second weight, and zeros."""
    header, data = {}, b""
    for name, spec in sorted(specs.items(), key=lambda item: (-item[1].num_bytes // max(1, _numel(item[1])), item[0])):
        part = HALF * (spec.num_bytes // 8) if spec.dtype == "U64" else bytes(spec.num_bytes)
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def _numel(spec: TensorSpec) -> int:
    total = 1
    for size in spec.shape:
        total *= size
    return total


def changed_records(random: Random, letter: Letter) -> RecordDict:
    """The records of a message, some of their values, names or kinds changed."""
    content: Records = dict(write(letter))
    for _ in range(random.choice((0, 1, 1, 2, 4))):
        random.choice(_CHANGES)(random, content)
    return RecordDict(content)


def _change_field(random: Random, content: Records) -> None:
    record = content.get(random.choice(("header", "scalars")))
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
    content["scalars"] = ConfigRecord({f"{_name(random)}{number}": 1 for number in range(random.choice((5, 40, 400)))})


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
        content["blobs"] = ArrayRecord({f"block-{n:04d}": Array("", (), STYPE, b"") for n in range(random.choice((10, 5000)))})


def _change_records(random: Random, content: Records) -> None:
    name = random.choice(("header", "scalars", "blobs", _name(random)))
    if random.random() < 0.3:
        content.pop(name, None)
    else:
        content[name] = random.choice((ConfigRecord({}), MetricRecord({"a": 1.0}), ArrayRecord({})))


def _name(random: Random) -> str:
    return word(random)[:200] or "x"


_CHANGES = (_change_field, _change_field, _change_field, _change_blob, _change_blob, _many_fields, _many_blobs, _change_records)


def _as_a_line(entry: dict[str, Any]) -> None:
    json.dumps(entry, allow_nan=False)


def letters(random: Random, known: list[Exchange]) -> Iterator[None]:
    """Receive a changed request as a client does, or a changed reply as the server does."""
    exchange, ledger = random.choice(known), Ledger(_as_a_line)
    if random.random() < 0.3:
        content = changed_records(random, exchange.request)
        yield
        letter = read(content)
        check(letter, contract_for(letter, exchange.plan, exchange.settings).down)
        return
    content = changed_records(random, exchange.reply)
    yield
    num_bytes(content)
    ledger.record_refused(0, exchange.request.header, content)
    letter = read(content)
    check_reply(letter, exchange.request, contract_for(exchange.request, exchange.plan, exchange.settings))
    ledger.record("up", 0, letter, content)

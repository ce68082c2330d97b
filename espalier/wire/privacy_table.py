"""What leaves a client, as a Markdown table made from the contracts themselves.

python -m espalier.wire.privacy_table
"""

from dataclasses import replace
from typing import Any, get_args

from espalier.settings.fedpetuning import Payload
from espalier.settings.run import METHODS, parse
from espalier.wire.alone import makes_alone
from espalier.wire.contract import FAILED, Contract, Side
from espalier.wire.contracts import contract_for
from espalier.wire.evaluation import Texts
from espalier.wire.messages import SCHEMA_VERSION, Header, Kind, Letter
from espalier.wire.plan import BlockPlan, LinearPlan, ModelPlan

EXAMPLE = ModelPlan(tuple(BlockPlan(i, (LinearPlan("attn.q", f"{i}", (1024, 64), "BF16"),)) for i in range(2)), 0)
"""A model whose masks need two parts, so that ``fetch`` has a contract too."""
SHA256 = "0" * 64
LAYERS = {"blocks": [0, 1]}
RANK = {"rank_limit": 8}
SCALARS: dict[tuple[str, Kind], dict[str, Any]] = {
    ("fedpetuning", "train"): RANK,
    ("fedpetuning", "fetch"): {**RANK, "rank": 8, "blob_sha256": [SHA256]},
    ("fedpetuning", "deliver"): RANK,
    ("fedprllm", "deliver"): {"num_voters": [1], "decided": 2},
    ("fedspallm", "train"): {**LAYERS, "versions": [0, 0]},
    ("fedspallm", "fetch"): {**LAYERS, "blob_sha256": [SHA256]},
    ("fedspallm", "deliver"): {**LAYERS, "versions": [1, 1], "num_kept": [1, 1]},
    ("hetlora", "train"): RANK,
    ("hetlora", "fetch"): {**RANK, "rank": 8, "blob_sha256": [SHA256]},
    ("hetlora", "deliver"): RANK,
}
"""Scalars of requests on which a contract depends, for the example model."""
SETTINGS = {"evaluation.own-text": True, "lora.targets": "attn.q"}
ONE_BLOCK = 8192
"""Bytes of a part that holds a block's mask of the example model; a second part is asked for by ``fetch``."""
CLASSIFIER = replace(EXAMPLE, head_features=2), {"task.name": "sst2", "data.source": "jsonl", "data.path": "example"}
"""The same model as an encoder, whose classification head travels too."""
BLOCK_AND_HEAD: dict[Payload, int] = {"float32": 40_000, "bfloat16": 20_000, "nf4": 6_000}
"""Bytes of a part that holds the adapters of one block, or those of the last block and the head."""
KINDS: tuple[Kind, ...] = ("enrol", "train", "fetch", "deliver", "alone", "evaluate")
MAKES_ALONE: dict[str, dict[str, Any]] = {"fedprllm": {"fedprllm.strategy": "iterative"}, "fedspallm": {}}
"""Settings with which clients of a method that prunes are sent an ``alone``; FedSpaLLM's never are."""
FAILURE = (
    "why the client could not do its part; it may name a setting with its value, a limit or a path of the site, never what was "
    "found or counted in its data"
)


def privacy_table() -> str:
    """One row per method and kind of message: what the reply holds, and what somebody who reads it learns."""
    lines = ["| method | message | leaves the client | what an observer learns |", "|---|---|---|---|"]
    for method in METHODS:
        alone = makes_alone(parse({"method": method, **MAKES_ALONE.get(method, {})}))
        kinds = [kind for kind in KINDS if kind != "alone" or alone]
        lines += [_row([_contract(method, kind, *variant) for variant in _variants(method)]) for kind in kinds]
    lines.append(f"| all | any, failed | {_fields([FAILED])} | {FAILURE} |")
    return "\n".join(lines)


def _variants(method: str) -> list[tuple[ModelPlan, dict[str, Any]]]:
    """Models and settings on which the tensors of a method's messages depend."""
    if "lora" not in METHODS[method]:
        return [(EXAMPLE, {})]
    (encoder, classes), payloads = CLASSIFIER, [{f"{method}.payload": payload} for payload in get_args(Payload)]
    return [*((EXAMPLE, payload) for payload in payloads), *((encoder, {**classes, **payload}) for payload in payloads)]


def _contract(method: str, kind: Kind, plan: ModelPlan, settings: dict[str, Any]) -> Contract:
    part = 1 if kind == "fetch" else 0
    size = BLOCK_AND_HEAD[settings[f"{method}.payload"]] if plan.head_features else ONE_BLOCK
    cut = {"part-bytes": size} if kind == "fetch" else {}
    common = {
        "schema_version": SCHEMA_VERSION,
        "lineage": "example",
        "server_round": _round(method, kind),
        "client": 0,
        "attempt": 1,
        "num_parts": 1,
    }
    header = Header.model_validate({**common, "kind": kind, "method": method, "part": part})
    public = [] if "task.name" in settings else ["documentation"]
    texts = Texts(names=public, num_windows=[1] * len(public), window_tokens=256, own_text=True)
    request = Letter(header, texts.model_dump() if kind == "evaluate" else SCALARS.get((method, kind), {}))
    more = MAKES_ALONE.get(method, {}) if kind == "alone" else {}
    return contract_for(request, plan, parse({"method": method, **SETTINGS, **settings, **cut, **more}))


def _round(method: str, kind: Kind) -> int:
    """A round in which there is such a message."""
    tunes = "lora" in METHODS[method]
    if kind in ("alone", "evaluate") and tunes:
        last: int = parse({"method": method}).job.rounds
        return last
    return {"enrol": 0, "alone": len(EXAMPLE.blocks), "deliver": 2 if tunes else 1}.get(kind, 1)


def _row(contracts: list[Contract]) -> str:
    first = contracts[0]
    return f"| `{first.method}` | {first.kind} | {_fields([contract.up for contract in contracts])} | {first.observer} |"


def _fields(sides: list[Side]) -> str:
    dtypes: dict[str, set[str]] = {}
    for name, spec in (pair for side in sides for specs in side.blobs.values() for pair in specs.items()):
        what = "an encoder's classification head" if name.startswith("head.") else f"{name.removeprefix('attn.q.')} per matrix"
        dtypes.setdefault(what, set()).add(spec.dtype)
    tensors = [
        f"{what} ({' or '.join(sorted(dtypes[what]))})" for what in sorted(dtypes, key=lambda what: (" per " not in what, what))
    ]
    return "; ".join([*tensors, *(f"`{name}`" for name in sides[0].scalars.model_fields)])


if __name__ == "__main__":
    print(privacy_table())

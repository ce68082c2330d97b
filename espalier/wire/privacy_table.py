"""What leaves a client, as a Markdown table made from the contracts themselves.

python -m espalier.wire.privacy_table
"""

from typing import Any

from espalier.settings.run import parse
from espalier.wire.contract import FAILED, Contract, Side
from espalier.wire.contracts import METHODS, contract_for
from espalier.wire.evaluation import Texts
from espalier.wire.messages import SCHEMA_VERSION, Header, Kind, Letter
from espalier.wire.plan import BlockPlan, LinearPlan, ModelPlan

EXAMPLE = ModelPlan(tuple(BlockPlan(i, (LinearPlan("attn.q", f"{i}", (1024, 64), "BF16"),)) for i in range(2)), 0)
"""A model whose masks need two parts, so that ``fetch`` has a contract too."""
SHA256 = "0" * 64
LAYERS = {"blocks": [0, 1]}
SCALARS: dict[tuple[str, Kind], dict[str, Any]] = {
    ("fedspallm", "train"): {**LAYERS, "versions": [0, 0]},
    ("fedspallm", "fetch"): {**LAYERS, "blob_sha256": [SHA256]},
    ("fedspallm", "deliver"): {**LAYERS, "versions": [1, 1], "num_kept": [1, 1]},
}
"""Scalars of requests on which a contract depends, for the example model."""
KINDS: tuple[Kind, ...] = ("enrol", "train", "fetch", "deliver", "evaluate")
FAILURE = "why the client could not do its part; it may name a setting, a file path of the site or a number, never data"


def privacy_table() -> str:
    """One row per method and kind of message: what the reply holds, and what somebody who reads it learns."""
    lines = ["| method | message | leaves the client | what an observer learns |", "|---|---|---|---|"]
    for method in METHODS:
        lines += [_row(_contract(method, kind)) for kind in KINDS]
    lines.append(f"| all | any, failed | {_fields(FAILED)} | {FAILURE} |")
    return "\n".join(lines)


def _contract(method: str, kind: Kind) -> Contract:
    part = 1 if kind == "fetch" else 0
    common = {
        "schema_version": SCHEMA_VERSION,
        "lineage": "example",
        "server_round": 1,
        "rank": 0,
        "attempt": 1,
        "num_parts": 1,
    }
    header = Header.model_validate({**common, "kind": kind, "method": method, "part": part})
    texts = Texts(names=["text"], num_windows=[1], window_tokens=2, own_text=True)
    request = Letter(header, texts.model_dump() if kind == "evaluate" else SCALARS.get((method, kind), {}))
    return contract_for(request, EXAMPLE, parse({"method": method, "part-bytes": 8192, "evaluation.own-text": True}))


def _row(contract: Contract) -> str:
    return f"| `{contract.method}` | {contract.kind} | {_fields(contract.up)} | {contract.observer} |"


def _fields(side: Side) -> str:
    tensors = sorted({f"{name.split('.')[-1]} ({spec.dtype})" for specs in side.blobs.values() for name, spec in specs.items()})
    per_matrix = [f"{tensor} per matrix" for tensor in tensors]
    return "; ".join([*per_matrix, *(f"`{name}`" for name in side.scalars.model_fields)])


if __name__ == "__main__":
    print(privacy_table())

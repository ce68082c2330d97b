"""Markdown table of the data that leaves a client, generated from the contracts.

Run ``python -m espalier.methods.privacy_table`` to print it.
"""

from dataclasses import replace
from typing import Any, get_args

from espalier.messages.blobs.cut_bits import CUT_BITS
from espalier.messages.contract import FAILED, Contract, Side
from espalier.messages.contracts import contract_for
from espalier.messages.message import Kind
from espalier.messages.sums.secure_sum import KINDS as SECURE_KINDS
from espalier.methods.examples import (
    KINDS,
    PART_BYTES,
    PLAN,
    SHAPES,
    asked,
    methods_of,
    plan_of,
    request,
    rounds,
    settings_for,
)
from espalier.models.mask_generator import PREFIX
from espalier.models.plan import ModelPlan
from espalier.settings.registry import METHODS, settings_of
from espalier.settings.run import parse
from espalier.settings.tables.federation import WireDtype

CLASSIFIER = (
    replace(PLAN, head_features=2),
    {"task.name": "sst2", "data.source": "files", "data.path": "example"},
)
"""Plan and settings of an encoder with the same blocks; its classification head is sent too."""
BLOCK_AND_HEAD: dict[WireDtype, int] = {"float32": 5_000, "bfloat16": 2_500, "nf4": 1_100}
"""Part size in bytes that holds the adapters of one block, or of the last block and the head."""
HEAD = "an encoder's classification head"
MASKS = "a generator of masks"
UNITS = "a bit per group and channel"
FAILURE = (
    "Why the client could not do its part. The text may name a setting with its value, a limit or a"
    " path of the site, but never what was found or counted in its data."
)


def privacy_table() -> str:
    """Return the table: content of each kind of reply, and what a person who reads it learns.

    Methods with the same content share a row.
    """
    methods_by_row: dict[tuple[str, str, str], list[str]] = {}
    for kind in KINDS:
        for method in methods_of(kind):
            for server_round, row_name in _rounds(method, kind):
                contracts = [
                    _contract(method, kind, server_round, *variant)
                    for variant in _variants(method, kind)
                ]
                row = (
                    row_name,
                    _fields([contract.up for contract in contracts]),
                    contracts[0].observer,
                )
                methods_by_row.setdefault(row, []).append(method)
            if kind == "train" and METHODS[method].summands:
                methods_by_row.setdefault(_secure_train(method), []).append(method)
    lines = [
        "| message | methods | leaves the client | what an observer learns |",
        "|---|---|---|---|",
    ]
    for (row_name, fields, observer), methods in methods_by_row.items():
        names = ", ".join(f"`{method}`" for method in methods)
        method_text = "all" if len(methods) == len(METHODS) else names
        lines.append(f"| {row_name} | {method_text} | {fields or 'nothing'} | {observer} |")
    lines.append(f"| any, failed | all | {_fields([FAILED])} | {FAILURE} |")
    return "\n".join(lines)


def _secure_train(method: str) -> tuple[str, str, str]:
    """Return the row of a ``train`` whose tensors are summed secretly."""
    kind: Kind = "train"
    settings = settings_for(method, "masked")
    contract = _contract(method, kind, rounds(method, kind)[0], plan_of(method), settings)
    return "train with `secure-sum`", _fields([contract.up]), contract.observer


def _variants(method: str, kind: Kind) -> list[tuple[ModelPlan, dict[str, Any]]]:
    """Return the plans and settings that change the tensors of a method's messages."""
    plan = plan_of(method)
    # Summands do not depend on the wire dtype.
    if "wire-dtype" not in settings_of(method).FEDERATION or kind in SECURE_KINDS:
        return [(plan, {})]
    wire_dtypes = [{"federation.wire-dtype": wire_dtype} for wire_dtype in get_args(WireDtype)]
    if not (METHODS[method].tunes and settings_of(method).NEEDS_BASE_MODEL):
        return [(plan, wire_dtype) for wire_dtype in wire_dtypes]
    encoder, classes = CLASSIFIER
    return [
        *((plan, wire_dtype) for wire_dtype in wire_dtypes),
        *((encoder, {**classes, **wire_dtype}) for wire_dtype in wire_dtypes),
    ]


def _rounds(method: str, kind: Kind) -> list[tuple[int, str]]:
    """Return the rounds whose messages of a kind have a row, with the text of the first column."""
    round_numbers = rounds(method, kind)
    if kind not in ("train", "fetch") or len(round_numbers) == 1:
        return [(round_numbers[0], kind)]
    names = [f"{kind} of round {first}" for first in round_numbers]
    return list(zip(round_numbers, [*names[:-1], f"{names[-1]} and later"], strict=True))


def _contract(
    method: str, kind: Kind, server_round: int, plan: ModelPlan, settings: dict[str, Any]
) -> Contract:
    """Return the contract of the first form of a request."""
    size = BLOCK_AND_HEAD[settings["federation.wire-dtype"]] if plan.head_features else PART_BYTES
    # Only a reply in several parts has a ``fetch``.
    cut = {"part-bytes": size} if kind == "fetch" else {}
    run = parse({**settings_for(method, kind), **settings, **cut})
    body = request(run, kind, server_round, asked(run, kind, server_round)[0])
    return contract_for(body, lambda: plan, run)


def _fields(sides: list[Side]) -> str:
    """Return the text on tensors, grouped by dtype, and on fields."""
    dtypes: dict[str, set[str]] = {}
    for name, spec in (
        pair for side in sides for specs in side.blobs.values() for pair in specs.items()
    ):
        dtypes.setdefault(_shown(name), set()).add(spec.dtype)
    names_by_dtype: dict[tuple[bool, str], list[str]] = {}
    for name in sorted(dtypes):
        names_by_dtype.setdefault(
            (name in (HEAD, MASKS, UNITS), " or ".join(sorted(dtypes[name]))), []
        ).append(name)
    tensors = [
        f"{', '.join(names)}{'' if not_per_matrix else ' per matrix'} ({dtype})"
        for (not_per_matrix, dtype), names in sorted(names_by_dtype.items())
    ]
    return "; ".join([*tensors, *(f"`{name}`" for name in sides[0].fields.model_fields)])


def _shown(name: str) -> str:
    """Return the name of a tensor without its matrix, or the description of its kind."""
    if name == CUT_BITS:
        return UNITS
    if name.startswith("head."):
        return HEAD
    if name.startswith(PREFIX):
        return MASKS
    matrix = next((matrix for matrix in SHAPES if name.startswith(f"{matrix}.")), None)
    return name.removeprefix(f"{matrix}.") if matrix else name


if __name__ == "__main__":
    print(privacy_table())

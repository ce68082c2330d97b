"""What leaves a client, as a Markdown table made from the contracts themselves.

python -m espalier.wire.privacy_table
"""

from dataclasses import replace
from typing import Any, get_args

from espalier.settings.federation import Payload
from espalier.settings.methods import METHODS, settings_of
from espalier.settings.run import parse
from espalier.wire.contract import FAILED, Contract, Side
from espalier.wire.contracts import contract_for
from espalier.wire.cut_units import CUT
from espalier.wire.examples import (
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
from espalier.wire.mask_generator import PREFIX
from espalier.wire.messages import Kind, NoScalars
from espalier.wire.plan import ModelPlan

CLASSIFIER = (
    replace(PLAN, head_features=2),
    {
        "task.name": "sst2",
        "data.source": "jsonl",
        "data.path": "example",
    },
)
"""The same model as an encoder, whose classification head travels too."""
BLOCK_AND_HEAD: dict[Payload, int] = {"float32": 5_000, "bfloat16": 2_500, "nf4": 1_100}
"""Bytes of a part that holds the adapters of one block, or those of the last block and the head."""
HEAD = "an encoder's classification head"
MASKS = "a generator of masks"
UNITS = "a bit per group and channel"
FAILURE = (
    "why the client could not do its part; it may name a setting with its value, a limit or a path"
    " of the site, never what was found or counted in its data"
)


def privacy_table() -> str:
    """What each kind of reply holds, and what somebody who reads it learns; methods of which that is the same share a row."""
    methods_by_row: dict[tuple[str, str, str], list[str]] = {}
    for kind in KINDS:
        for method in methods_of(kind):
            for server_round, shown in _rounds(method, kind):
                contracts = [
                    _contract(method, kind, server_round, *variant) for variant in _variants(method)
                ]
                row = (
                    shown,
                    _fields([contract.up for contract in contracts]),
                    contracts[0].observer,
                )
                methods_by_row.setdefault(row, []).append(method)
    lines = [
        "| message | methods | leaves the client | what an observer learns |",
        "|---|---|---|---|",
    ]
    for (shown, fields, observer), methods in methods_by_row.items():
        lines.append(f"| {shown} | {_named(methods)} | {fields or 'nothing'} | {observer} |")
    lines.append(f"| any, failed | all | {_fields([FAILED])} | {FAILURE} |")
    return "\n".join(lines)


def _named(methods: list[str]) -> str:
    return "all" if len(methods) == len(METHODS) else ", ".join(f"`{method}`" for method in methods)


def _variants(method: str) -> list[tuple[ModelPlan, dict[str, Any]]]:
    """Models and settings on which the tensors of a method's messages depend."""
    plan = plan_of(method)
    if "payload" not in settings_of(method).FEDERATION:
        return [(plan, {})]
    payloads = [{"federation.payload": payload} for payload in get_args(Payload)]
    if not (METHODS[method].tunes and settings_of(method).NEEDS_BASE_MODEL):
        return [(plan, payload) for payload in payloads]
    encoder, classes = CLASSIFIER
    return [
        *((plan, payload) for payload in payloads),
        *((encoder, {**classes, **payload}) for payload in payloads),
    ]


def _rounds(method: str, kind: Kind) -> list[tuple[int, str]]:
    """Rounds whose messages of a kind are shown, and how they are called."""
    places = rounds(method, kind)
    if kind not in ("train", "fetch") or len(places) == 1:
        return [(places[0], kind)]
    names = [f"{kind} of round {first}" for first in places]
    return list(zip(places, [*names[:-1], f"{names[-1]} and later"], strict=True))


def _contract(
    method: str, kind: Kind, server_round: int, plan: ModelPlan, settings: dict[str, Any]
) -> Contract:
    """Of the first form."""
    size = BLOCK_AND_HEAD[settings["federation.payload"]] if plan.head_features else PART_BYTES
    cut = {"part-bytes": size} if kind == "fetch" else {}
    run = parse({**settings_for(method, kind), **settings, **cut})
    letter = request(run, kind, server_round, asked(run, kind, server_round)[0])
    return contract_for(letter, lambda: plan, run)


def _fields(sides: list[Side]) -> str:
    """Tensors with their dtypes, those of one dtype together, and the scalars."""
    dtypes: dict[str, set[str]] = {}
    for name, spec in (
        pair
        for side in sides
        for specs in side.specs(NoScalars()).values()
        for pair in specs.items()
    ):
        dtypes.setdefault(_shown(name), set()).add(spec.dtype)
    together: dict[tuple[bool, str], list[str]] = {}
    for name in sorted(dtypes):
        together.setdefault(
            (name in (HEAD, MASKS, UNITS), " or ".join(sorted(dtypes[name]))), []
        ).append(name)
    tensors = [
        f"{', '.join(names)}{'' if of_head else ' per matrix'} ({dtype})"
        for (of_head, dtype), names in sorted(together.items())
    ]
    return "; ".join([*tensors, *(f"`{name}`" for name in sides[0].scalars.model_fields)])


def _shown(name: str) -> str:
    """A tensor's name without that of its matrix, or what it is a part of."""
    if name == CUT:
        return UNITS
    return (
        HEAD
        if name.startswith("head.")
        else MASKS
        if name.startswith(PREFIX)
        else _of_a_matrix(name)
    )


def _of_a_matrix(name: str) -> str:
    """A tensor's name without that of its matrix."""
    matrix = next((matrix for matrix in SHAPES if name.startswith(f"{matrix}.")), None)
    return name.removeprefix(f"{matrix}.") if matrix else name


if __name__ == "__main__":
    print(privacy_table())

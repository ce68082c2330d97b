"""What leaves a client, as a Markdown table made from the contracts themselves.

python -m espalier.wire.privacy_table
"""

from dataclasses import replace
from typing import Any, get_args

from espalier.settings.federation import Payload
from espalier.settings.methods import METHODS, settings_of
from espalier.settings.run import parse
from espalier.wire.contract import FAILED, Contract, Side
from espalier.wire.contracts import contract_for, of_method
from espalier.wire.cut_units import CUT
from espalier.wire.evaluation import Texts
from espalier.wire.mask_generator import PREFIX
from espalier.wire.messages import SCHEMA_VERSION, Header, Kind, Letter, NoScalars
from espalier.wire.plan import BlockPlan, LinearPlan, ModelPlan

SHAPES = {
    "attn.q": (1024, 64), "attn.k": (1024, 64), "attn.v": (1024, 64), "attn.o": (64, 1024),
    "mlp.gate": (128, 64), "mlp.up": (128, 64), "mlp.down": (64, 128),
}  # fmt: skip
BLOCKS = tuple(
    BlockPlan(index, tuple(LinearPlan(name, name, shape, "BF16") for name, shape in SHAPES.items())) for index in range(3)
)
EXAMPLE = ModelPlan(BLOCKS[:2], 0)
"""A model whose replies need two parts, so that ``fetch`` has a contract too."""
BROUGHT = ModelPlan(BLOCKS, 0)
"""The same where clients have no base model and are brought one, a decoder: the first block is the emulator."""
SETTINGS = {
    "evaluation.own-text": True, "lora.targets": "attn.q", "llm-pruner.spare-first": 0, "llm-pruner.spare-last": 0,
    "fedsoda.adapter-layers": 2,
}  # fmt: skip
ONE_BLOCK = 8192
"""Bytes of a part that holds one block of the example model; a second part is asked for by ``fetch``."""
CLASSIFIER = replace(EXAMPLE, head_features=2), {"task.name": "sst2", "data.source": "jsonl", "data.path": "example"}
"""The same model as an encoder, whose classification head travels too."""
BLOCK_AND_HEAD: dict[Payload, int] = {"float32": 40_000, "bfloat16": 20_000, "nf4": 6_000}
"""Bytes of a part that holds the adapters of one block, or those of the last block and the head."""
KINDS: tuple[Kind, ...] = ("enrol", "train", "fetch", "deliver", "alone", "evaluate")
HEAD = "an encoder's classification head"
MASKS = "a generator of masks"
UNITS = "a bit per group and channel"
FAILURE = (
    "why the client could not do its part; it may name a setting with its value, a limit or a path of the site, never what was "
    "found or counted in its data"
)


def privacy_table() -> str:
    """What each kind of reply holds, and what somebody who reads it learns; methods of which that is the same share a row."""
    methods_by_row: dict[tuple[str, str, str], list[str]] = {}
    for kind in KINDS:
        for method in (method for method in METHODS if _sends(method, kind)):
            for server_round, shown in _rounds(method, kind):
                contracts = [_contract(method, kind, server_round, *variant) for variant in _variants(method)]
                row = (shown, _fields([contract.up for contract in contracts]), contracts[0].observer)
                methods_by_row.setdefault(row, []).append(method)
    lines = ["| message | methods | leaves the client | what an observer learns |", "|---|---|---|---|"]
    for (shown, fields, observer), methods in methods_by_row.items():
        lines.append(f"| {shown} | {_named(methods)} | {fields or 'nothing'} | {observer} |")
    lines.append(f"| any, failed | all | {_fields([FAILED])} | {FAILURE} |")
    return "\n".join(lines)


def _named(methods: list[str]) -> str:
    return "all" if len(methods) == len(METHODS) else ", ".join(f"`{method}`" for method in methods)


def _sends(method: str, kind: Kind) -> bool:
    """Whether a run of the method has messages of this kind."""
    return kind != "alone" or parse({"method": method, **_with_alone(method)}).job.makes_alone


def _with_alone(method: str) -> dict[str, str | int]:
    """Settings with which clients of a method are sent an ``alone``."""
    return {f"{method}.{key}": value for key, value in settings_of(method).MAKES_ALONE_WITH.items()}


def _variants(method: str) -> list[tuple[ModelPlan, dict[str, Any]]]:
    """Models and settings on which the tensors of a method's messages depend."""
    if "payload" not in settings_of(method).FEDERATION:
        return [(EXAMPLE, {})]
    payloads = [{"federation.payload": payload} for payload in get_args(Payload)]
    if not settings_of(method).NEEDS_BASE_MODEL:
        return [(BROUGHT, payload) for payload in payloads]
    if not METHODS[method].tunes:
        return [(EXAMPLE, payload) for payload in payloads]
    encoder, classes = CLASSIFIER
    return [*((EXAMPLE, payload) for payload in payloads), *((encoder, {**classes, **payload}) for payload in payloads)]


def _rounds(method: str, kind: Kind) -> list[tuple[int, str]]:
    """Rounds whose messages of a kind are of different forms, and how they are called."""
    job = settings_of(method)
    rounds = job.ROUNDS_THAT_DIFFER
    if kind == "train" and len(rounds) > 1:
        names = [f"train of round {first}" for first in rounds]
        return list(zip(rounds, [*names[:-1], f"{names[-1]} and later"], strict=True))
    run = parse({"method": method, **SETTINGS, **(_with_alone(method) if kind == "alone" else {})})
    last = run.job.last_rounds(run.federation, lambda: len(EXAMPLE.blocks), run.num_clients)[0]
    result = max(last + 1, job.FIRST_DELIVERY) if len(rounds) > 1 else job.FIRST_DELIVERY
    place = {"enrol": 0, "alone": last, "evaluate": last, "deliver": result}.get(kind, rounds[-1])
    return [(place, kind)]


def _contract(method: str, kind: Kind, server_round: int, plan: ModelPlan, settings: dict[str, Any]) -> Contract:
    size = BLOCK_AND_HEAD[settings["federation.payload"]] if plan.head_features else ONE_BLOCK
    cut = {"part-bytes": size} if kind == "fetch" else {}
    more = _with_alone(method) if kind == "alone" else {}
    run = parse({"method": method, **SETTINGS, **settings, **cut, **more})
    header = Header(
        schema_version=SCHEMA_VERSION,
        kind=kind,
        method=method,
        lineage="example",
        server_round=server_round,
        client=0,
        attempt=1,
        part=1 if kind == "fetch" else 0,
        num_parts=1,
    )
    public = [] if "task.name" in settings else ["documentation"]
    texts = Texts(names=public, num_windows=[1] * len(public), window_tokens=256, own_text=True)
    examples = of_method(method).EXAMPLES
    scalars = texts.model_dump() if kind == "evaluate" else examples.get((kind, server_round), examples.get(kind, {}))
    return contract_for(Letter(header, scalars), lambda: plan, run)


def _fields(sides: list[Side]) -> str:
    """Tensors with their dtypes, those of one dtype together, and the scalars."""
    dtypes: dict[str, set[str]] = {}
    for name, spec in (pair for side in sides for specs in side.specs(NoScalars()).values() for pair in specs.items()):
        dtypes.setdefault(_shown(name), set()).add(spec.dtype)
    together: dict[tuple[bool, str], list[str]] = {}
    for name in sorted(dtypes):
        together.setdefault((name in (HEAD, MASKS, UNITS), " or ".join(sorted(dtypes[name]))), []).append(name)
    tensors = [
        f"{', '.join(names)}{'' if of_head else ' per matrix'} ({dtype})"
        for (of_head, dtype), names in sorted(together.items())
    ]
    return "; ".join([*tensors, *(f"`{name}`" for name in sides[0].scalars.model_fields)])


def _shown(name: str) -> str:
    """A tensor's name without that of its matrix, or what it is a part of."""
    if name == CUT:
        return UNITS
    return HEAD if name.startswith("head.") else MASKS if name.startswith(PREFIX) else _of_a_matrix(name)


def _of_a_matrix(name: str) -> str:
    """A tensor's name without that of its matrix."""
    matrix = next((matrix for matrix in SHAPES if name.startswith(f"{matrix}.")), None)
    return name.removeprefix(f"{matrix}.") if matrix else name


if __name__ == "__main__":
    print(privacy_table())

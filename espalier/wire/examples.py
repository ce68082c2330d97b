"""Requests of every method, kind and form to a small model: the privacy table shows their contracts, and they are fuzzed.

What forms a method's requests have follows from its row, its settings and the ``EXAMPLES`` of its contracts: scalars by kind,
or by kind and round where those of a round differ, as a list where there are several forms. What all methods' requests have
in common needs no example: the hashes that a ``fetch`` asks for, an ``enrol``, the texts of ``evaluate``.
"""

from collections.abc import Mapping
from typing import Any, get_args

from espalier.settings.lineage import NO_LINEAGE
from espalier.settings.methods import METHODS, settings_of
from espalier.settings.run import RunSettings, parse
from espalier.settings.task import TEXT
from espalier.wire.contracts import contract_for, of_method
from espalier.wire.evaluation import Texts
from espalier.wire.messages import SCHEMA_VERSION, Header, Kind, Letter
from espalier.wire.plan import BlockPlan, LinearPlan, ModelPlan

KINDS: tuple[Kind, ...] = get_args(Kind)
SHAPES = {
    "attn.q": (64, 64), "attn.k": (64, 64), "attn.v": (64, 64), "attn.o": (64, 64),
    "mlp.gate": (256, 64), "mlp.up": (256, 64), "mlp.down": (64, 256),
}  # fmt: skip
LINEARS = tuple(LinearPlan(name, name, shape, "BF16") for name, shape in SHAPES.items())
BLOCKS = tuple(BlockPlan(index, LINEARS) for index in range(3))
PLAN = ModelPlan(BLOCKS[:2], 0)
"""A decoder of two blocks."""
BROUGHT = ModelPlan(BLOCKS, 0)
"""The model of clients that have no base model and are brought one: an emulator of one block, and an adapter of two."""
SETTINGS = {
    "evaluation.own-text": True, "lora.targets": "attn.q", "llm-pruner.spare-first": 0, "llm-pruner.spare-last": 0,
    "fedsoda.adapter-layers": 2, "site-keys": "sites", "llm-pruner.element": "squared", "llm-pruner.rearrange": "all",
    "llm-pruner.rescale": "all",
}  # fmt: skip
"""With which all methods have all kinds of messages of such a model."""
PART_BYTES = 1024
"""Of parts that hold one blob each, so that a reply of several needs a ``fetch``."""
HASH = "0" * 64


def plan_of(method: str) -> ModelPlan:
    """The model that a method's letters are about."""
    return PLAN if settings_of(method).NEEDS_BASE_MODEL else BROUGHT


def settings_for(method: str, kind: Kind) -> dict[str, Any]:
    """Settings of a run that has such a message."""
    return {"method": method, **SETTINGS, **(_with_alone(method) if kind == "alone" else {})}


def _with_alone(method: str) -> dict[str, str | int]:
    """Settings with which clients of a method are sent an ``alone``."""
    given = settings_of(method).MAKES_ALONE_WITH.items()
    return {
        f"{method}.{key}": value[0] if isinstance(value, tuple) else value for key, value in given
    }


def is_sent(method: str, kind: Kind) -> bool:
    """Whether a run of the method has messages of this kind; ``fetch`` has one whose replies are more than one blob."""
    if kind == "fetch":
        return bool(rounds(method, kind))
    return kind != "alone" or parse(settings_for(method, kind)).job.makes_alone


def _comes_in_parts(method: str, server_round: int) -> bool:
    """Whether replies to the ``train`` of a round are more than one blob."""
    run = parse({**settings_for(method, "train"), "part-bytes": PART_BYTES})
    train = request(run, "train", server_round, asked(run, "train", server_round)[0])
    return contract_for(train, lambda: plan_of(method), run).num_parts > 1


def rounds(method: str, kind: Kind) -> list[int]:
    """Rounds whose messages of a kind are of different forms; those that an example alone has stand last."""
    run = parse(settings_for(method, kind))
    job = settings_of(method)
    differ = list(job.ROUNDS_THAT_DIFFER)
    if kind == "fetch":
        return [place for place in differ if _comes_in_parts(method, place)]
    last = run.job.last_rounds(run.federation, lambda: len(PLAN.blocks), run.num_clients)[0]
    result = max(last + 1, job.FIRST_DELIVERY) if len(differ) > 1 else job.FIRST_DELIVERY
    single: dict[Kind, int] = {
        "enrol": 0,
        "refused": 0,
        "alone": last,
        "evaluate": last,
        "deliver": result,
    }
    usual = [single[kind]] if kind in single else differ
    examples = (key for key in of_method(method).EXAMPLES if not isinstance(key, str))
    return usual + sorted(
        place for of_kind, place in examples if of_kind == kind and place not in usual
    )


def asked(run: RunSettings, kind: Kind, server_round: int) -> list[dict[str, Any]]:
    """Scalars of the requests of a kind in a round, one for each form."""
    if kind == "enrol":
        return [{"nonce": HASH} if run.site_keys else {}]
    if kind == "refused":
        return [{"reason": "has another base model"}]
    if kind == "evaluate":
        names = list(run.evaluation.named_texts()) if run.task.name == TEXT else []
        own_text = run.evaluation.own_text
        window_tokens = run.evaluation.window_tokens
        texts = Texts(
            names=names,
            num_windows=[2] * len(names),
            window_tokens=window_tokens,
            own_text=own_text,
        )
        return [texts.model_dump()]
    examples = of_method(run.method).EXAMPLES
    found = examples.get((kind, server_round), examples.get(kind, {}))
    hashes = {"blob_sha256": [HASH]} if kind == "fetch" else {}
    return [{**scalars, **hashes} for scalars in ([found] if isinstance(found, Mapping) else found)]


def request(
    run: RunSettings,
    kind: Kind,
    server_round: int,
    scalars: Mapping[str, Any],
    part: int | None = None,
) -> Letter:
    """A request without blobs; of a ``fetch`` that of the second part, unless another is named."""
    header = Header(
        schema_version=SCHEMA_VERSION,
        kind=kind,
        method=run.method,
        lineage=NO_LINEAGE,
        server_round=server_round,
        client=0,
        attempt=1,
        part=part if part is not None else int(kind == "fetch"),
        num_parts=1,
    )
    return Letter(header, dict(scalars))


def methods_of(kind: Kind) -> list[str]:
    """The methods whose runs have messages of a kind."""
    return [method for method in METHODS if is_sent(method, kind)]

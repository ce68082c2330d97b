"""Example requests of every method, kind and form, for a small model.

The privacy table shows their contracts, and the fuzzers send variants of them. The forms of a
method's requests follow from its row in the table of methods, its settings, and, if requests have
fields, ``EXAMPLES`` of its contracts. ``EXAMPLES`` has fields by kind, or by kind and round if they
differ between rounds, and a list if there are several forms. Requests that are equal for all
methods need no example: the hashes of a ``fetch``, an ``enrol``, the texts of an ``evaluate``.
"""

from collections.abc import Mapping
from typing import Any, get_args

from espalier.messages.contracts import contract_for, of_method
from espalier.messages.evaluation import Texts
from espalier.messages.message import Fields, Kind, MessageBody, request_header
from espalier.messages.sums.secure_sum import KINDS as SECURE_KINDS
from espalier.messages.sums.secure_sum import ConfirmOrder, MaskOrder, ShareOrder, UnmaskOrder
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.secure_sum.keys import SEALED_BYTES
from espalier.settings.registry import METHODS, settings_of
from espalier.settings.run import RunSettings, parse
from espalier.settings.tables.task import TEXT

KINDS: tuple[Kind, ...] = get_args(Kind)
SHAPES = {
    "attn.q": (64, 64), "attn.k": (64, 64), "attn.v": (64, 64), "attn.o": (64, 64),
    "mlp.gate": (256, 64), "mlp.up": (256, 64), "mlp.down": (64, 256),
}  # fmt: skip
LINEARS = tuple(LinearPlan(name, name, shape, "BF16") for name, shape in SHAPES.items())
BLOCKS = tuple(BlockPlan(index, LINEARS) for index in range(3))
PLAN = ModelPlan(BLOCKS[:2], 0)
"""Plan of a decoder with two blocks."""
BROUGHT = ModelPlan(BLOCKS, 0)
"""Plan of the pushed model if clients have no base model.

The emulator has one block and the adapter two.
"""
SETTINGS = {
    "evaluation.own-text": True, "lora.targets": "attn.q", "llm-pruner.spare-first": 0,
    "llm-pruner.spare-last": 0, "fedsoda.adapter-layers": 2, "site-keys": "sites",
    "llm-pruner.element": "squared", "llm-pruner.rearrange": "all", "llm-pruner.rescale": "all",
}  # fmt: skip
"""Settings with which every method has all kinds of messages for such a model."""
PART_BYTES = 1024
"""Part size in bytes at which each part holds one blob.

A reply with several blobs then needs a ``fetch``.
"""
HASH = "0" * 64
SECURE_ORDERS: dict[Kind, Fields] = {
    "shares": ShareOrder(
        session="0" * 32,
        threshold=3,
        clients=[0, 1, 2],
        sites=["a", "b", "c"],
        mask_keys=["0" * 64, "1" * 64, "2" * 64],
        share_keys=["3" * 64, "4" * 64, "5" * 64],
        signatures=["", "", ""],
    ),
    "masked": MaskOrder(
        session="0" * 32,
        members=[0, 1, 2],
        sources=[1, 2],
        shares=["0" * 2 * SEALED_BYTES] * 2,
        seed_sha256=[HASH] * 2,
        key_sha256=[HASH] * 2,
    ),
    "confirm": ConfirmOrder(session="0" * 32, included=[0, 1]),
    "unmask": UnmaskOrder(
        session="0" * 32,
        included=[0, 1],
        seeds_of=[0, 1],
        keys_of=[2],
        confirmed=[1],
        tags=[HASH],
    ),
}
"""Requests of a secure sum of three clients; the third drops out before it sends summands."""


def plan_of(method: str) -> ModelPlan:
    """Return the plan of the model that a method's requests refer to."""
    return PLAN if settings_of(method).NEEDS_BASE_MODEL else BROUGHT


def settings_for(method: str, kind: Kind) -> dict[str, Any]:
    """Return the settings of a run that has messages of this kind."""
    settings: dict[str, Any] = {"method": method, **SETTINGS}
    if kind in SECURE_KINDS:
        job = settings_of(method)
        settings |= {**job.SUMMED_WITH, "federation.secure-sum": True}
        # The messages with most content: those with each client's weight as a summand.
        if "client-weights" in job.FEDERATION:
            settings["federation.client-weights"] = job.WEIGHTS[0]
    if kind == "local_baseline":
        for key, value in settings_of(method).MAKES_LOCAL_BASELINE_WITH.items():
            settings[key] = value[0] if isinstance(value, tuple) else value
    return settings


def is_sent(method: str, kind: Kind) -> bool:
    """Return True if runs of the method have messages of this kind.

    A method has a ``fetch`` if a reply has more than one blob.
    """
    if kind == "fetch":
        return bool(rounds(method, kind))
    if kind in SECURE_KINDS:
        return bool(METHODS[method].summands)
    return kind != "local_baseline" or parse(settings_for(method, kind)).job.has_local_baseline


def _comes_in_parts(method: str, server_round: int) -> bool:
    """Return True if the reply to the ``train`` of a round has more than one blob."""
    run = parse({**settings_for(method, "train"), "part-bytes": PART_BYTES})
    train = request(run, "train", server_round, asked(run, "train", server_round)[0])
    return contract_for(train, lambda: plan_of(method), run).num_parts > 1


def rounds(method: str, kind: Kind) -> list[int]:
    """Return the rounds whose messages of this kind differ in form.

    Rounds that only an example names come last.
    """
    run = parse(settings_for(method, kind))
    job = settings_of(method)
    differing_rounds = list(job.ROUNDS_THAT_DIFFER)
    if kind == "fetch":
        return [
            server_round
            for server_round in differing_rounds
            if _comes_in_parts(method, server_round)
        ]
    last = run.job.last_rounds(run.federation, lambda: len(PLAN.blocks), run.num_clients)[0]
    result = max(last + 1, job.FIRST_PUSH) if len(differing_rounds) > 1 else job.FIRST_PUSH
    fixed_rounds: dict[Kind, int] = {
        "enrol": 0,
        "refused": 0,
        "local_baseline": last,
        "evaluate": last,
        "push": result,
        "shares": 1,
        "masked": 1,
        "confirm": 1,
        "unmask": 1,
    }
    usual_rounds = [fixed_rounds[kind]] if kind in fixed_rounds else differing_rounds
    # Keys with a round are tuples; the others hold for every round.
    examples = (key for key in _examples(method) if not isinstance(key, str))
    return usual_rounds + sorted(
        server_round
        for example_kind, server_round in examples
        if example_kind == kind and server_round not in usual_rounds
    )


def _examples(method: str) -> Mapping[Any, Any]:
    examples: Mapping[Any, Any] = getattr(of_method(method), "EXAMPLES", {})
    return examples


def asked(run: RunSettings, kind: Kind, server_round: int) -> list[dict[str, Any]]:
    """Return the fields of the requests of a kind in a round, one dictionary per form."""
    if kind == "enrol":
        return [{"nonce": HASH} if run.site_keys else {}]
    if kind == "refused":
        return [{"reason": "has another base model"}]
    if kind in SECURE_KINDS:
        return [SECURE_ORDERS[kind].model_dump()]
    if kind == "evaluate":
        names = list(run.evaluation.named_texts()) if run.task.name == TEXT else []
        return [Texts.of_run(run, names, 2).model_dump()]
    examples = _examples(run.method)
    example = examples.get((kind, server_round), examples.get(kind, {}))
    hashes = {"blob_sha256": [HASH]} if kind == "fetch" else {}
    return [
        {**fields, **hashes} for fields in ([example] if isinstance(example, Mapping) else example)
    ]


def request(
    run: RunSettings,
    kind: Kind,
    server_round: int,
    fields: Mapping[str, Any],
    part: int | None = None,
) -> MessageBody:
    """Return a request without blobs.

    Parameters
    ----------
    part : part of the reply. If None, it is 1 for a ``fetch`` and 0 for other kinds.
    """
    part_number = int(kind == "fetch") if part is None else part
    header = request_header(run.method, kind, server_round, part=part_number)
    return MessageBody(header, dict(fields))


def methods_of(kind: Kind) -> list[str]:
    """Return the methods whose runs have messages of this kind."""
    return [method for method in METHODS if is_sent(method, kind)]

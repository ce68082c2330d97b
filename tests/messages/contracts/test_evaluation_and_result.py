"""Contracts of evaluation, of enrolment, and of the federated result on its way to a client."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from espalier.errors import EspalierError
from espalier.messages.contract import check, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.message import MessageBody
from espalier.methods.pruning.fedprllm import decided_parts, decided_specs
from espalier.settings.run import parse
from tests.messages.contracts.fedprllm_messages import (
    PLAN,
    SECRET,
    SETTINGS,
    SHA,
    blob,
    header,
    refused,
    words,
)

TEXTS = {
    "evaluation.texts": "wiki=wiki.txt,c4=c4.txt",
    "evaluation.sequence-length": 4,
    "evaluation.max-samples": 2,
}
EVALUATING = parse(TEXTS)
OWN_TEXT = parse({"evaluation.own-text": True})


# ----- evaluation and enrolment -------------------------------------------------------------------

PUBLIC = {"names": ["wiki", "c4"], "num_samples": [2, 1], "sequence_length": 4, "own_text": False}


def evaluation(samples: Mapping[str, NDArray] | None = None, **fields: Any) -> MessageBody:
    tensors = samples or {"c4": np.zeros((1, 4), np.int32), "wiki": np.zeros((2, 4), np.int32)}
    return MessageBody(header(kind="evaluate"), PUBLIC | fields, {"public-samples": blob(tensors)})


def test_public_windows_pass_as_announced() -> None:
    request = evaluation()
    check(request, contract_for(request, lambda: PLAN, EVALUATING).down)
    with pytest.raises(EspalierError, match="must be I32"):
        check(
            evaluation({"c4": np.zeros((1, 4), np.int32), "wiki": np.zeros((3, 4), np.int32)}),
            _down(request),
        )
    with pytest.raises(EspalierError, match="2 different names, 1 numbers"):
        contract_for(evaluation(num_samples=[2]), lambda: PLAN, EVALUATING)


def _down(request: MessageBody) -> Any:
    return contract_for(request, lambda: PLAN, EVALUATING).down


@pytest.mark.parametrize(
    "changes", [{"num_samples": [2, -1]}, {"num_samples": [2, 0]}, {"names": ["wiki", "wiki"]}]
)
def test_texts_without_windows_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(EspalierError):
        contract_for(evaluation(**changes), lambda: PLAN, EVALUATING)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": ["wiki", "secret"]}, "evaluation.texts names no such text"),
        ({"num_samples": [2, 3]}, "3 samples of a text, evaluation.max-samples = 2"),
        ({"sequence_length": 3}, "samples of 3 tokens, evaluation.sequence-length = 4"),
        ({"test_items": 1, "test_metrics": ["loss"]}, "1 test items, 0 are allowed"),
        ({"test_metrics": ["loss"]}, "test_metrics"),
    ],
)
def test_evaluation_stays_within_settings(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EspalierError, match=words):
        contract_for(evaluation(**changes), lambda: PLAN, EVALUATING)
    with pytest.raises(EspalierError, match="texts are not allowed"):
        contract_for(
            evaluation(), lambda: PLAN, parse({**TEXTS, "evaluation.local-baseline": False})
        )


def test_number_of_task_items_is_that_of_settings() -> None:
    given = {
        "method": "fedpetuning",
        "task.name": "sst2",
        "data.source": "files",
        "task.max-test-items": 3,
    }
    fields = {"names": [], "num_samples": [], "test_requests": 4, "test_tokens": 40}

    def ask(**changes: Any) -> None:
        body = MessageBody(
            header(kind="evaluate", method="fedpetuning", server_round=3), PUBLIC | fields | changes
        )
        contract_for(body, lambda: PLAN, parse(given))

    ask(test_items=3, test_metrics=["loss", "acc"])
    for items, metrics, told in (
        (4, ["loss"], "4 test items, 3 are allowed"),
        (3, ["loss", "loss"], "test_metrics"),
        (3, ["text"], "test_metrics"),
    ):
        with pytest.raises(EspalierError, match=told):
            ask(test_items=items, test_metrics=metrics)


LOSSES = {"losses": [1.5, 2.5], "own_losses": [], "test_scores": [], "seconds": 0.1}


@pytest.mark.parametrize(
    ("changes", "own_text", "fits"),
    [
        ({}, False, True),
        ({"losses": [1.5]}, False, False),
        ({"losses": [1.5, 2.5, 0.5]}, False, False),
        ({"losses": [1.5, float("nan")]}, False, False),
        ({"losses": [1.5, SECRET]}, False, False),
        ({"losses": [1.5, 2.5001]}, False, False),
        ({"own_samples": 7}, False, False),
        ({"note": SECRET}, False, False),
        ({}, True, False),
        ({"own_losses": [3.0, 3.5, 3.25]}, True, True),
        ({"own_losses": [3.0, 3.5, 3.25]}, False, False),
        ({"own_losses": [3.0, 3.5, 3.25, 4.0]}, True, False),
        ({"own_losses": [3.0, 3.5, 3.2501]}, True, False),
    ],
)
def test_one_finite_loss_per_text_and_model(
    changes: dict[str, Any], own_text: bool, fits: bool
) -> None:
    reply = MessageBody(header(kind="evaluate"), LOSSES | changes)
    request = evaluation(own_text=own_text)
    found = contract_for(request, lambda: PLAN, parse({**TEXTS, "evaluation.own-text": own_text}))
    if fits:
        check_reply(reply, request, found)
    else:
        with pytest.raises(EspalierError) as mistake:
            check_reply(reply, request, found)
        assert SECRET not in str(mistake.value)


def test_own_text_alone_needs_no_public_windows() -> None:
    request = MessageBody(
        header(kind="evaluate"), PUBLIC | {"names": [], "num_samples": [], "own_text": True}
    )
    found = contract_for(request, lambda: PLAN, OWN_TEXT)
    check(request, found.down)
    check_reply(
        MessageBody(request.header, LOSSES | {"losses": [], "own_losses": [3.0, 3.5, 3.25]}),
        request,
        found,
    )


# ----- the federated result on its way to a client ------------------------------------------------


def pushed(scaled: bool, **fields: Any) -> MessageBody:
    """Return the whole result in one part."""
    blobs = {}
    for block in PLAN.blocks:
        blobs[f"block-{block.index:04d}"] = blob(
            {"attn.q.prune_mask": words(0, 1), "mlp.up.prune_mask": words(0, 2)}
        )
        if scaled:
            blobs[f"votes-{block.index:04d}"] = blob(
                {linear.name: np.zeros(linear.shape, np.uint8) for linear in block.linears}
            )
    return MessageBody(header(kind="push"), {"num_voters": [4, 4], "decided": 2, **fields}, blobs)


@pytest.mark.parametrize("scaled", [False, True])
def test_push_holds_masks_and_scaling_votes(scaled: bool) -> None:
    request = pushed(scaled)
    found = contract_for(
        request,
        lambda: PLAN,
        parse({"fedprllm.weight-scaling": scaled, "evaluation.own-text": True}),
    )
    check(request, found.down)
    check_reply(MessageBody(request.header, {}), request, found)
    with pytest.raises(EspalierError):
        check_reply(MessageBody(request.header, {"note": SECRET}), request, found)
    with pytest.raises(EspalierError, match="surplus"):
        check(pushed(not scaled), found.down)
    with pytest.raises(EspalierError, match="1 numbers of voters for 2 blocks"):
        check(pushed(scaled, num_voters=[4]), found.down)


def test_only_decided_blocks_may_be_pushed() -> None:
    """A client that lost its hidden states gets the blocks decided in earlier rounds.

    Parts hold whole blocks.
    """
    iterative = parse({"pruning.strategy": "iterative"})
    first = {
        "block-0000": blob({"attn.q.prune_mask": words(0, 1), "mlp.up.prune_mask": words(0, 2)})
    }
    request = MessageBody(
        header(kind="push", server_round=2), {"num_voters": [4], "decided": 1}, first
    )
    found = contract_for(request, lambda: PLAN, iterative)
    check(request, found.down)
    check_reply(MessageBody(request.header, {}), request, found)
    for settings, changes in (
        # One-shot FedPrLLM pushes no decided blocks.
        (SETTINGS, {}),
        (iterative, {"server_round": 1}),
        (iterative, {"server_round": 3}),
    ):
        again = MessageBody(request.header.model_copy(update=changes), request.fields, first)
        with pytest.raises(
            EspalierError,
            match="1 decided blocks are pushed, which is neither all nor those before the round",
        ):
            contract_for(again, lambda: PLAN, settings)
    with pytest.raises(EspalierError):
        check(MessageBody(request.header, request.fields, pushed(False).blobs), found.down)


def test_decided_parts_are_cut_from_those_blocks() -> None:
    plan = replace(PLAN, blocks=tuple(replace(PLAN.blocks[0], index=index) for index in range(5)))
    size = sum(
        spec.num_bytes
        for specs in decided_specs(plan.blocks[0], SETTINGS).values()
        for spec in specs.values()
    )
    settings = SETTINGS.model_copy(update={"part_bytes": 2 * size})
    assert [list(part) for part in decided_parts(plan, settings, 3)] == [[0, 1], [2]]
    assert [list(part) for part in decided_parts(plan, settings, 5)] == [[0, 1], [2, 3], [4]]


def test_order_after_scaling_brings_its_votes() -> None:
    settings = parse(
        {
            "pruning.strategy": "iterative",
            "fedprllm.weight-scaling": True,
            "fedprllm.continue-behind": "scaled",
            "num-clients": 4,
        }
    )
    first = contract_for(MessageBody(header()), lambda: PLAN, settings)
    check(MessageBody(header()), first.down)
    whole = pushed(scaled=True)
    blobs = {key: whole.blobs[key] for key in ("block-0000", "votes-0000")}
    order = MessageBody(header(server_round=2), {"num_voters": [4], "decided": 1}, blobs)
    found = contract_for(order, lambda: PLAN, settings)
    check(order, found.down)
    for fields, held, told in (
        ({"num_voters": [4, 4], "decided": 1}, blobs, "2 numbers of voters for 1 block"),
        ({}, blobs, "num_voters"),
        ({"num_voters": [4], "decided": 1}, {"block-0000": blobs["block-0000"]}, "1 missing"),
    ):
        with pytest.raises(EspalierError, match=told):
            check(MessageBody(header(server_round=2), fields, held), found.down)


def test_nonexistent_part_of_result_is_refused() -> None:
    with pytest.raises(EspalierError, match="part 99 of a push does not exist"):
        contract_for(
            MessageBody(header(kind="push", part=99), {"num_voters": [1], "decided": 2}),
            lambda: PLAN,
            OWN_TEXT,
        )


def test_own_text_is_what_the_run_s_settings_say() -> None:
    """A message cannot ask for more than the settings that the site was shown."""
    with pytest.raises(EspalierError, match=r"not what evaluation\.own-text says"):
        contract_for(evaluation(own_text=True), lambda: PLAN, SETTINGS)
    with pytest.raises(EspalierError, match=r"evaluation\.own-text is off"):
        contract_for(pushed(False), lambda: PLAN, SETTINGS)


@pytest.mark.parametrize(
    ("clients", "dtype"), [(1, "U8"), (255, "U8"), (256, "U16"), (65535, "U16"), (65536, "U32")]
)
def test_votes_have_smallest_sufficient_dtype(clients: int, dtype: str) -> None:
    settings = parse({"fedprllm.weight-scaling": True, "num-clients": clients})
    specs = decided_specs(PLAN.blocks[0], settings)["votes-0000"]
    assert {spec.dtype for spec in specs.values()} == {dtype}


ENROLMENT = {
    "site": "hospital-a",
    "code_sha256": SHA,
    "model_sha256": SHA,
    "device": "cpu",
    "threads": 2,
    "capability": 1.0,
    "measured": False,
    "approval": False,
    "python": "3.11.7",
    "torch": "2.6.0",
}


def test_a_good_enrolment_passes() -> None:
    request = MessageBody(header(kind="enrol", client=-1, server_round=0))
    check_reply(
        MessageBody(request.header, dict(ENROLMENT)),
        request,
        contract_for(request, lambda: PLAN, SETTINGS),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("site", "hospital a"),
        ("site", "../x"),
        ("site", ""),
        ("code_sha256", SECRET),
        ("model_sha256", "0" * 63),
        ("device", "tpu"),
        ("threads", 0),
        ("python", SECRET),
        ("torch", "x" * 65),
        ("note", SECRET),
    ],
)
def test_another_enrolment_is_refused(field: str, value: Any) -> None:
    request = MessageBody(header(kind="enrol", client=-1, server_round=0))
    reply = MessageBody(request.header, ENROLMENT | {field: value})
    assert field in refused(reply, request)

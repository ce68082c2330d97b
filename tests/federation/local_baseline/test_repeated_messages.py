"""Work that is done once: a repeated message waits for the first one, or gets its answer."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import client_app.methods.pruning.fedprllm
import client_app.methods.pruning.pooled_pruning
import client_app.methods.tuning.adapter_averaging
import client_app.protocol.evaluation
from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.blobs.masks import mask_specs
from espalier.messages.message import MessageBody
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.models.plan import block_key
from espalier.storage.client_state import PrivateState
from tests.bench import Bench
from tests.federation.local_baseline.baseline_runs import answer, every_method, requests_of


@every_method
def test_repeated_message_gets_kept_answer(bench: Bench) -> None:
    """The repeated reply has the same duration, which a second computation would not have."""
    requests = requests_of(bench)
    for kind in ("train", "local_baseline", "evaluate"):
        # In iterative runs ``local_baseline`` belongs to the last round, which needs votes first.
        if bench.method in ("fedprllm", "pooled-pruning") and kind == "local_baseline":
            requests["train"] = _second_round(requests["train"], bench)
            assert answer(bench, requests["train"]).header.status == "ok"
        first = answer(bench, requests[kind], 1)
        second = answer(bench, requests[kind], 2)
        assert first.header.status == "ok", first.fields
        assert second.header.attempt == 2
        assert (second.fields, second.blobs) == (first.fields, first.blobs)


@pytest.mark.parametrize("bench", ["slicegpt"], indirect=True)
def test_stored_bases_do_not_change_an_evaluation(bench: Bench) -> None:
    """The first evaluation stores bases in the round that the request rests on."""
    requests = requests_of(bench)
    assert answer(bench, requests["train"]).header.status == "ok"
    first = answer(bench, requests["evaluate"], 1)
    again = answer(bench, requests["evaluate"], 2)
    assert (first.header.status, again.fields) == ("ok", first.fields)


def _second_round(train: MessageBody, bench: Bench) -> MessageBody:
    """Return the order for the second block, with a decision that prunes nothing."""
    answer(bench, train)
    masks = mask_specs(OpenedModel(bench.model).plan.blocks[0])
    nothing = {name: np.zeros(spec.shape, np.uint64) for name, spec in masks.items()}
    decided = {block_key(0): pack_tensors(nothing)}
    return MessageBody(train.header.model_copy(update={"server_round": 2}), {}, decided)


def told_once(bench: Bench) -> MessageBody:
    """Return the request of an evaluation that was answered."""
    requests = requests_of(bench)
    for kind in ("train", "local_baseline", "evaluate"):
        assert answer(bench, requests[kind]).header.status == "ok"
    return requests["evaluate"]


def test_failed_evaluation_does_not_block_another(
    bench: Bench,
) -> None:
    requests = requests_of(bench)
    assert answer(bench, requests["evaluate"]).header.status == "failed"
    for kind in ("train", "local_baseline", "evaluate"):
        assert answer(bench, requests[kind]).header.status == "ok"


def with_other_texts(evaluate: MessageBody) -> MessageBody:
    """Return an evaluation of other texts, as long as those of ``evaluate``."""
    samples = {key: unpack_tensors(blob) for key, blob in evaluate.blobs.items()}
    other = {
        key: pack_tensors({name: array[:, ::-1].copy() for name, array in arrays.items()})
        for key, arrays in samples.items()
    }
    return MessageBody(evaluate.header, evaluate.fields, other)


def test_another_evaluation_is_refused(bench: Bench) -> None:
    refused = answer(bench, with_other_texts(told_once(bench)))
    assert "answered another request of this run" in refused.fields["reason"]


def test_an_evaluation_that_failed_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error may depend on the data, and would otherwise tell something with every request."""
    requests = requests_of(bench)
    for kind in ("train", "local_baseline"):
        assert answer(bench, requests[kind]).header.status == "ok"

    def fail(*_: object) -> None:
        raise InputError("evaluate: NaN")

    with monkeypatch.context() as patched:
        patched.setattr(client_app.protocol.evaluation, "_losses", fail)
        for attempt in (1, 2):
            reply = answer(bench, requests["evaluate"], attempt)
            assert reply.fields["reason"] == "evaluate: NaN"
    refused = answer(bench, with_other_texts(requests["evaluate"]))
    assert "answered another request of this run" in refused.fields["reason"]
    assert answer(bench, requests["evaluate"], 3).header.status == "ok"


def test_another_result_is_not_evaluated_any_more(bench: Bench) -> None:
    """A result that was computed again could reveal something new."""
    evaluate = told_once(bench)
    (made,) = (bench.folder / "state" / evaluate.header.lineage).glob(
        "*-00000/r001/local_baseline.json"
    )
    made.write_text(json.dumps(json.loads(made.read_text()) | {"seconds": 7.0}))
    assert "answered another request of this run" in answer(bench, evaluate).fields["reason"]


WORK = {
    "train": (client_app.methods.tuning.adapter_averaging, "_train"),
    "local_baseline": (client_app.methods.tuning.adapter_averaging, "_train_local_baseline"),
    "evaluate": (client_app.protocol.evaluation, "_losses"),
}
"""Function that does the work of each message kind."""


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Count the arrivals at the lock of the private state."""
    arrived = threading.Semaphore(0)
    locked = PrivateState.locked

    def locking(state: PrivateState) -> Any:
        arrived.release()
        return locked(state)

    monkeypatch.setattr(PrivateState, "locked", locking)
    return arrived


@pytest.mark.parametrize("kind", sorted(WORK))
def test_repeated_message_waits_for_first_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, arrivals: threading.Semaphore, kind: str
) -> None:
    requests = requests_of(bench)
    grid = bench.grid()
    for before in list(WORK)[: list(WORK).index(kind)]:
        assert answer(bench, requests[before], grid=grid).header.status == "ok"
    module, name = WORK[kind]
    real = getattr(module, name)
    begun = threading.Event()
    go_on = threading.Event()
    times = []

    def work(*arguments: Any) -> Any:
        times.append(kind)
        begun.set()
        assert go_on.wait(600)
        return real(*arguments)

    monkeypatch.setattr(module, name, work)
    while arrivals.acquire(blocking=False):
        pass
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(answer, bench, requests[kind], 1, grid)
        assert begun.wait(600)
        arrivals.acquire()
        second = pool.submit(answer, bench, requests[kind], 2, grid)
        # The second request waits for the lock that the first one holds.
        assert arrivals.acquire(timeout=600)
        assert times == [kind]
        go_on.set()
        replies = first.result(), second.result()
    assert times == [kind]
    assert [reply.header.status for reply in replies] == ["ok", "ok"]
    assert replies[0].fields == replies[1].fields

"""Work that is done once.

Local baselines have a message of their own, and a repeated message waits for the first one.
"""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

import client_app.methods.pruning.fedprllm
import client_app.methods.pruning.pooled_pruning
import client_app.methods.tuning.fedpetuning
import client_app.protocol.evaluation
from espalier.errors import EspalierError, InputError
from espalier.hf.opening.opened import OpenedModel
from espalier.messages.blobs.masks import mask_specs
from espalier.messages.message import MessageBody
from espalier.messages.records import address, read
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.models.plan import block_key
from espalier.storage.client_state import PrivateState
from espalier.training.loop import Loop
from strategies.base.federation import PATIENCE, Federation
from strategies.base.roster import Roster, Seat
from strategies.base.run_folder import RunFolder, Times
from tests.bench import LOCAL_ONLY, Bench, events, model_files, summary
from tests.in_process import InProcessGrid

TUNING = {
    "federation.rounds": 1,
    "training.steps": 2,
    "training.batch-size": 2,
    "lora.rank": 2,
    "part-bytes": 1 << 20,
}
METHODS: dict[str, dict[str, Any]] = {
    "fedpetuning": TUNING,
    "fedprllm": {"fedprllm.strategy": "iterative"},
    "pooled-pruning": {"pooled-pruning.strategy": "iterative"},
    "hetlora": (
        {key.replace("fedpetuning", "hetlora"): value for key, value in TUNING.items()}
        | {"hetlora.ranks": "1,2"}
    ),
}
"""Methods whose rounds leave no local baseline."""


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    method = getattr(request, "param", "fedpetuning")
    return Bench(tmp_path, method, METHODS.get(method, {}) | LOCAL_ONLY, num_clients=2)


every_method = pytest.mark.parametrize("bench", sorted(METHODS), indirect=True)


def kinds(grid: InProcessGrid, partition: int = 0) -> list[str]:
    """Return the kinds of a client's replies, in order."""
    return [
        read(reply.content).header.kind for sender, reply in grid.received if sender == partition
    ]


# ----- message of the local baseline --------------------------------------------------------------


@every_method
def test_baseline_has_a_message_of_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the clients evaluate, they neither train nor prune."""
    working_on: list[str] = []
    monkeypatch.setattr(Loop, "run", counted(Loop.run, working_on))
    for module, name in (
        (client_app.methods.pruning.fedprllm, "prune_by_block"),
        (client_app.methods.pruning.pooled_pruning, "pooled_masks"),
    ):
        monkeypatch.setattr(module, name, counted(getattr(module, name), working_on))
    grid = bench.grid()
    worked = dict[str, int]()

    def count(request: Message, reply: Message) -> Message:
        kind = read(request.content).header.kind
        worked[kind] = worked.get(kind, 0) + len(working_on)
        working_on.clear()
        return reply

    grid.tamper = {0: count, 1: count}
    folder = bench.run(grid)
    assert kinds(grid)[-2:] == ["alone", "evaluate"]
    assert (worked["alone"], worked["evaluate"]) == (2, 0)
    values = summary(folder)["metrics"][0]["values"]
    assert values["local_baseline"] is not None


def counted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """Return a function that records each call."""

    def count(*arguments: Any, **named: Any) -> Any:
        calls.append(function.__name__)
        return function(*arguments, **named)

    return count


@pytest.mark.parametrize("bench", ["fedprllm-one-shot", "fedspallm"], indirect=True)
def test_no_baseline_message_if_rounds_leave_it(bench: Bench) -> None:
    bench.method = bench.method.removesuffix("-one-shot")
    grid = bench.grid()
    bench.run(grid)
    assert "alone" not in kinds(grid)
    assert kinds(grid)[-1] == "evaluate"


def test_no_baseline_without_evaluation(bench: Bench) -> None:
    grid = bench.grid()
    bench.run(grid, evaluation__local_baseline=False)
    assert kinds(grid)[-1] in ("train", "fetch")


@every_method
def test_failed_baseline_keeps_contribution(bench: Bench) -> None:
    grid = bench.grid()
    grid.tamper[1] = lambda request, reply: (
        None if read(request.content).header.kind == "alone" else reply
    )
    document = summary(folder := bench.run(grid))
    assert document["clients"][1]["status"] == "completed"
    assert document["clients"][1]["reason"].startswith("alone: no reply before the deadline")
    assert "evaluate" not in kinds(grid, 1)
    assert model_files(folder) == model_files(bench.run())


def test_an_evaluation_without_it_is_refused(bench: Bench) -> None:
    requests = requests_of(bench)
    assert (
        "made nothing by itself in round 1" in answer(bench, requests["evaluate"]).fields["reason"]
    )


# ----- deadline of the local baseline -------------------------------------------------------------


def patience(seats: list[Seat], client: int, num_rounds: int) -> float:
    roster = Roster({seat.client: seat for seat in seats})
    settings = SimpleNamespace(deadline_seconds=900.0, attempts=2)
    federation: Any = SimpleNamespace(
        rounds=SimpleNamespace(roster=roster, settings=settings),
        method=SimpleNamespace(num_rounds=num_rounds),
    )
    return Federation._patience(federation, roster.seats[client])


def test_patience_is_a_multiple_of_round_times() -> None:
    seats = [
        Seat(0, "a", 1, seconds=30.0, rounds=3),
        Seat(1, "b", 2, seconds=20.0, rounds=1),
        Seat(2, "c", 3),
    ]
    assert patience(seats, 0, 3) == PATIENCE * 30.0
    # The client was sampled for one round of three.
    assert patience(seats, 1, 3) == PATIENCE * 60.0
    # The client was never sampled, so the slowest client's time counts.
    assert patience(seats, 2, 3) == PATIENCE * 60.0
    assert patience([Seat(0, "a", 1)], 0, 3) == 0.0


def test_no_client_makes_the_server_wait_for_ever() -> None:
    """A client claims that its round took 30 years, but it had at most twice 900 seconds."""
    seats = [Seat(0, "a", 1, seconds=1e9, rounds=1), Seat(1, "b", 2)]
    assert patience(seats, 0, 3) == patience(seats, 1, 3) == PATIENCE * 3 * 1800.0


@pytest.mark.parametrize(("measured", "again"), [(100.0, False), (1.0, True)])
def test_client_of_slow_rounds_is_asked_once(bench: Bench, measured: float, again: bool) -> None:
    """Two deadlines of 5 seconds pass while the client trains.

    Training takes 100 polls of the server: 50 in the first 5 seconds and 50 in the next 25.
    """
    grid = bench.grid()

    def measure(request: Message, reply: Message) -> Message:
        if read(request.content).header.kind == "train":
            reply.content["fields"]["seconds"] = measured
        return reply

    def hold(message: Message) -> None:
        grid.held = {1: 100 if read(message.content).header.kind == "alone" else 0}

    grid.tamper = {1: measure}
    grid.before_push = hold
    folder = bench.run(grid)
    assert kinds(grid, 1).count("alone") == (2 if again else 1)
    assert bool(summary(folder)["clients"][1]["reason"]) == again
    assert any(event["event"] == "sent_again" for event in events(folder)) == again


def test_times_of_rounds_outlast_a_resumption(bench: Bench) -> None:
    """The deadline of a resumed run depends on them too."""
    grid = bench.grid()

    def measure(request: Message, reply: Message) -> Message:
        if read(request.content).header.kind == "train":
            reply.content["fields"]["seconds"] = 9.0
        return reply

    grid.tamper = {0: measure, 1: measure}
    folder = bench.killed(lambda header: header.kind == "alone", grid)
    again = bench.grid()
    ttls: list[float] = []

    def note(message: Message) -> None:
        if read(message.content).header.kind == "alone":
            ttls.append(message.metadata.ttl)

    again.before_push = note
    with pytest.MonkeyPatch.context() as monkeypatch:
        # In a deployment a message lives as long as its deadline.
        monkeypatch.setattr("espalier.flower.shared_nodes.GRIDS", ())
        bench.run(again, resume_from=str(folder), quorum=0.5)
    assert ttls == [pytest.approx(2 * PATIENCE * 9.0 + 60.0)] * 2


def test_damaged_times_are_told(bench: Bench) -> None:
    folder = RunFolder(bench.folder / "run")
    assert folder.load_times() == Times()
    for text in (
        "",
        "[]",
        '{"0": [1.0, 1]}',
        '{"run": -1.0, "clients": {}}',
        '{"run": 1.0, "clients": {"0": [1.0, NaN]}}',
        '{"run": 1.0, "clients": {"0": [1e999, 1]}}',
        '{"run": 1.0, "clients": {"0": [-1, 1]}}',
        '{"run": 1.0, "clients": {"0": 3}}',
        '{"run": 1.0, "clients": {"0": [1, 2, 3]}}',
        '{"run": 1.0, "clients": {"0": ["x", 1]}}',
        "[" * 100_000,
    ):
        (folder.path / "seconds.json").write_text(text)
        with pytest.raises(EspalierError, match=r"seconds.json: is damaged; remove it"):
            folder.load_times()
    (folder.path / "seconds.json").unlink()
    (folder.path / "seconds.json").mkdir()
    with pytest.raises(EspalierError, match=r"seconds.json: is damaged; remove it"):
        folder.load_times()


# ----- repeated messages --------------------------------------------------------------------------


def requests_of(bench: Bench) -> dict[str, MessageBody]:
    """Return the first request of each kind to the first client.

    The requests come from a run whose private state is gone.
    """
    found: dict[str, MessageBody] = {}
    grid = bench.grid()

    def note(message: Message) -> None:
        body = read(message.content)
        if body.header.client == 0:
            found.setdefault(body.header.kind, body)

    grid.before_push = note
    bench.run(grid)
    return found


def answer(
    bench: Bench, request: MessageBody, attempt: int = 1, grid: InProcessGrid | None = None
) -> MessageBody:
    """Return the first client's reply."""
    grid = grid or bench.grid()
    node, context = next(iter(grid.contexts.items()))
    again = MessageBody(
        request.header.model_copy(update={"attempt": attempt}),
        dict(request.fields),
        dict(request.blobs),
    )
    return read(grid.answer(address(again, node, 60.0), context).content)


@every_method
def test_repeated_message_gets_kept_answer(bench: Bench) -> None:
    """The repeated reply has the same duration, which a second computation would not have."""
    requests = requests_of(bench)
    for kind in ("train", "alone", "evaluate"):
        # In the iterative method ``alone`` belongs to the last round, which needs votes first.
        if bench.method in ("fedprllm", "pooled-pruning") and kind == "alone":
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
    for kind in ("train", "alone", "evaluate"):
        assert answer(bench, requests[kind]).header.status == "ok"
    return requests["evaluate"]


def test_failed_evaluation_does_not_block_another(
    bench: Bench,
) -> None:
    requests = requests_of(bench)
    assert answer(bench, requests["evaluate"]).header.status == "failed"
    for kind in ("train", "alone", "evaluate"):
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
    for kind in ("train", "alone"):
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
    (made,) = (bench.folder / "state" / evaluate.header.lineage).glob("*-00000/r001/alone.json")
    made.write_text(json.dumps(json.loads(made.read_text()) | {"seconds": 7.0}))
    assert "answered another request of this run" in answer(bench, evaluate).fields["reason"]


WORK = {
    "train": (client_app.methods.tuning.fedpetuning, "_train"),
    "alone": (client_app.methods.tuning.fedpetuning, "_train_local_baseline"),
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

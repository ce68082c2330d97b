"""Local baselines: they have a message of their own, and a deadline."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message

import client_app.methods.pruning.fedprllm
import client_app.methods.pruning.pooled_pruning
import client_app.methods.tuning.adapter_averaging
import client_app.protocol.evaluation
from espalier.errors import EspalierError
from espalier.messages.records import read
from espalier.training.loop import Loop
from strategies.base.federation import PATIENCE, Federation
from strategies.base.roster import Roster, Seat
from strategies.base.run_folder import RunFolder, Times
from tests.bench import Bench, events, model_files, summary
from tests.federation.local_baseline.baseline_runs import answer, every_method, requests_of
from tests.in_process import InProcessGrid


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
    assert kinds(grid)[-2:] == ["local_baseline", "evaluate"]
    assert (worked["local_baseline"], worked["evaluate"]) == (2, 0)
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
    assert "local_baseline" not in kinds(grid)
    assert kinds(grid)[-1] == "evaluate"


def test_no_baseline_without_evaluation(bench: Bench) -> None:
    grid = bench.grid()
    bench.run(grid, evaluation__local_baseline=False)
    assert kinds(grid)[-1] in ("train", "fetch")


@every_method
def test_failed_baseline_keeps_contribution(bench: Bench) -> None:
    grid = bench.grid()
    grid.tamper[1] = lambda request, reply: (
        None if read(request.content).header.kind == "local_baseline" else reply
    )
    document = summary(folder := bench.run(grid))
    assert document["clients"][1]["status"] == "completed"
    assert document["clients"][1]["reason"].startswith(
        "local_baseline: no reply before the deadline"
    )
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
        grid.held = {1: 100 if read(message.content).header.kind == "local_baseline" else 0}

    grid.tamper = {1: measure}
    grid.before_push = hold
    folder = bench.run(grid)
    assert kinds(grid, 1).count("local_baseline") == (2 if again else 1)
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
    folder = bench.killed(lambda header: header.kind == "local_baseline", grid)
    again = bench.grid()
    ttls: list[float] = []

    def note(message: Message) -> None:
        if read(message.content).header.kind == "local_baseline":
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

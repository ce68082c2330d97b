"""Deadline of a round for all its messages together.

A client cannot delay a round for ever by answering each message just in time.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from espalier.models.plan import ModelPlan
from espalier.settings.run import parse
from strategies.base.progress import Progress
from strategies.base.rounds import Rounds, RunFailed
from strategies.base.run_folder import RunFolder
from tests.bench import Bench, model_files, results, summary
from tests.in_process import FakeTime, InProcessGrid

LATE = 40
"""Number of pulls after which a slow client's reply arrives.

It is a little less than the deadline of 5 seconds.
"""
TUNING: dict[str, Any] = {
    "lora.rank": 2, "lora.targets": "attn.q,attn.v", "training.steps": 1, "training.batch-size": 1,
    "federation.rounds": 2, "part-bytes": 1024,
}  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "fedprllm", {"quorum": 0.5}, num_clients=3)


def slow(bench: Bench, *clients: int, **changes: Any) -> InProcessGrid:
    """Return a grid on which some clients answer every message late, but in time."""
    grid = bench.grid(**changes)
    grid.held = dict.fromkeys(clients, LATE)
    return grid


def reasons(folder: Path) -> dict[str, str]:
    return {
        client["site"]: client["reason"]
        for client in summary(folder)["clients"]
        if client["status"] == "dropped"
    }


def test_it_ends_with_those_who_have_answered(bench: Bench) -> None:
    """The slow client answers each message in time and takes part if the round has no limit."""
    assert reasons(bench.run(slow(bench, 1))) == {}
    found = reasons(bench.run(slow(bench, 1), round_seconds=3.0))
    assert list(found) == ["node-00001"]
    assert "no complete answer at the end of the round (round-seconds = 3)" in found["node-00001"]


def test_too_few_end_the_run(bench: Bench) -> None:
    with pytest.raises(
        RunFailed,
        match=r"1 clients? .* the quorum is 2(.|\n)*end of the round \(round-seconds = 3\)",
    ):
        bench.run(slow(bench, 0, 1), round_seconds=3.0)


def test_a_resumed_run_comes_to_the_same_end(bench: Bench) -> None:
    bench.method = "fedpetuning"
    bench.settings = TUNING | {"quorum": 0.5}
    changes = {"round_seconds": 3.0}
    whole = bench.run(slow(bench, 1), **changes)
    assert list(reasons(whole)) == ["node-00001"]
    killed = bench.killed(
        lambda header: (header.kind, header.server_round) == ("train", 2), slow(bench, 1), **changes
    )
    resumed = bench.run(slow(bench, 1), resume_from=str(killed), **changes)
    assert model_files(resumed) == model_files(whole)
    assert {name: data for name, data in results(resumed).items() if "README" not in name} == {
        name: data for name, data in results(whole).items() if "README" not in name
    }


def test_punctual_client_is_not_dropped(bench: Bench) -> None:
    """The slow client uses up the round while it receives data.

    The other clients still get time for their work.
    """
    bench.method = "fedpetuning"
    bench.settings = TUNING | {"quorum": 0.5}
    grid = slow(bench, 1)
    assert list(reasons(bench.run(grid, round_seconds=3.0))) == ["node-00001"]


def rounds_of(folder: Path, shared: bool, **changes: Any) -> Rounds:
    settings = parse(
        {"num-clients": 1} | {key.replace("_", "-"): value for key, value in changes.items()}
    )
    clock = FakeTime().clock()
    made = RunFolder(folder)
    rounds = Rounds(
        InProcessGrid(None, [], {}),
        settings,
        ModelPlan((), 0),
        "run",
        made,
        Progress(made, clock),
        clock,
    )  # type: ignore[arg-type]
    rounds.shared_workers = shared
    return rounds


def test_default_is_long_and_none_in_simulation(tmp_path: Path) -> None:
    """A busy machine must not end a simulation's round: its clients queue for the workers."""
    assert rounds_of(tmp_path, True).round_seconds() == math.inf
    assert rounds_of(tmp_path, False).round_seconds() == 86_400
    assert (
        rounds_of(tmp_path, False, deadline_seconds=10_000.0, attempts=3).round_seconds() == 300_000
    )
    assert rounds_of(tmp_path, True, round_seconds=5.0).round_seconds() == 5
    rounds = rounds_of(tmp_path, False, round_seconds=5.0)
    rounds.begin(least=7.0)
    assert rounds.ends == 7


def test_it_may_change_when_a_run_is_resumed(bench: Bench) -> None:
    killed = bench.killed(lambda header: (header.kind, header.client) == ("train", 1))
    assert reasons(bench.run(resume_from=str(killed), round_seconds=600.0)) == {}

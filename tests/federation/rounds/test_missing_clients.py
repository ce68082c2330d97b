"""Reports of missing clients, and the quorum.

The last line and the summary name missing clients. Deployments need all sites unless the settings
say otherwise.
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from espalier.messages.records import read
from espalier.settings.run import parse
from server_app.report.summary import Summary
from server_app.report.table import closing_line
from strategies.base.roster import Roster, Seat
from strategies.base.rounds import RunFailed
from tests.bench import LOCAL_ONLY, Bench, summary
from tests.in_process import InProcessGrid


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "fedprllm", LOCAL_ONLY, num_clients=3)


def with_a_typo(grid: InProcessGrid, partition: int) -> InProcessGrid:
    """Give one node a wrong configuration that still names its site."""
    (context,) = [
        context
        for context in grid.contexts.values()
        if context.node_config["partition-id"] == partition
    ]
    context.node_config |= {"site": "hospital-c", "widows": 16}
    return grid


def silent_from(kind: str) -> Callable[[Message, Message], Message | None]:
    """Return a tamper that drops all replies to one kind of message."""
    return lambda request, reply: None if read(request.content).header.kind == kind else reply


def test_a_refused_site_is_told_in_the_last_line(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bench.run(with_a_typo(bench.grid(), 2))
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last.startswith(
        "2 of 3 clients; missing: hospital-c (refused: the node's configuration is wrong: widows:"
        " unknown key"
    )
    document = summary(folder)
    assert (document["status"], document["finished"]) == ("completed", 2)
    (missing,) = document["missing"]
    assert missing["site"] == "hospital-c"
    assert "widows: unknown key" in missing["reason"]


def test_a_client_that_died_is_told_by_its_name(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = bench.grid()
    grid.tamper[1] = silent_from("train")
    folder = bench.run(grid)
    why = "train: no reply before the deadline (2 of 2 attempts)"
    assert (
        capsys.readouterr().out.rstrip().splitlines()[-1]
        == f"2 of 3 clients; missing: node-00001 ({why})"
    )
    assert summary(folder)["missing"] == [{"site": "node-00001", "reason": why}]


def test_unevaluated_client_is_in_result(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    grid = bench.grid()
    grid.tamper[1] = silent_from("evaluate")
    assert summary(bench.run(grid))["missing"] == []
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last.startswith(
        "3 of 3 clients; not evaluated: node-00001 (evaluate: no reply before the deadline"
    )


def test_silent_node_is_reported_by_its_number(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = bench.grid()
    grid.tamper[2] = silent_from("enrol")
    bench.run(grid)
    why = "refused: connected, but did not answer within 1 h; read the log of the node"
    assert (
        capsys.readouterr().out.rstrip().splitlines()[-1]
        == f"2 of 3 clients; missing: node 986 ({why})"
    )


def test_mended_site_does_not_join_a_resumed_run(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = with_a_typo(bench.grid(), 2)

    def kill(message: Message) -> None:
        if read(message.content).header.kind == "evaluate":
            raise KeyboardInterrupt

    grid.before_push = kill
    with pytest.raises(KeyboardInterrupt):
        bench.run(grid)
    (run,) = (bench.folder / "runs").iterdir()
    bench.run(resume_from=str(run))
    why = "refused: the run began without it, and a resumed run keeps its clients; start a new run"
    assert (
        capsys.readouterr().out.rstrip().splitlines()[-1]
        == f"2 of 3 clients; missing: node-00002 ({why})"
    )


def test_when_all_are_there_nobody_is_missing(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert summary(bench.run())["missing"] == []
    assert capsys.readouterr().out.rstrip().splitlines()[-1] == "3 of 3 clients"


def test_one_that_never_connected_has_no_name() -> None:
    roster = Roster({0: Seat(0, "a", 1), 1: Seat(1, "b", 2)}, {"c": "has another base model"})
    assert roster.missing(3) == [("c", "refused: has another base model")]
    # Another node took the seat.
    assert roster.missing(2) == []
    assert roster.missing(5) == [
        ("c", "refused: has another base model"),
        *[("a client", "never connected")] * 2,
    ]


def test_second_node_of_a_seat_is_not_missing() -> None:
    roster = Roster(
        {0: Seat(0, "a", 1)},
        {"a": "a second node with this site name", "c": "has another base model"},
    )
    assert roster.missing(2) == [("c", "refused: has another base model")]
    assert roster.missing(3) == [
        ("c", "refused: has another base model"),
        ("a client", "never connected"),
    ]


def test_a_long_reason_is_cut(bench: Bench) -> None:
    roster = Roster({0: Seat(0, "a", 1, "dropped", "because\n" * 100)})
    summary: Any = Summary(parse({"num-clients": 1}), bench.model, 1, "cpu", roster)  # type: ignore[arg-type]
    line = closing_line(summary)
    assert line.startswith("0 of 1 client; missing: a (because because")
    assert line.endswith(" ...)")
    assert len(line) < 350


# ----- the quorum ---------------------------------------------------------------------------------


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the grid in this process as one of real nodes."""
    monkeypatch.setattr("espalier.flower.shared_nodes.GRIDS", ())


def quorum(folder: Path) -> Any:
    """Return the quorum that the run directory records."""
    return tomllib.loads((folder / "settings.toml").read_text())["quorum"]


@pytest.mark.usefixtures("deployed")
def test_in_deployment_every_site_is_needed(bench: Bench) -> None:
    with pytest.raises(
        RunFailed,
        match=(
            r"2 clients enrolled, the quorum is 3 of num-clients = 3\n  hospital-c: the node's conf"
        ),
    ):
        bench.run(with_a_typo(bench.grid(), 2))
    (folder,) = (bench.folder / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["missing"][0]["site"] == "hospital-c"
    assert quorum(folder) == 1.0


@pytest.mark.usefixtures("deployed")
def test_deployment_may_allow_fewer_clients(bench: Bench) -> None:
    folder = bench.run(with_a_typo(bench.grid(), 2), quorum=0.5)
    assert summary(folder)["finished"] == 2


def test_quorum_in_force_is_in_run_directory(bench: Bench) -> None:
    folder = bench.run()
    assert quorum(folder) == 0.5

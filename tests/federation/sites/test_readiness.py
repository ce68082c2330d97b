"""Checks of a site's files at enrolment.

A file that does not fit the run is refused with a reason, and costs no round.
"""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Error, Message, RecordDict

from espalier.errors import NOT_LOADED
from espalier.flower.load_faults import TRIES, could_not_load
from espalier.messages.records import read
from tests.bench import Bench, summary
from tests.flower.flower_parts import ErrorCode
from tests.in_process import InProcessGrid


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "fedprllm", {"quorum": 0.5}, 2)


def second_site(grid: InProcessGrid, **config: Any) -> Context:
    """Turn the second node into a real site with further keys, and return its context."""
    (context,) = [
        context for context in grid.contexts.values() if context.node_config["partition-id"] == 1
    ]
    context.node_config |= {
        "site": "hospital-b",
        **{key.replace("_", "-"): value for key, value in config.items()},
    }
    return context


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"data_pth": "x"}, "data-pth: unknown key; did you mean 'data-path'?"),
        ({"num-samples": 5000}, "samples of 16 tokens, but data.num-samples = 5000 are needed"),
        ({"data_path": "/no/such"}, "data-path = '/no/such': does not exist on this node"),
    ],
)
def test_site_with_bad_file_is_refused_by_name(
    bench: Bench, config: dict[str, Any], reason: str
) -> None:
    grid = bench.grid()
    second_site(grid, **config)
    document = summary(bench.run(grid))
    ((who, told),) = document["refused"].items()
    assert who == "hospital-b"
    assert reason in told
    assert [client["site"] for client in document["clients"]] == ["node-00000"]
    kinds = [
        read(reply.content).header.kind for partition, reply in grid.received if partition == 1
    ]
    assert kinds == ["enrol"]


def test_invalid_site_name_is_not_repeated(bench: Bench) -> None:
    grid = bench.grid()
    second_site(grid, site="ward\n7 \x1b[2J")
    ((_, told),) = summary(bench.run(grid))["refused"].items()
    assert told.startswith("the node's configuration is wrong")


LOADS = [
    (
        ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
        "An exception was raised when attempting to load `ClientApp`",
    ),
    (
        ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
        "<class 'SyntaxError'>:<'invalid syntax (rounds.py, line 7)'>",
    ),
]


@pytest.mark.parametrize(("code", "reason"), LOADS)
def test_node_still_loading_is_asked_again(bench: Bench, code: int, reason: str) -> None:
    """The program was still being installed by another run."""
    grid = bench.grid()
    tries = list[Message]()

    def fails_twice(request: Message, reply: Message) -> Message:
        if read(request.content).header.kind != "enrol" or len(tries) == TRIES - 1:
            return reply
        tries.append(request)
        return Message(Error(code, reason), reply_to=request)

    grid.tamper[1] = fails_twice
    document = summary(bench.run(grid))
    assert [client["site"] for client in document["clients"]] == ["node-00000", "node-00001"]
    assert len(tries) == TRIES - 1


@pytest.mark.parametrize(("code", "reason"), LOADS)
def test_unloadable_node_is_told_what_to_remove(bench: Bench, code: int, reason: str) -> None:
    grid = bench.grid()
    asked = list[str]()

    def fails(request: Message, reply: Message) -> Message:
        asked.append(read(request.content).header.kind)
        return Message(Error(code, reason), reply_to=request)

    grid.tamper[1] = fails
    document = summary(bench.run(grid))
    ((_, told),) = document["refused"].items()
    assert asked == ["enrol"] * TRIES
    assert NOT_LOADED in told
    assert "remove apps/espalier.espalier.* in its FLWR_HOME" in told


def test_other_flower_errors_are_no_load_failure() -> None:
    request = Message(RecordDict(), 1, "query")
    for code, reason in (
        (ErrorCode.NODE_UNAVAILABLE, ""),
        (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "<class 'ValueError'>:<'x'>"),
    ):
        assert not could_not_load(Message(Error(code, reason), reply_to=request))
    assert not could_not_load(Message(RecordDict(), reply_to=request))

"""Replies of a run that wait for approval.

Nothing leaves before its release, and what leaves is what the person saw.

"""

import json
import os
from typing import Any

import pytest
from flwr.app import Message

from client_app.policy.approval import NotDecidedError
from client_app.policy.egress_log import main as check_log
from espalier.errors import EspalierError
from espalier.messages.records import read
from espalier.settings.node import parse_node
from tests.bench import Bench, private_text, summary
from tests.federation.approval.approving_sites import (
    METHODS,
    SECONDS,
    OneSite,
    Time,
    decide,
    log_of,
    of_method,
    sites,
    state,
    undecided,
)
from tests.run_names import BY_HAND

OTHERWISE = ("seconds", "approval")


def told(reply: Message) -> tuple[Any, ...]:
    """Return a reply's content without the fields that may differ.

    These are the duration of the work and the flag that replies need approval.
    """
    body = read(reply.content)
    # The two runs that are compared have different names.
    header = body.header.model_copy(update={"lineage": "any"})
    return (
        header,
        {key: value for key, value in body.fields.items() if key not in OTHERWISE},
        body.blobs,
    )


# ----- a run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_nothing_leaves_before_its_release(bench: Bench, time: Time, method: str) -> None:
    """All parts of a reply, also those that ``fetch`` requests, are shown and approved together."""
    of_method(bench, method)
    plain = sites(bench, "")
    bench.run(plain)
    expected = [told(reply) for _, reply in plain.received]
    assert any(header.kind == "fetch" for header, _, _ in expected)

    shown = list[tuple[str, set[str]]]()
    grid = sites(bench)

    def approver() -> None:
        (waiting,) = undecided(bench)
        own = {blob["sha256"] for blob in waiting.blobs}
        place = (waiting.entry["client"], waiting.entry["round"])
        left = [read(reply.content).header for _, reply in grid.received]
        assert not [
            header
            for header in left
            if (header.client, header.server_round) == place and header.kind != "push"
        ]
        shown.append((waiting.entry["site"], own))
        assert decide(bench, all=True) == 0

    time.approver = approver
    bench.run(grid)
    assert [told(reply) for _, reply in grid.received] == expected
    rounds = METHODS[method]["federation.rounds"]
    assert len(shown) == bench.num_clients * rounds
    for site in ("site-0", "site-1"):
        *_, log = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(
                (state(bench) / "egress").glob(f"*-{site}.jsonl"), key=os.path.getmtime
            )
        ]
        kinds = [(entry["entry"], entry["kind"]) for entry in log]
        for place in [place for place, kind in enumerate(kinds) if kind == ("reply", "train")]:
            assert kinds[place - 2 : place] == [("waiting", "train"), ("approved", "train")]
            assert (
                log[place]["approved"]
                == log[place - 1]["waiting_id"]
                == log[place - 2]["waiting_id"]
            )
        left = {
            blob["sha256"] for entry in log if entry["entry"] == "reply" for blob in entry["blobs"]
        }
        assert left == set().union(*(own for whose, own in shown if whose == site))


def test_refused_reply_loses_its_contribution(bench: Bench, time: Time) -> None:
    grid = sites(bench)

    def approver() -> None:
        (waiting,) = undecided(bench)
        words: dict[str, Any] = (
            {"ids": [waiting.id]}
            if waiting.entry["site"] == "site-0"
            else {"refuse": [waiting.id], "reason": "no"}
        )
        assert decide(bench, **words) == 0

    time.approver = approver
    document = summary(bench.run(grid, quorum=0.5))
    assert document["status"] == "completed"
    first, second = document["clients"]
    assert "blocked by the site: it was not approved" in json.dumps(second)
    assert "blocked" not in json.dumps(first)
    log = log_of(bench, "site-1")
    assert [entry["entry"] for entry in log] == ["reply", "waiting", "refused", "reply"]
    assert (log[2]["reason"], log[3]["status"], log[3]["blobs"]) == ("no", "failed", [])
    assert "no" not in [read(reply.content).fields.get("reason") for _, reply in grid.received]


def test_late_release_goes_with_next_attempt(bench: Bench, time: Time) -> None:
    """Nobody decides during the first attempt.

    The work is done once, and the second attempt finds the release.
    """
    grid = sites(bench, num_clients=1)

    def approver() -> None:
        if time.seconds > SECONDS + 10:
            assert decide(bench, all=True) == 0

    time.approver = approver
    document = summary(bench.run(grid, num_clients=1, attempts=2))
    assert document["status"] == "completed"
    assert time.seconds == pytest.approx(SECONDS + 11, abs=2)
    answered = [read(reply.content).header for _, reply in grid.received if reply.has_content()]
    assert [header.attempt for header in answered if header.kind == "train"] == [2]
    entries = [entry["entry"] for entry in log_of(bench)]
    assert (entries.count("waiting"), entries.count("approved")) == (1, 1)


def test_unreleased_reply_waits_for_resumption(bench: Bench, time: Time) -> None:
    from strategies.base.rounds import RunFailed

    with pytest.raises(RunFailed, match="Flower reports error"):
        bench.run(sites(bench, num_clients=1), num_clients=1, attempts=2)
    assert time.seconds == pytest.approx(2 * SECONDS)
    (folder,) = bench.runs()
    assert decide(bench, all=True) == 0
    document = summary(
        bench.run(sites(bench, num_clients=1), num_clients=1, attempts=2, resume_from=str(folder))
    )
    assert (document["status"], time.seconds) == ("completed", pytest.approx(2 * SECONDS))


# ----- texts --------------------------------------------------------------------------------------


def test_approval_shows_what_would_leave(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decide(bench) == 2
    assert "is not a directory" in capsys.readouterr().err
    with pytest.raises(NotDecidedError):
        OneSite(bench).ask()
    (waiting,) = undecided(bench)
    assert f"site-0: train of round 1 waits for approval as {waiting.id}" in capsys.readouterr().err
    assert decide(bench) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["id", "site", "run", "method"]
    tensors = sum(len(blob["tensors"]) for blob in waiting.blobs)
    assert row.split()[:8] == [
        waiting.id, "site-0", BY_HAND, "fedprllm", "1", "train", str(tensors),
        f"{waiting.num_bytes:,}",
    ]  # fmt: skip
    assert decide(bench, show=[waiting.id]) == 0
    shown = capsys.readouterr().out
    assert "attn.q.prune_mask: U64" in shown
    assert "seconds = " in shown
    for blob in waiting.blobs:
        assert blob["sha256"] in shown
    assert private_text(0)[:30] not in shown
    assert decide(bench, ids=["zz"]) == 2
    assert decide(bench, ids=[waiting.id], refuse=[waiting.id]) == 2
    assert "both approved and refused" in capsys.readouterr().err
    assert decide(bench, all=True) == 0
    assert capsys.readouterr().out.startswith(f"approved   {waiting.id}")
    assert decide(bench) == 0
    assert "No reply waits" in capsys.readouterr().out
    assert check_log({"where": str(state(bench)), "heads": []}) == 0
    assert "2 entries (1 approved, 1 waiting)" in capsys.readouterr().out


def test_decision_by_another_user_is_refused(
    bench: Bench, time: Time, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotDecidedError):
        OneSite(bench).ask()
    monkeypatch.setattr("client_app.policy.approval_command.os.geteuid", lambda: os.getuid() + 4321)
    assert decide(bench) == 2
    assert decide(bench, all=True) == 2
    assert f"but you are {os.getuid() + 4321}; run the command as" in capsys.readouterr().err
    assert [entry["entry"] for entry in log_of(bench)] == ["waiting"]


def test_a_simulated_node_holds_nothing() -> None:
    with pytest.raises(
        EspalierError, match="require-approval: nobody can approve replies of a simulated node"
    ):
        parse_node({"partition-id": 0, "require-approval": "all"}, simulated=True)
    with pytest.raises(EspalierError, match="require-approval = 'some'"):
        parse_node({"site": "a", "require-approval": "some"})

"""Replies that wait for approval.

Nothing leaves before its release, and what leaves is what the person saw.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from safetensors.numpy import load_file

import client_app.app
from client_app.policy import approval as hold
from client_app.policy.approval import StillHeldError
from client_app.policy.approval_command import decide as decide_on
from client_app.policy.approval_command import main as release
from client_app.policy.approval_command import waiting
from client_app.policy.egress_log import main as check_log
from espalier.errors import EspalierError
from espalier.messages.ledger import lifetime
from espalier.messages.message import SCHEMA_VERSION, Header, MessageBody
from espalier.messages.records import address, read
from espalier.settings.node import parse_node
from espalier.storage.hash_chain import chain_check
from espalier.storage.waiting_replies import Held, HeldReplies, held_at
from tests.bench import LOCAL_ONLY, Bench, Killed, private_text, summary
from tests.in_process import InProcessGrid
from tests.run_names import BY_HAND, named

SECONDS = 100.0
METHODS: dict[str, dict[str, Any]] = {
    "fedspallm": {"federation.rounds": 2},
    "fedpetuning": {
        "lora.rank": 8, "lora.targets": "all", "training.steps": 2, "training.batch-size": 2, "federation.rounds": 2,
    },
}  # fmt: skip
"""Settings of methods whose replies have several parts."""


class Time:
    """Clock that advances when a process waits for approval, and then calls ``approver``."""

    def __init__(self, approver: Callable[[], None]) -> None:
        self.seconds = 0.0
        self.approver = approver

    def pause(self, seconds: float) -> None:
        assert seconds > 0
        self.seconds += seconds
        self.approver()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Install a clock whose approver decides nothing, unless a test replaces it."""
    found = Time(lambda: None)
    monkeypatch.setattr(hold, "clock", lambda: found.seconds)
    monkeypatch.setattr(hold, "pause", found.pause)
    return found


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return a bench whose server treats its grid as a deployment."""
    monkeypatch.setattr("espalier.flower.shared_nodes.GRIDS", ())
    return Bench(tmp_path, "fedprllm", {"deadline-seconds": SECONDS}, num_clients=2)


def of_method(bench: Bench, method: str) -> Bench:
    bench.method = method
    bench.settings = bench.settings | METHODS[method]
    return bench


def state(bench: Bench) -> Path:
    return bench.folder / "state"


def sites(bench: Bench, holds: str = "tensors", **changes: Any) -> InProcessGrid:
    """Return a grid of real sites that share a state directory."""
    nodes = [
        {
            "site": f"site-{client}", "data-path": str(bench.folder / f"text-{client}.txt"), "model-path": str(bench.model),
            "min-tokens": 1, "state-dir": str(state(bench)), "require-approval": holds,
        }
        for client in range(bench.num_clients)
    ]  # fmt: skip
    grid = InProcessGrid(client_app.app.app, nodes, bench.config(**changes))
    grid.simulated = False
    return grid


def decide(bench: Bench, **words: Any) -> int:
    """Run ``espalier release``."""
    return release(
        {
            "state_dir": str(state(bench)),
            "ids": [],
            "all": False,
            "refuse": [],
            "reason": "",
            "show": [],
            **words,
        }
    )


def undecided(bench: Bench) -> list[Held]:
    return [held for _, held in waiting(state(bench))[0]]


def log_of(bench: Bench, site: str = "site-0") -> list[dict[str, Any]]:
    (path,) = (state(bench) / "egress").glob(f"*-{site}.jsonl")
    assert chain_check(path).fault == ""
    return [json.loads(line) for line in path.read_text().splitlines()]


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


class OneSite:
    """Real site whose replies wait for approval, with a server that sends handmade requests."""

    def __init__(self, bench: Bench, holds: str = "tensors", **changes: Any) -> None:
        self.bench = bench
        self.grid = sites(bench, holds, **changes)

    def ask(self, kind: str = "train", server_round: int = 1, **header: Any) -> MessageBody:
        fields = header.pop("fields", {})
        common = {
            "schema_version": SCHEMA_VERSION,
            "lineage": BY_HAND,
            "client": 0,
            "attempt": 1,
            "part": 0,
            "num_parts": 1,
        }
        values = (
            common
            | {"kind": kind, "method": self.bench.method, "server_round": server_round}
            | header
        )
        node_id, context = next(iter(self.grid.contexts.items()))
        message = address(
            MessageBody(Header.model_validate(values), fields), node_id, lifetime(SECONDS)
        )
        return read(self.grid.answer(message, context).content)


# ----- a run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_nothing_leaves_before_its_release(bench: Bench, time: Time, method: str) -> None:
    """All parts of a reply, also those that ``fetch`` requests, are shown and released together."""
    of_method(bench, method)
    plain = sites(bench, "")
    bench.run(plain)
    expected = [told(reply) for _, reply in plain.received]
    assert any(header.kind == "fetch" for header, _, _ in expected)

    shown = list[tuple[str, set[str]]]()
    grid = sites(bench)

    def approver() -> None:
        (held,) = undecided(bench)
        own = {blob["sha256"] for blob in held.blobs}
        place = (held.entry["client"], held.entry["round"])
        left = [read(reply.content).header for _, reply in grid.received]
        assert not [
            header
            for header in left
            if (header.client, header.server_round) == place and header.kind != "deliver"
        ]
        shown.append((held.entry["site"], own))
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
            assert kinds[place - 2 : place] == [("held", "train"), ("released", "train")]
            assert log[place]["released"] == log[place - 1]["hold"] == log[place - 2]["hold"]
        left = {
            blob["sha256"] for entry in log if entry["entry"] == "reply" for blob in entry["blobs"]
        }
        assert left == set().union(*(own for whose, own in shown if whose == site))


def test_refused_reply_loses_its_contribution(bench: Bench, time: Time) -> None:
    grid = sites(bench)

    def approver() -> None:
        (held,) = undecided(bench)
        words: dict[str, Any] = (
            {"ids": [held.id]}
            if held.entry["site"] == "site-0"
            else {"refuse": [held.id], "reason": "no"}
        )
        assert decide(bench, **words) == 0

    time.approver = approver
    document = summary(bench.run(grid, quorum=0.5))
    assert document["status"] == "completed"
    first, second = document["clients"]
    assert "blocked by the site: it was not approved" in json.dumps(second)
    assert "blocked" not in json.dumps(first)
    log = log_of(bench, "site-1")
    assert [entry["entry"] for entry in log] == ["reply", "held", "refused", "reply"]
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
    assert (entries.count("held"), entries.count("released")) == (1, 1)


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


# ----- one site -----------------------------------------------------------------------------------


def test_restarted_node_finds_held_and_decided(bench: Bench, time: Time) -> None:
    def killed() -> None:
        raise Killed

    time.approver = killed
    with pytest.raises(Killed):
        OneSite(bench).ask()
    assert decide(bench, all=True) == 0
    reply = OneSite(bench).ask(attempt=2)
    assert (reply.header.status, len(reply.blobs) > 0) == ("ok", True)
    assert [entry["entry"] for entry in log_of(bench)] == ["held", "released", "reply"]


def test_a_release_is_for_one_reply(bench: Bench, time: Time) -> None:
    """A reply that was computed again, or whose client state changed, needs a new release."""
    with pytest.raises(StillHeldError):
        OneSite(bench).ask()
    assert decide(bench, all=True) == 0
    (report,) = state(bench).glob(f"{BY_HAND}/site-0/r001/train.json")
    document = json.loads(report.read_text())
    document["report"]["seconds"] += 1.0
    report.write_text(json.dumps(document))
    with pytest.raises(StillHeldError):
        OneSite(bench).ask(attempt=2)
    assert [entry["entry"] for entry in log_of(bench)] == ["held", "released", "held"]


def test_a_decision_is_final(bench: Bench, time: Time) -> None:
    """A decision is final also for a person who listed the replies before it."""
    with pytest.raises(StillHeldError):
        OneSite(bench).ask()
    listed_before, _ = waiting(state(bench))
    assert decide(bench, refuse=[listed_before[0][1].id]) == 0
    with pytest.raises(EspalierError, match=r"was refused by .* which is final"):
        list(decide_on(state(bench), listed_before, True))
    assert [entry["entry"] for entry in log_of(bench)] == ["held", "refused"]
    assert OneSite(bench).ask(attempt=2).header.status == "failed"


def test_damaged_document_blocks_no_decision(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StillHeldError):
        OneSite(bench).ask()
    ((replies, held),) = waiting(state(bench))[0]
    damaged = replies.folder / f"{'0' * len(held.id)}.json"
    damaged.write_text("{}")
    assert decide(bench) == 2
    shown = capsys.readouterr()
    assert str(damaged) in shown.err
    assert held.id in shown.out
    assert decide(bench, all=True) == 2
    assert capsys.readouterr().out.startswith(f"released   {held.id}")
    assert decide(bench) == 2
    assert "No reply waits" not in capsys.readouterr().out
    damaged.unlink()
    assert decide(bench) == 0
    assert OneSite(bench).ask(attempt=2).header.status == "ok"


def test_damaged_document_withholds_no_blob(bench: Bench, time: Time) -> None:
    with pytest.raises(StillHeldError):
        OneSite(bench).ask()
    ((replies, held),) = waiting(state(bench))[0]
    assert decide(bench, all=True) == 0
    (replies.folder / f"{'0' * len(held.id)}.json").write_text("{}")
    (replies.folder / f"{'1' * len(held.id)}.json").write_text("{")
    assert replies.blobs_decided(held.entry["round"]) == {
        blob["sha256"]: True for blob in held.blobs
    }


def test_undecidable_reply_does_not_block_others(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs have one waiting reply each: one has lost a file, the other is released."""
    for run in (BY_HAND, named("another")):
        with pytest.raises(StillHeldError):
            OneSite(bench).ask(lineage=run)
    first, second = undecided(bench)
    (lost,) = [replies for replies in held_at(state(bench)) if replies.has(first)]
    shutil.rmtree(lost.folder / first.id)
    assert decide(bench, all=True) == 2
    shown = capsys.readouterr()
    assert "is missing or differs from the reply that waits; remove" in shown.err
    assert second.id in shown.out
    assert [held.id for held in undecided(bench)] == [first.id]


def test_ids_together_with_all_are_refused(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StillHeldError):
        OneSite(bench).ask()
    (held,) = undecided(bench)
    assert decide(bench, ids=["zzzz"], all=True) == 2
    assert "release: zzzz --all: name replies or give --all, not both" in capsys.readouterr().err
    assert len(undecided(bench)) == 1
    # The same reply is named twice.
    assert decide(bench, ids=[held.id, held.id[:6]]) == 0


def test_unwritable_decision_does_not_count(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StillHeldError):
        OneSite(bench).ask()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(HeldReplies, "decide", full)
        assert decide(bench, all=True) == 2
    assert (
        "the reply still waits: free some disk space, and decide again" in capsys.readouterr().err
    )
    assert len(undecided(bench)) == 1
    assert decide(bench, all=True) == 0
    assert [entry["entry"] for entry in log_of(bench)] == ["held", "released", "released"]


def test_reply_id_needs_four_characters(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StillHeldError):
        OneSite(bench).ask()
    assert decide(bench, ids=[""]) == 2
    assert "give at least 4 characters of an id" in capsys.readouterr().err
    assert [entry["entry"] for entry in log_of(bench)] == ["held"]


def test_a_file_that_was_changed_is_held_anew(bench: Bench, time: Time) -> None:
    """A damaged reply can be removed.

    The stored answer of the round then waits for approval again.
    """
    with pytest.raises(StillHeldError):
        OneSite(bench).ask()
    ((replies, held),) = waiting(state(bench))[0]
    for file in (replies.folder / held.id).glob("*.blob"):
        with open(file, "r+b") as content:
            content.write(b"spoilt")
    assert decide(bench, all=True) == 2
    (replies.folder / f"{held.id}.json").unlink()
    with pytest.raises(StillHeldError):
        OneSite(bench).ask(attempt=2)
    assert decide(bench, all=True) == 0
    assert OneSite(bench).ask(attempt=3).header.status == "ok"


def test_a_file_that_was_changed_is_not_released(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StillHeldError):
        OneSite(bench).ask()
    ((replies, held),) = waiting(state(bench))[0]
    file = sorted((replies.folder / held.id).glob("*.blob"))[0]
    assert load_file(file)
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert decide(bench, all=True) == 2
    assert "is missing or differs from the reply that waits" in capsys.readouterr().err
    file.write_bytes(content)
    document = replies.folder / f"{held.id}.json"
    text = document.read_text()
    document.write_text(text.replace('"round": 1', '"round": 2'))
    assert decide(bench, all=True) == 2
    assert "its checksum does not match" in capsys.readouterr().err
    document.write_text(text)
    assert decide(bench, ids=[held.id[:4]]) == 0
    (decided,) = replies.folder.glob("*-decided.json")
    decided.write_text(decided.read_text().replace('"released": true', '"released": false'))
    reply = OneSite(bench).ask(attempt=2)
    assert (reply.header.status, reply.blobs) == ("failed", {})
    assert [entry["entry"] for entry in log_of(bench)] == ["held", "released", "reply"]


def test_what_is_not_released_cannot_be_fetched(bench: Bench, time: Time) -> None:
    site = OneSite(of_method(bench, "fedpetuning"))
    with pytest.raises(StillHeldError):
        site.ask(fields={"rank_limit": 8})
    (held,) = undecided(bench)
    second, *_ = held.later
    asked = {"blob_sha256": [second["sha256"]], "rank_limit": 8, "rank": 8}
    with pytest.raises(StillHeldError):
        site.ask("fetch", part=1, fields=asked)
    # The server may send a fetch before the previous one is answered.
    assert time.seconds == pytest.approx(3 * SECONDS)
    assert decide(bench, refuse=[held.id]) == 0
    assert "was not approved" in str(site.ask("fetch", part=1, fields=asked).fields["reason"])


@pytest.mark.parametrize(("holds", "waits"), [("tensors", False), ("all", True)])
def test_numbers_wait_too_where_the_owner_says_so(
    bench: Bench, time: Time, holds: str, waits: bool
) -> None:
    """The local baseline stays at the site, but the time that it took is a number."""
    bench = of_method(bench, "fedpetuning")
    bench.settings |= LOCAL_ONLY
    site = OneSite(bench, holds)
    asked = {"rank_limit": 8, "fits": False}
    assert site.ask("enrol", 0).header.status == "ok"
    if waits:
        with pytest.raises(StillHeldError):
            site.ask("alone", 2, fields=asked)
    else:
        assert site.ask("alone", 2, fields=asked).fields["seconds"] > 0
    # An error text does not wait for approval.
    assert site.ask("alone", 7, fields=asked).header.status == "failed"


# ----- texts --------------------------------------------------------------------------------------


def test_approval_shows_what_would_leave(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decide(bench) == 2
    assert "is not a directory" in capsys.readouterr().err
    with pytest.raises(StillHeldError):
        OneSite(bench).ask()
    (held,) = undecided(bench)
    assert f"site-0: train of round 1 waits for approval as {held.id}" in capsys.readouterr().err
    assert decide(bench) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["id", "site", "run", "method"]
    tensors = sum(len(blob["tensors"]) for blob in held.blobs)
    assert row.split()[:8] == [
        held.id, "site-0", BY_HAND, "fedprllm", "1", "train", str(tensors), f"{held.num_bytes:,}",
    ]  # fmt: skip
    assert decide(bench, show=[held.id]) == 0
    shown = capsys.readouterr().out
    assert "attn.q.prune_mask: U64" in shown
    assert "seconds = " in shown
    for blob in held.blobs:
        assert blob["sha256"] in shown
    assert private_text(0)[:30] not in shown
    assert decide(bench, ids=["zz"]) == 2
    assert decide(bench, ids=[held.id], refuse=[held.id]) == 2
    assert "both released and refused" in capsys.readouterr().err
    assert decide(bench, all=True) == 0
    assert capsys.readouterr().out.startswith(f"released   {held.id}")
    assert decide(bench) == 0
    assert "No reply waits" in capsys.readouterr().out
    assert check_log({"where": str(state(bench)), "heads": []}) == 0
    assert "2 entries (1 held, 1 released)" in capsys.readouterr().out


def test_decision_by_another_user_is_refused(
    bench: Bench, time: Time, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StillHeldError):
        OneSite(bench).ask()
    monkeypatch.setattr("client_app.policy.approval_command.os.geteuid", lambda: os.getuid() + 4321)
    assert decide(bench) == 2
    assert decide(bench, all=True) == 2
    assert f"but you are {os.getuid() + 4321}; run the command as" in capsys.readouterr().err
    assert [entry["entry"] for entry in log_of(bench)] == ["held"]


def test_a_simulated_node_holds_nothing() -> None:
    with pytest.raises(
        EspalierError, match="require-approval: nobody can approve replies of a simulated node"
    ):
        parse_node({"partition-id": 0, "require-approval": "all"}, simulated=True)
    with pytest.raises(EspalierError, match="require-approval = 'some'"):
        parse_node({"site": "a", "require-approval": "some"})

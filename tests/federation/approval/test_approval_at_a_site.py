"""Approval at one site: restarts, decisions that do not count, and changed files."""

import json
import shutil

import pytest
from safetensors.numpy import load_file

from client_app.policy.approval import NotDecidedError
from client_app.policy.approval_command import decide as decide_on
from client_app.policy.approval_command import waiting_in
from espalier.errors import EspalierError
from espalier.storage.waiting_replies import WaitingReplies, replies_at
from tests.bench import LOCAL_ONLY, Bench, Killed
from tests.federation.approval.approving_sites import (
    SECONDS,
    OneSite,
    Time,
    decide,
    log_of,
    of_method,
    state,
    undecided,
)
from tests.run_names import BY_HAND, named


def test_restarted_node_finds_held_and_decided(bench: Bench, time: Time) -> None:
    def killed() -> None:
        raise Killed

    time.approver = killed
    with pytest.raises(Killed):
        OneSite(bench).ask()
    assert decide(bench, all=True) == 0
    reply = OneSite(bench).ask(attempt=2)
    assert (reply.header.status, len(reply.blobs) > 0) == ("ok", True)
    assert [entry["entry"] for entry in log_of(bench)] == ["waiting", "approved", "reply"]


def test_a_release_is_for_one_reply(bench: Bench, time: Time) -> None:
    """A reply that was computed again, or whose client state changed, needs a new release."""
    with pytest.raises(NotDecidedError):
        OneSite(bench).ask()
    assert decide(bench, all=True) == 0
    (report,) = state(bench).glob(f"{BY_HAND}/site-0/r001/train.json")
    document = json.loads(report.read_text())
    document["report"]["seconds"] += 1.0
    report.write_text(json.dumps(document))
    with pytest.raises(NotDecidedError):
        OneSite(bench).ask(attempt=2)
    assert [entry["entry"] for entry in log_of(bench)] == ["waiting", "approved", "waiting"]


def test_a_decision_is_final(bench: Bench, time: Time) -> None:
    """A decision is final also for a person who listed the replies before it."""
    with pytest.raises(NotDecidedError):
        OneSite(bench).ask()
    listed_before, _ = waiting_in(state(bench))
    assert decide(bench, refuse=[listed_before[0][1].id]) == 0
    with pytest.raises(EspalierError, match=r"was refused by .* which is final"):
        list(decide_on(state(bench), listed_before, True))
    assert [entry["entry"] for entry in log_of(bench)] == ["waiting", "refused"]
    assert OneSite(bench).ask(attempt=2).header.status == "failed"


def test_damaged_document_blocks_no_decision(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotDecidedError):
        OneSite(bench).ask()
    ((replies, waiting),) = waiting_in(state(bench))[0]
    damaged = replies.folder / f"{'0' * len(waiting.id)}.json"
    damaged.write_text("{}")
    assert decide(bench) == 2
    shown = capsys.readouterr()
    assert str(damaged) in shown.err
    assert waiting.id in shown.out
    assert decide(bench, all=True) == 2
    assert capsys.readouterr().out.startswith(f"approved   {waiting.id}")
    assert decide(bench) == 2
    assert "No reply waits" not in capsys.readouterr().out
    damaged.unlink()
    assert decide(bench) == 0
    assert OneSite(bench).ask(attempt=2).header.status == "ok"


def test_damaged_document_withholds_no_blob(bench: Bench, time: Time) -> None:
    with pytest.raises(NotDecidedError):
        OneSite(bench).ask()
    ((replies, waiting),) = waiting_in(state(bench))[0]
    assert decide(bench, all=True) == 0
    (replies.folder / f"{'0' * len(waiting.id)}.json").write_text("{}")
    (replies.folder / f"{'1' * len(waiting.id)}.json").write_text("{")
    assert replies.blobs_decided(waiting.entry["round"]) == {
        blob["sha256"]: True for blob in waiting.blobs
    }


def test_undecidable_reply_does_not_block_others(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs have one waiting reply each: one has lost a file, the other is approved."""
    for run in (BY_HAND, named("another")):
        with pytest.raises(NotDecidedError):
            OneSite(bench).ask(lineage=run)
    first, second = undecided(bench)
    (lost,) = [replies for replies in replies_at(state(bench)) if replies.has(first)]
    shutil.rmtree(lost.folder / first.id)
    assert decide(bench, all=True) == 2
    shown = capsys.readouterr()
    assert "is missing or differs from the reply that waits; remove" in shown.err
    assert second.id in shown.out
    assert [waiting.id for waiting in undecided(bench)] == [first.id]


def test_ids_together_with_all_are_refused(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotDecidedError):
        OneSite(bench).ask()
    (waiting,) = undecided(bench)
    assert decide(bench, ids=["zzzz"], all=True) == 2
    assert "approve: zzzz --all: name replies or give --all, not both" in capsys.readouterr().err
    assert len(undecided(bench)) == 1
    # The same reply is named twice.
    assert decide(bench, ids=[waiting.id, waiting.id[:6]]) == 0


def test_unwritable_decision_does_not_count(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotDecidedError):
        OneSite(bench).ask()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(WaitingReplies, "decide", full)
        assert decide(bench, all=True) == 2
    assert (
        "the reply still waits: free some disk space, and decide again" in capsys.readouterr().err
    )
    assert len(undecided(bench)) == 1
    assert decide(bench, all=True) == 0
    assert [entry["entry"] for entry in log_of(bench)] == ["waiting", "approved", "approved"]


def test_reply_id_needs_four_characters(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotDecidedError):
        OneSite(bench).ask()
    assert decide(bench, ids=[""]) == 2
    assert "give at least 4 characters of an id" in capsys.readouterr().err
    assert [entry["entry"] for entry in log_of(bench)] == ["waiting"]


def test_a_file_that_was_changed_is_held_anew(bench: Bench, time: Time) -> None:
    """A damaged reply can be removed.

    The stored answer of the round then waits for approval again.
    """
    with pytest.raises(NotDecidedError):
        OneSite(bench).ask()
    ((replies, waiting),) = waiting_in(state(bench))[0]
    for file in (replies.folder / waiting.id).glob("*.blob"):
        with open(file, "r+b") as content:
            content.write(b"spoilt")
    assert decide(bench, all=True) == 2
    (replies.folder / f"{waiting.id}.json").unlink()
    with pytest.raises(NotDecidedError):
        OneSite(bench).ask(attempt=2)
    assert decide(bench, all=True) == 0
    assert OneSite(bench).ask(attempt=3).header.status == "ok"


def test_a_file_that_was_changed_is_not_released(
    bench: Bench, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotDecidedError):
        OneSite(bench).ask()
    ((replies, waiting),) = waiting_in(state(bench))[0]
    file = sorted((replies.folder / waiting.id).glob("*.blob"))[0]
    assert load_file(file)
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert decide(bench, all=True) == 2
    assert "is missing or differs from the reply that waits" in capsys.readouterr().err
    file.write_bytes(content)
    document = replies.folder / f"{waiting.id}.json"
    text = document.read_text()
    document.write_text(text.replace('"round": 1', '"round": 2'))
    assert decide(bench, all=True) == 2
    assert "its checksum does not match" in capsys.readouterr().err
    document.write_text(text)
    assert decide(bench, ids=[waiting.id[:4]]) == 0
    (decided,) = replies.folder.glob("*-decided.json")
    decided.write_text(decided.read_text().replace('"approved": true', '"approved": false'))
    reply = OneSite(bench).ask(attempt=2)
    assert (reply.header.status, reply.blobs) == ("failed", {})
    assert [entry["entry"] for entry in log_of(bench)] == ["waiting", "approved", "reply"]


def test_what_is_not_released_cannot_be_fetched(bench: Bench, time: Time) -> None:
    site = OneSite(of_method(bench, "fedpetuning"))
    with pytest.raises(NotDecidedError):
        site.ask(fields={"rank_limit": 8})
    (waiting,) = undecided(bench)
    second, *_ = waiting.later
    asked = {"blob_sha256": [second["sha256"]], "rank_limit": 8, "rank": 8}
    with pytest.raises(NotDecidedError):
        site.ask("fetch", part=1, fields=asked)
    # The server may send a fetch before the previous one is answered.
    assert time.seconds == pytest.approx(3 * SECONDS)
    assert decide(bench, refuse=[waiting.id]) == 0
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
        with pytest.raises(NotDecidedError):
            site.ask("local_baseline", 2, fields=asked)
    else:
        assert site.ask("local_baseline", 2, fields=asked).fields["seconds"] > 0
    # An error text does not wait for approval.
    assert site.ask("local_baseline", 7, fields=asked).header.status == "failed"

"""Secure sums of pooled pruning: promises, and servers that break the protocol."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
from flwr.app import Message

from espalier.messages.message import MessageBody
from espalier.messages.records import address, read
from tests.bench import LOCAL_ONLY, Bench, model_files
from tests.federation.secure_sum.pooled_sums import METHOD, SETTINGS, Change
from tests.federation.secure_sum.test_lying_clients import _EndError
from tests.federation.secure_sum.test_summands import TUNED
from tests.in_process import InProcessGrid
from tests.methods.promises.hidden_tensors import HiddenTensors
from tests.methods.promises.secure_sum_promises import SECURE, SecureSumPromises


class TestSecureSum(HiddenTensors, SecureSumPromises):
    method = METHOD
    settings: ClassVar[dict[str, Any]] = SETTINGS
    last_round = 1

    def test_iterative_rounds_give_the_same_masks(self, secure: Bench) -> None:
        changes = {"pruning__strategy": "iterative", "pooled_pruning__weighting": "equal"}
        secret = secure.run(**changes)
        plain = secure.run(**changes, federation__secure_sum=False)
        assert model_files(secret) == model_files(plain)


def own_key(fields: dict[str, Any]) -> None:
    fields["mask_keys"][0] = "ab" * 32


def other_name(fields: dict[str, Any]) -> None:
    fields["sites"][0] = "another"


def low_threshold(fields: dict[str, Any]) -> None:
    fields["threshold"] = 2


def two_clients(fields: dict[str, Any]) -> None:
    for name in ("clients", "sites", "mask_keys", "share_keys", "signatures"):
        del fields[name][2:]
    fields["threshold"] = 2


def one_key_twice(fields: dict[str, Any]) -> None:
    fields["mask_keys"][2] = fields["mask_keys"][1]


def few_members(fields: dict[str, Any]) -> None:
    fields["members"] = [0, 1]
    for name in ("sources", "shares", "seed_sha256", "key_sha256"):
        del fields[name][1:]


def strange_member(fields: dict[str, Any]) -> None:
    fields["members"] = [0, 1, 2, 3, 7]


def a_source_less(fields: dict[str, Any]) -> None:
    for name in ("sources", "shares", "seed_sha256", "key_sha256"):
        del fields[name][1:]


def few_included(fields: dict[str, Any]) -> None:
    fields["included"] = [0, 1]


def strange_included(fields: dict[str, Any]) -> None:
    fields["included"] = [0, 1, 2, 3, 7]


def others_included(fields: dict[str, Any]) -> None:
    fields["included"] = [1, 2, 3]


def another_list(fields: dict[str, Any]) -> None:
    fields |= {"included": [0, 1, 2], "seeds_of": [0, 1, 2], "keys_of": [3]}
    fields |= {"confirmed": [1, 2], "tags": fields["tags"][:2]}


def few_confirmations(fields: dict[str, Any]) -> None:
    fields |= {"confirmed": [1], "tags": fields["tags"][:1]}


def tags_of_others(fields: dict[str, Any]) -> None:
    fields["tags"] = fields["tags"][::-1]


def own_confirmation(fields: dict[str, Any]) -> None:
    fields["confirmed"] = [0, 1, 2]


def both_secrets(fields: dict[str, Any]) -> None:
    fields["keys_of"] = [1]


def not_included(fields: dict[str, Any]) -> None:
    fields |= {"included": [1, 2, 3], "seeds_of": [1, 2, 3], "keys_of": []}


def own_mask_key(fields: dict[str, Any]) -> None:
    fields |= {"included": [1, 2, 3], "seeds_of": [1, 2, 3], "keys_of": [0]}


def other_session(fields: dict[str, Any]) -> None:
    fields["session"] = "0" * 32


LIES: dict[str, dict[Change, str]] = {
    "shares": {
        own_key: "lists other keys for this client than its own",
        other_name: "lists other keys for this client than its own",
        low_threshold: "must be more than two thirds of them",
        two_clients: "2 clients, a sum needs 3 to 900",
        one_key_twice: "two clients have one site, or one key",
        other_session: "has no keys of this session",
    },
    "masked": {
        few_members: "2 members, the sum needs 3",
        strange_member: "not clients of this session",
        a_source_less: "not this client's neighbours",
        other_session: "has no keys of this session",
    },
    "confirm": {
        few_included: "the sum of 2 clients; it needs 3",
        strange_included: "the sum of 5 clients; it needs 3 of those that sent shares",
        others_included: "the receiver must be one of them",
        other_session: "has no keys of this session",
    },
    "unmask": {
        another_list: "the list of clients differs from the one that this client confirmed",
        few_confirmations: "2 clients confirmed the list of the sum; 3 are needed",
        tags_of_others: "2 clients confirmed the list of the sum; 3 are needed",
        own_confirmation: "a confirmation is not of another client in the sum",
        both_secrets: "or for the key of one that is",
        not_included: "the receiver is not in the sum",
        own_mask_key: "the receiver is not in the sum",
        other_session: "has no keys of this session",
    },
}
"""Changes to the fields of a request to client 0, and the client's reason to refuse it."""


def asked(grid: InProcessGrid, body: MessageBody) -> MessageBody:
    """Return the answer of client 0 to a request."""
    node, context = next(iter(grid.contexts.items()))
    return read(grid.answer(address(body, node, 60.0), context).content)


def copied(body: MessageBody) -> MessageBody:
    fields = {
        name: list(value) if isinstance(value, list) else value
        for name, value in body.fields.items()
    }
    return MessageBody(body.header, fields, body.blobs)


def test_a_client_refuses_wrong_lists(bench: Bench, plain: dict[bool, dict[str, bytes]]) -> None:
    """Each lie comes before the true request, which the client then answers."""
    grid = bench.grid()
    refused = dict[tuple[str, str], str]()

    def lie(message: Message) -> None:
        body = read(message.content)
        header = body.header
        if header.client or header.part:
            return
        for change in LIES.get(header.kind, ()):
            told = copied(body)
            change(told.fields)
            reply = asked(grid, told)
            assert reply.header.status == "failed", change.__name__
            refused[header.kind, change.__name__] = reply.fields["reason"]

    grid.before_push = lie
    folder = bench.run(grid)
    for kind, changes in LIES.items():
        for change, reason in changes.items():
            assert reason in refused[kind, change.__name__]
    assert model_files(folder) == plain[True]


def test_a_client_answers_each_step_once(bench: Bench) -> None:
    """It repeats an answer, and refuses other lists, earlier steps and new sessions."""
    grid = bench.grid()
    seen = dict[str, MessageBody]()
    answers = dict[str, MessageBody]()

    def note(message: Message) -> None:
        body = read(message.content)
        if body.header.client or body.header.part:
            return
        kind = body.header.kind
        seen[kind] = body
        if kind in LIES:
            answers[kind] = asked(grid, body)
            assert asked(grid, body) == answers[kind]
        if kind == "masked":
            # Another list of a step that is answered.
            other = copied(seen["shares"])
            other.fields["threshold"] = 4
            assert "answered another request of this session" in _reason(grid, other)
        if kind == "unmask":
            other = copied(body)
            another_list(other.fields)
            assert "answered another request of this session" in _reason(grid, other)
            # After a resume other clients may confirm; the answer stays the same.
            fewer = copied(body)
            few_confirmations(fewer.fields)
            assert asked(grid, fewer).fields == answers[kind].fields
            assert "arrived out of order" in _reason(grid, seen["masked"])
            assert "arrived out of order" in _reason(grid, seen["shares"])
            fresh = copied(seen["train"])
            assert asked(grid, fresh).header.status == "ok"
            fresh.fields["session"] = "1" * 32
            assert "has helped to unmask a sum of round 1" in _reason(grid, fresh)
            text = "".join(file.read_text() for file in bench.folder.rglob("secure-sum.json"))
            (own,) = bench.folder.glob("state/*/node-00000/r001/secure-sum.json")
            assert "secrets" in text
            assert "secrets" not in own.read_text()

    grid.before_push = note
    bench.run(grid)
    assert set(answers) == set(LIES)


def test_an_old_round_is_not_summed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of old rounds are deleted; a second sum of such a round is refused all the same.

    A message on the last round makes the client delete them early.
    """
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    equal = {"federation.client-weights": "equal", "federation.rounds": 3}
    bench = Bench(tmp_path, "fedpetuning", TUNED | LOCAL_ONLY | SECURE | equal)
    grid = bench.grid()
    first = list[MessageBody]()

    def ask(message: Message) -> None:
        body = read(message.content)
        if body.header.kind == "train" and not body.header.client:
            first.append(copied(body))
        if body.header.server_round < 2:
            return
        header = body.header.model_copy(
            update={"kind": "local_baseline", "client": 0, "server_round": 3, "part": 0}
        )
        assert asked(grid, MessageBody(header, {})).header.status == "ok"
        assert not list(tmp_path.glob("state/*/node-00000/r001"))
        again = copied(first[0])
        again.fields["session"] = "1" * 32
        assert "has helped to unmask a sum of round 1" in _reason(grid, again)
        raise _EndError

    grid.before_push = ask
    with pytest.raises(_EndError):
        bench.run(grid)


def _reason(grid: InProcessGrid, body: MessageBody) -> str:
    return str(asked(grid, body).fields.get("reason", ""))

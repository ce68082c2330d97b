"""Secure sums of pooled pruning: promises, and servers and clients that break the protocol."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from flwr.app import Message

from espalier.messages.message import MessageBody
from espalier.messages.records import address, read, write
from strategies.base.rounds import RunFailed
from tests.bench import LOCAL_ONLY, Bench, Home, home, model_files, summary
from tests.federation.secure_sum.test_summands import TUNED
from tests.in_process import InProcessGrid
from tests.methods.promises.secure_sum_promises import SECURE, SecureSumPromises, silent_from

Change = Callable[[dict[str, Any]], None]
METHOD = "pooled-pruning"
SETTINGS: dict[str, Any] = {"pooled-pruning.sparsity": 0.5}


class TestSecureSum(SecureSumPromises):
    method = METHOD
    settings: ClassVar[dict[str, Any]] = SETTINGS
    last_round = 1

    def test_iterative_rounds_give_the_same_masks(self, secure: Bench) -> None:
        changes = {"pooled_pruning__strategy": "iterative", "pooled_pruning__weighting": "equal"}
        secret = secure.run(**changes)
        plain = secure.run(**changes, federation__secure_sum=False)
        assert model_files(secret) == model_files(plain)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def bench(tmp_path: Path, shared: Home, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
    return Bench(tmp_path, METHOD, SETTINGS | SECURE, home=shared)


@pytest.fixture(scope="module")
def plain(shared: Home, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, bytes]]:
    """Return the results of plain sums with all clients (True) and without client 2 (False)."""
    found = {}
    for everybody in (True, False):
        with pytest.MonkeyPatch.context() as monkeypatch:
            folder = tmp_path_factory.mktemp("plain")
            monkeypatch.setenv("ESPALIER_STATE_DIR", str(folder / "state"))
            monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
            one = Bench(folder, METHOD, SETTINGS, home=shared)
            grid = one.grid()
            if not everybody:
                grid.tamper[2] = silent_from("train")
            found[everybody] = model_files(one.run(grid))
    return found


# ----- a server that lies -------------------------------------------------------------------------


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
        another_list: "another list of the sum than this client confirmed",
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
            assert "does not follow" in _reason(grid, seen["masked"])
            assert "does not follow" in _reason(grid, seen["shares"])
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
            update={"kind": "alone", "client": 0, "server_round": 3, "part": 0}
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


# ----- clients that lie ---------------------------------------------------------------------------


def changed(kind: str, change: Change, grid: InProcessGrid, client: int) -> None:
    """Change the fields of a client's replies of a kind."""

    def tamper(request: Message, reply: Message) -> Message:
        body = read(reply.content)
        if body.header.kind != kind or body.header.status == "failed":
            return reply
        change(body.fields)
        return Message(write(body), reply_to=request)

    grid.tamper[client] = tamper


def garbled_shares(fields: dict[str, Any]) -> None:
    fields["shares"] = ["00" * (len(text) // 2) for text in fields["shares"]]


def wrong_hashes(fields: dict[str, Any]) -> None:
    fields["key_sha256"] = fields["key_sha256"][::-1]


def zero_key(fields: dict[str, Any]) -> None:
    fields["share_key"] = "0" * 64


def wrong_share(fields: dict[str, Any]) -> None:
    fields["seeds"][1] = "ab" * 16


def wrong_tags(fields: dict[str, Any]) -> None:
    fields["tags"] = ["ab" * 32] * len(fields["tags"])


def wrong_own_seed(fields: dict[str, Any]) -> None:
    fields["own_seed"] = "ab" * 16


def wrong_seed(fields: dict[str, Any]) -> None:
    fields["own_sha256"] = "0" * 64


@pytest.mark.parametrize(
    ("kind", "change", "reason", "counts"),
    [
        ("shares", garbled_shares, "shares: 3 clients could not read the shares", False),
        ("shares", wrong_hashes, "shares: 3 clients could not read the shares", False),
        ("train", zero_key, "train: its public keys are not usable", False),
        ("unmask", wrong_share, "unmask: a share is not the one that its owner made", True),
        ("unmask", wrong_own_seed, "unmask: the seed of its mask is not the one that it", True),
    ],
)
def test_a_lying_client_costs_itself(
    bench: Bench,
    plain: dict[bool, dict[str, bytes]],
    kind: str,
    change: Change,
    reason: str,
    counts: bool,
) -> None:
    grid = bench.grid()
    changed(kind, change, grid, 2)
    folder = bench.run(grid)
    client = summary(folder)["clients"][2]
    assert (client["status"], client["reason"].startswith(reason)) == ("dropped", True)
    assert model_files(folder) == plain[counts]


def test_wrong_confirmations_of_one_client_cost_nothing(
    bench: Bench, plain: dict[bool, dict[str, bytes]]
) -> None:
    """Three of four tags are right, which is the threshold."""
    grid = bench.grid()
    changed("confirm", wrong_tags, grid, 2)
    folder = bench.run(grid)
    assert [client["status"] for client in summary(folder)["clients"]] == ["completed"] * 4
    assert model_files(folder) == plain[True]


class _EndError(Exception):
    """End of a run after an attack."""


def test_a_server_cannot_tell_two_lists(bench: Bench) -> None:
    """It tells client 0 that it is in the sum, and the others that it dropped out.

    With the seed from client 0, and shares of its mask key from the others, the server would know
    all masks of client 0. But nobody confirms the list of client 0.
    """
    grid = bench.grid()

    def attack(message: Message) -> None:
        body = read(message.content)
        if body.header.kind != "confirm":
            return
        nodes = list(grid.contexts)

        def told(client: int, kind: str, **fields: Any) -> MessageBody:
            header = body.header.model_copy(update={"kind": kind, "client": client})
            request = MessageBody(header, {"session": body.fields["session"], **fields})
            to = address(request, nodes[client], 60.0)
            return read(grid.answer(to, grid.contexts[nodes[client]]).content)

        others = [1, 2, 3]
        tags = {one: told(one, "confirm", included=others).fields["tags"] for one in others}
        assert len(told(0, "confirm", included=[0, *others]).fields["tags"]) == 3
        mine = {"included": [0, *others], "seeds_of": [0, *others], "keys_of": []}
        stolen = [tags[one][0] for one in others]
        answer = told(0, "unmask", **mine, confirmed=others, tags=stolen)
        assert "1 clients confirmed the list of the sum; 3 are needed" in str(answer.fields)
        again = told(1, "confirm", included=[0, *others])
        assert "answered another request of this session" in str(again.fields)
        # The sum of the others may be unmasked, and has nothing of client 0.
        own = [tags[2][0], tags[3][0]]
        theirs = {"included": others, "seeds_of": others, "keys_of": [0]}
        good = told(1, "unmask", **theirs, confirmed=[2, 3], tags=own)
        assert (len(good.fields["seeds"]), len(good.fields["keys"])) == (3, 1)
        raise _EndError

    grid.before_push = attack
    with pytest.raises(_EndError):
        bench.run(grid)


def test_wrong_polynomial_ends_the_run_without_a_sum(bench: Bench) -> None:
    grid = bench.grid()
    changed("shares", wrong_seed, grid, 2)
    with pytest.raises(
        RunFailed, match="the shares that node-00002 made do not fit its keys; the sum stays masked"
    ):
        bench.run(grid)


# ----- keys of sites ------------------------------------------------------------------------------


SITES = ("hospital-a", "hospital-b", "hospital-c")


@pytest.fixture
def deployment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return a bench whose server treats its grid as a deployment, with keys for three sites."""
    from espalier.cli.keys import make_keys

    monkeypatch.setattr("espalier.flower.shared_nodes.GRIDS", ())
    list(make_keys(bench.folder / "keys", ["localhost"], SITES, 365))
    bench.num_clients = 3
    bench.settings = bench.settings | {
        "site-keys": str(bench.folder / "keys" / "server" / "sites"),
        "quorum": 0.6,
    }
    # A site gets the public keys of the others from them, and not from the server.
    shutil.copytree(bench.folder / "keys" / "server" / "sites", bench.folder / "peers")
    return bench


def sites_of(bench: Bench, changes: dict[str, Any] | None = None, **more: Any) -> InProcessGrid:
    """Return a grid of real sites with their keys and the public keys of the others.

    ``changes`` are those of the run's settings, ``more`` those of the nodes' configuration.
    """
    nodes = [
        {
            "site": site,
            "site-key": str(bench.folder / "keys" / "sites" / site / f"{site}.key"),
            "peer-keys": str(bench.folder / "peers"),
            "data-path": str(bench.folder / f"text-{number}.txt"),
            "model-path": str(bench.model),
            "min-tokens": 1,
            "state-dir": str(bench.folder / "state"),
            **{key.replace("_", "-"): value for key, value in more.items()},
        }
        for number, site in enumerate(SITES)
    ]
    grid = InProcessGrid(bench.grid().app, nodes, bench.config(**(changes or {})))
    grid.simulated = False
    return grid


def test_sites_sum_with_signed_keys(deployment: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(deployment.folder / "other")
    folder = deployment.run(sites_of(deployment, require_site_keys=True, min_secure_sum=3))
    assert [client["status"] for client in summary(folder)["clients"]] == ["completed"] * 3
    assert "nothing shows that the keys" not in capsys.readouterr().err
    changes = {"federation__secure_sum": False, "site_keys": ""}
    plain = deployment.run(sites_of(deployment, changes, state_dir=other), **changes)
    assert model_files(folder) == model_files(plain)


def test_a_server_cannot_replace_keys_of_a_site(deployment: Bench) -> None:
    """It gives hospital-a its own keys in place of those of hospital-b."""
    grid = sites_of(deployment)
    answer = grid.answer

    def between(message: Message, context: Any) -> Message:
        body = read(message.content)
        if body.header.kind == "shares" and context.node_config["site"] == SITES[0]:
            body.fields["mask_keys"][1] = "ab" * 32
            message.content = write(body)
        return answer(message, context)

    grid.answer = between  # type: ignore[method-assign]
    with pytest.raises(
        RunFailed, match="the keys of site hospital-b are not signed with its key"
    ) as error:
        deployment.run(grid)
    assert "nothing was unmasked" in str(error.value)


def test_keys_of_unknown_sites_are_refused(deployment: Bench) -> None:
    (deployment.folder / "peers" / "hospital-c.key.pub").unlink()
    with pytest.raises(RunFailed, match=r"put hospital-c\.key\.pub there"):
        deployment.run(sites_of(deployment))


def test_a_site_without_peer_keys_warns(
    deployment: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment.run(sites_of(deployment, peer_keys=""))
    assert capsys.readouterr().err.count("nothing shows that the keys of this secure sum are") == 3


@pytest.mark.parametrize(
    ("more", "changes", "reason"),
    [
        (
            {"require_site_keys": True, "peer_keys": ""},
            {},
            "require-site-keys: without peer-keys the server could use the names of the other sites",
        ),
        ({"min_secure_sum": 4}, {}, "min-secure-sum = 4: num-clients = 3"),
        (
            {"min_secure_sum": 3},
            {"federation__secure_sum": False},
            "min-secure-sum = 3: federation.secure-sum = false, num-clients = 3",
        ),
    ],
)
def test_a_site_demands_secure_sums(
    deployment: Bench, more: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RunFailed, match=reason):
        deployment.run(sites_of(deployment, changes, **more), **changes)


def test_one_approval_covers_a_round(deployment: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person sees the plain tensors once; masked tensors and shares then leave with them."""
    from client_app.policy import approval
    from client_app.policy.approval_command import decide, waiting

    shown = list[int]()

    def approve(_: float) -> None:
        found, _ = waiting(deployment.folder / "state")
        shown.extend(len(held.blobs) for _, held in found)
        list(decide(deployment.folder / "state", found, released=True))

    monkeypatch.setattr(approval, "pause", approve)
    folder = deployment.run(sites_of(deployment, require_approval="tensors"))
    assert [client["status"] for client in summary(folder)["clients"]] == ["completed"] * 3
    assert shown == [2] * 3

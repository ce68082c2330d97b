"""Cuts of FedSpine: devices agree on them before a round, and recover them."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from espalier.messages.blobs.cut_bits import CUT_BITS
from espalier.messages.message import MessageBody
from espalier.messages.records import read, write
from espalier.messages.tensor_blobs import unpack_tensors
from tests.bench import Bench, events, summary
from tests.methods.promises.federations import Uninterrupted
from tests.methods.tuning.fedspine.fedspine_runs import (
    GROUP,
    UNITS,
    FedSpineRuns,
    find,
    in_bits,
    opened,
    refinements,
    structures,
)

SHARES = {
    "pruning__selection": "global",
    "pruning__ratio": 0.25,
    "fedspine__prune_rounds": 2,
}


class TestFedSpine(FedSpineRuns):
    # ----- agreement before a round ---------------------------------------------------------------

    def test_schedule_asks_equal_shares_within_unit(self, bench: Bench) -> None:
        """Two rounds prune 12.5% and 25% of 3840 parameters; all ranks are equal."""
        changes = {
            **SHARES,
            "fedspine__allocation": "fixed",
            "fedspine__rank": 3,
            "federation__rounds": 4,
        }
        grid = bench.grid(**changes)
        requests = list[Message]()
        grid.before_push = requests.append
        folder = bench.run(grid, **changes)
        asked = [
            (r.header.server_round, r.fields["pruned"])
            for r in map(opened, requests)
            if "pruned" in r.fields
        ]
        assert asked == [(2, 0.125)] * 4 + [(3, 0.25)] * 4
        limits = {
            (r.header.kind, r.fields["rank_limit"])
            for r in map(opened, requests)
            if "rank_limit" in r.fields
        }
        assert limits == {("train", 3), ("fetch", 3), ("push", 3)}
        for note in refinements(folder):
            least = {1: 0, 2: 480, 3: 960, 4: 960}[note["round"]]
            spent = [round(device["pruned"] * 3840) for device in note["devices"].values()]
            assert all(least <= parameters < least + GROUP for parameters in spent)
            assert {device["rank"] for device in note["devices"].values()} == {3}

    def test_who_has_not_come_to_the_share_is_told(
        self, bench: Bench, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # With two pruning rounds the steps are smaller than the target.
        bench.run(**{**SHARES, "fedspine__prune_rounds": 2})
        told = " ".join(capsys.readouterr().out.split())
        assert "4 of 4 clients did not reach pruning.ratio = 0.25; raise federation.rounds" in told
        bench.run(**{**SHARES, "fedspine__allocation": "fixed", "fedspine__prune_rounds": 1})
        assert "did not reach" not in capsys.readouterr().out

    def test_question_precedes_parts_with_bits(self, plain: Uninterrupted) -> None:
        """Each block is one part: the first travels by ``push``, the last with ``train``.

        Replies are split in the same way.
        """
        asked = [opened(request) for request in plain.requests]
        second = [
            body for body in asked if body.header.server_round == 2 and body.header.client == 0
        ]
        kinds = [(body.header.kind, body.header.part, sorted(body.blobs)) for body in second]
        first = ["block-0000", "structure"]
        last = ["block-0001", "structure"]
        assert kinds == [
            ("push", 0, ["structure"]),
            ("push", 1, first),
            ("train", 0, last),
            ("fetch", 1, ["structure"]),
        ]
        # The bits before the answer differ from those after it.
        assert len({body.blobs["structure"] for body in second}) == 2
        assert not any("structure" in body.blobs for body in asked if body.header.server_round < 2)

    def test_share_of_zero_prunes_nothing(self, bench: Bench) -> None:
        """This is the paper's method without A_P."""
        changes = {"pruning__ratio": 0.0, "federation__rounds": 3, "lora__rank": 8}
        folder = bench.run(**changes)
        assert [structures(folder, client)["pruned"] for client in range(4)] == [0.0] * 4
        devices = [device for note in refinements(folder) for device in note["devices"].values()]
        assert {device["pruned"] for device in devices} == {0.0}
        assert len({device["rank"] for device in devices}) > 1

    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (lambda bits: bits & bits - 1, "the pruning ratio is below the requested"),
            # Set the bit of the first channel that is left.
            (
                lambda bits: bits | (~bits & -4) & -(~bits & -4),
                "the pruning ratio is above the requested",
            ),
            (lambda bits: bits | 1 << UNITS, "bits are set beyond the last group"),
            (lambda bits: bits | 3, "all groups of block 0 are cut"),
        ],
    )
    def test_wrong_cut_drops_its_sender_alone(
        self, bench: Bench, spoil: Callable[[int], int], words: str
    ) -> None:
        changes = {**SHARES, "federation__rounds": 3, "fedspine__allocation": "fixed"}
        grid = bench.grid(**changes)
        grid.tamper[2] = in_bits(spoil)
        clients = summary(bench.run(grid, **changes))["clients"]
        assert [client["status"] for client in clients] == [
            "completed",
            "completed",
            "dropped",
            "completed",
        ]
        assert clients[2]["reason"].startswith("push: reply refused")
        assert words in clients[2]["reason"]

    def test_what_was_cut_does_not_come_back(self, bench: Bench) -> None:
        changes = {**SHARES, "federation__rounds": 3, "fedspine__allocation": "fixed"}
        cut = list[int]()

        def turned(bits: int) -> int:
            cut.append(bits)
            return bits if len(cut) == 1 else bits & ~cut[0]

        grid = bench.grid(**changes)
        grid.tamper[1] = in_bits(turned)
        assert (
            "groups that were removed earlier are present again"
            in summary(bench.run(grid, **changes))["clients"][1]["reason"]
        )

    def test_a_cut_is_told_once_in_a_round(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("server_app.app._remove_private_state", lambda run: None)
        grid = bench.grid(**SHARES)
        asked = list[Message]()

        def note(message: Message) -> None:
            if "pruned" in read(message.content).fields:
                asked.append(message)

        grid.before_push = note
        bench.run(grid, **SHARES)
        grid.before_push = lambda _: None
        body = read(asked[0].content)
        first = next(
            read(reply.content)
            for client, reply in grid.received
            if client == body.header.client and "structure" in read(reply.content).blobs
        )
        context = grid.contexts[asked[0].metadata.dst_node_id]
        assert read(grid.answer(asked[0], context).content).blobs == first.blobs
        other = MessageBody(body.header, {"pruned": body.fields["pruned"] / 2}, body.blobs)
        reply = read(
            grid.answer(
                Message(write(other), dst_node_id=1, message_type="query.push"), context
            ).content
        )
        assert "answered another request of round 2" in reply.fields["reason"]
        beyond = MessageBody(body.header, {"pruned": 0.5}, body.blobs)
        reply = read(
            grid.answer(
                Message(write(beyond), dst_node_id=1, message_type="query.push"), context
            ).content
        )
        assert "pruned is above the run's pruning ratio" in reply.fields["reason"]

    def test_device_recovers_its_cut_from_server(self, bench: Bench) -> None:
        changes = {**SHARES, "federation__rounds": 3, "fedspine__allocation": "fixed"}
        grid = bench.grid(**changes)

        def lose(message: Message) -> None:
            body = read(message.content)
            if "pruned" in body.fields and (
                body.header.server_round,
                body.header.client,
            ) == (3, 1):
                shutil.rmtree(bench.folder / "state" / body.header.lineage / "node-00001")

        grid.before_push = lose
        folder = bench.run(grid, **changes)
        assert {client["status"] for client in summary(folder)["clients"]} == {"completed"}
        (told,) = [event for event in events(folder) if event["event"] == "kept_cut"]
        assert (told["client"], told["round"]) == (1, 3)
        _, second, third = refinements(folder)
        kept = {client: device["kept_its_cut"] for client, device in third["devices"].items()}
        assert kept == {"0": False, "1": True, "2": False, "3": False}
        assert third["devices"]["1"]["pruned"] == second["devices"]["1"]["pruned"]
        assert third["devices"]["0"]["pruned"] > second["devices"]["0"]["pruned"]

    # ----- variants -------------------------------------------------------------------------------

    def test_schedule_replaces_missing_half(self, bench: Bench) -> None:
        def arms(**changes: Any) -> list[dict[str, Any]]:
            folder = bench.run(**changes)
            return list(
                find(
                    json.loads((folder / "checkpoint" / "state.json").read_text()), "arms"
                ).values()
            )

        found = arms(fedspine__adaptive_pruning=False)
        # One round of pruning reaches half of the target, because there are two.
        assert {arm["pruned"] for arm in found} == {0.25}
        assert len({arm["rank"] for arm in found}) > 1
        found = arms(fedspine__adaptive_rank=False, fedspine__rank=3)
        assert {arm["rank"] for arm in found} == {3}
        assert len({arm["pruned"] for arm in found}) > 1

    def test_importance_is_revealed_by_one_cut_only(self, bench: Bench) -> None:
        """A server that asks for other ratios in every round learns nothing more.

        There is no training between the rounds.
        """
        grid = bench.grid(federation__rounds=6)
        asked = list[Message]()
        grid.before_push = lambda message: asked.append(message)
        bench.killed(
            lambda header: (header.kind, header.server_round) == ("train", 2),
            grid,
            federation__rounds=6,
        )
        question = next(opened(message) for message in asked if "pruned" in opened(message).fields)
        context = grid.contexts[
            next(m for m in asked if "pruned" in opened(m).fields).metadata.dst_node_id
        ]
        before = unpack_tensors(question.blobs["structure"])[CUT_BITS]
        for server_round, pruned in ((3, 0.05), (4, 0.2), (5, 0.25)):
            header = question.header.model_copy(update={"server_round": server_round})
            content = write(MessageBody(header, {"pruned": pruned}, question.blobs))
            reply = read(
                grid.answer(
                    Message(content, dst_node_id=context.node_id, message_type="query.push"),
                    context,
                ).content
            )
            assert np.array_equal(unpack_tensors(reply.blobs["structure"])[CUT_BITS], before)

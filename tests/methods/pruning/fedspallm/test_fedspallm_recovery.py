"""Lost layers and resumed runs of FedSpaLLM."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import client_app.methods.pruning.fedspallm_layers
from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.records import read
from tests.bench import Bench, events, model_files, summary
from tests.methods.promises.federations import Uninterrupted, silent_after_enrolment
from tests.methods.pruning.fedspallm.fedspallm_runs import SpaLLMRounds, sampled


def killed_in(bench: Bench, server_round: int, **changes: Any) -> tuple[Path, list[list[int]]]:
    """Kill a run before its last client is asked for layers of a round.

    Return the run directory and the layers that the other clients were asked for.
    """
    grid = bench.grid(**changes)
    asked = list[list[int]]()

    def note(message: Any) -> None:
        body = read(message.content)
        if body.header.kind == "train" and body.header.server_round == server_round:
            asked.append(body.fields["blocks"])

    grid.before_push = note
    last = ("train", server_round, bench.num_clients - 1)
    return (
        bench.killed(
            lambda header: (header.kind, header.server_round, header.client) == last,
            grid,
            **changes,
        ),
        asked,
    )


class TestRounds(SpaLLMRounds):
    def test_clients_recover_lost_layers(self, six: Bench, whole_six: Uninterrupted) -> None:
        """The state of one client and a part of two others is lost before round 4.

        Layers that these clients hold but do not read follow at the end.
        """
        damaged = {0: "", 1: "stored-layers.json", 2: "*.blob"}
        grid = six.grid()
        lost = set[int]()
        kinds = list[tuple[int, str]]()

        def lose(message: Any) -> None:
            header = read(message.content).header
            if header.server_round == 4:
                kinds.append((header.client, header.kind))
            if (header.kind, header.server_round) == (
                "train",
                4,
            ) and header.client in damaged.keys() - lost:
                lost.add(header.client)
                (state,) = (six.folder / "state").glob(f"{header.lineage}/node-{header.client:05d}")
                for file in state.rglob(damaged[header.client]) if damaged[header.client] else ():
                    file.write_bytes(file.read_bytes()[:-3])
                if not damaged[header.client]:
                    shutil.rmtree(state)

        grid.before_push = lose
        folder = six.run(grid)
        assert (
            {event["client"] for event in events(folder) if event["event"] == "lost"}
            == lost
            == {0, 1, 2}
        )
        for client in range(4):
            own = [kind for one, kind in kinds if one == client]
            assert own.count("train") == (2 if client in lost else 1)
            assert ("push" in own[own.index("train") : -own[::-1].index("train")]) == (
                client in lost
            )
        assert model_files(folder) == model_files(whole_six.folder)
        documents = [summary(one) for one in (whole_six.folder, folder)]
        assert documents[0]["metrics"] == documents[1]["metrics"]
        assert [client["reason"] for client in documents[1]["clients"]] == [None] * 4

    def test_second_loss_of_layers_drops_client(self, bench: Bench) -> None:
        grid = bench.grid()

        def forget(message: Any) -> None:
            header = read(message.content).header
            if (header.kind, header.server_round) == ("train", 2):
                shutil.rmtree(
                    bench.folder / "state" / header.lineage / "node-00002", ignore_errors=True
                )

        grid.before_push = forget
        document = summary(bench.run(grid))
        assert [client["status"] for client in document["clients"]] == [
            "completed",
            "completed",
            "dropped",
            "completed",
        ]
        assert (
            document["clients"][2]["reason"]
            == "train: this client no longer holds the layers that the server sent"
        )
        assert document["sparsity"]["achieved"] == pytest.approx(
            self.expected_sparsity(OpenedModel(bench.model))
        )

    def test_resumed_run_samples_the_same_layers(self, bench: Bench) -> None:
        """Clients answered round 2 before the kill, and then another client is lost.

        Without the checkpoint the server would sample other layers for the remaining clients.
        """
        changes = {"fedspallm__sampled_layers": 0.5, "fedspallm__capabilities": "1"}
        run, asked = killed_in(bench, 2, **changes)
        grid = bench.grid(**changes)
        orders = list[list[int]]()
        grid.tamper[3] = silent_after_enrolment

        def note(message: Any) -> None:
            body = read(message.content)
            if (
                body.header.kind == "train"
                and body.header.client < 3
                and body.header.server_round == 2
            ):
                orders.append(body.fields["blocks"])

        grid.before_push = note
        clients = summary(bench.run(grid, resume_from=str(run), **changes))["clients"]
        assert [client["status"] for client in clients] == ["completed"] * 3 + ["dropped"]
        assert orders == asked

    def test_resumed_run_keeps_first_capabilities(self, bench: Bench) -> None:
        """New capabilities would lead to other samples.

        Clients that already answered would refuse them.
        """
        changes = {"fedspallm__capabilities": ""}
        run, asked = killed_in(bench, 1, **changes)
        assert asked == [[0, 1]] * 3
        grid = bench.grid(**changes)
        for context in grid.contexts.values():
            context.node_config["capability"] = 1.0 + 9.0 * context.node_config["partition-id"]
        resumed = bench.run(grid, resume_from=str(run), **changes)
        assert {client["status"] for client in summary(resumed)["clients"]} == {"completed"}
        assert set(map(tuple, sampled(resumed).values())) == {(0, 1)}

    def test_sample_is_checkpointed_before_any_order(self, bench: Bench) -> None:
        run, asked = killed_in(bench, 1)
        saved = json.loads((run / "checkpoint" / "state.json").read_text())
        assert (saved["round"], saved["state"]["prepared"]) == (0, 1)
        assert list(saved["state"]["samples"].values())[:3] == asked

    def test_client_refusing_layers_is_dropped(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(site: Any, request: Any) -> Any:
            if request.header.client == 1:
                raise InputError("the disk is full")
            return answer_push(site, request)

        answer_push = client_app.methods.pruning.fedspallm_layers.answer_push
        monkeypatch.setattr(client_app.methods.pruning.fedspallm_layers, "answer_push", refuse)
        document = summary(bench.run())
        assert [client["status"] for client in document["clients"]] == [
            "completed",
            "dropped",
            "completed",
            "completed",
        ]
        assert document["clients"][1]["reason"] == "push: the disk is full"

    def test_state_holds_the_newest_layers_alone(self, on_own_text: Bench) -> None:
        """Each client holds the layers from before and after the last push; others are deleted."""
        changes = {"federation__rounds": 5, "evaluation__local_baseline": True}
        counts = []
        grid = on_own_text.grid(**changes)

        def look(message: Any) -> None:
            if read(message.content).header.kind == "evaluate":
                counts.extend(
                    len(list(f.glob("*.blob")))
                    for f in (on_own_text.folder / "state").glob("*/*/lasting")
                )

        grid.before_push = look
        on_own_text.run(grid, **changes)
        # Two layers, each from rounds 4 and 5.
        assert set(counts) == {4}

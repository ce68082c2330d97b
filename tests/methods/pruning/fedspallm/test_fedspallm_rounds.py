"""FedSpaLLM in several rounds: promises of every method, and layers that travel."""

from dataclasses import replace
from typing import Any

import pytest

from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.message import MessageBody
from espalier.messages.records import read
from strategies.base.rounds import RunFailed
from strategies.pruning.fedspallm.global_model import ClientLayers
from tests.bench import Bench, events, results, summary
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import PruningPromises
from tests.methods.pruning.fedspallm.fedspallm_runs import SpaLLMRounds, pruned_layers, sampled

STATES = ("checkpoint/state.json", "checkpoint/previous.json")
"""Paths of the documents that record which version of each layer a client holds."""


class SpaLLMPromises(PruningPromises):
    """Promises of runs with one and with several rounds."""

    def other_orders(self, order: MessageBody) -> list[MessageBody]:
        """Return orders with other samples of the layers."""
        sampled = [blocks for blocks in ([0], [1], [0, 1]) if blocks != order.fields["blocks"]]
        return [MessageBody(order.header, {**order.fields, "blocks": blocks}) for blocks in sampled]


class TestRounds(SpaLLMRounds, SpaLLMPromises):
    def test_layers_in_proportion_to_capability(self, plain: Uninterrupted) -> None:
        assert {client: len(layers) for client, layers in sampled(plain.folder).items()} == {
            0: 1,
            1: 2,
            2: 2,
            3: 2,
        }

    def test_round_one_sends_only_layer_numbers_down(self, plain: Uninterrupted) -> None:
        sent = [read(request.content) for request in plain.requests]
        first = [
            body
            for body in sent
            if body.header.server_round == 1 and body.header.kind in ("train", "push")
        ]
        assert [body.header.kind for body in first] == ["train"] * 4
        assert all(not body.blobs and set(body.fields) == {"blocks", "versions"} for body in first)

    def test_stale_layers_are_sent_only_when_needed(self, whole_six: Uninterrupted) -> None:
        """The test derives the versions from the messages.

        Clients sample one or two of six layers in each of four rounds.
        """
        sent = [read(request.content) for request in whole_six.requests]
        sampled = {
            (body.header.server_round, body.header.client): body.fields["blocks"]
            for body in sent
            if body.header.kind == "train"
        }
        # versions[r] has the version of each layer of the global model after r finished rounds.
        versions = [[0] * 6]
        for finished in range(1, 5):
            decided = {
                index
                for (number, _), blocks in sampled.items()
                if number == finished
                for index in blocks
            }
            versions.append(
                [finished if index in decided else versions[-1][index] for index in range(6)]
            )
        at_clients = [[0] * 6 for _ in range(4)]
        brought = set[int]()
        spared = 0
        # The order of each client's letters matters, not that between clients.
        for body in sorted(sent, key=lambda body: body.header.client):
            before = versions[body.header.server_round - 1]
            own = at_clients[body.header.client]
            if body.header.kind == "push":
                assert body.fields["versions"] == [before[index] for index in body.fields["blocks"]]
                brought.update(body.fields["blocks"])
            elif body.header.kind in ("train", "evaluate"):
                stale = {index for index in range(6) if own[index] != before[index]}
                end = body.fields["blocks"][-1] + 1 if body.header.kind == "train" else 6
                assert brought == {index for index in stale if index < end}
                spared += len(stale - brought)
                for index in brought:
                    own[index] = before[index]
                brought = set()
        assert spared > 0
        assert at_clients == [versions[3]] * 4

    def test_results_equal_those_of_all_stale_layers(
        self, six: Bench, whole_six: Uninterrupted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        push = ClientLayers.push
        monkeypatch.setattr(
            ClientLayers,
            "push",
            lambda own, rounds, number, model, ends=None: push(own, rounds, number, model),
        )
        few = whole_six.folder
        many = six.run()
        files = [
            {name: data for name, data in results(folder).items() if name not in STATES}
            for folder in (few, many)
        ]
        assert files[0] == files[1]
        metrics = [
            [client["metrics"] for client in summary(folder)["clients"]] for folder in (few, many)
        ]
        assert metrics[0] == metrics[1]
        down = [summary(folder)["bytes_down"] for folder in (few, many)]
        assert down[0] < down[1]

    def test_killed_while_the_rest_is_brought(self, six: Bench) -> None:
        """The run is killed twice.

        The first kill comes before the third client gets the rest, the second before it evaluates.
        """
        six = replace(six, settings=six.settings | {"evaluation.own-text": True})
        whole = six.run()
        cut = six.killed(
            lambda header: (header.kind, header.server_round, header.client) == ("push", 5, 2)
        )
        assert (
            six.killed(
                lambda header: (header.kind, header.client) == ("evaluate", 2), resume_from=str(cut)
            )
            == cut
        )
        assert six.run(resume_from=str(cut)) == cut
        assert results(cut) == results(whole)
        assert all(client["status"] == "completed" for client in summary(cut)["clients"])
        losses = [
            [client["metrics"] for client in summary(folder)["clients"]] for folder in (whole, cut)
        ]
        assert losses[0] == losses[1]

    def test_local_sparsity_is_in_global_model(self, plain: Uninterrupted) -> None:
        """Round 2 raises the sparsity from 25% to 50%.

        Three clients prune both layers. One prunes one layer and holds the other at 25%.
        """
        folder = plain.folder
        bench = plain.bench
        blocks = OpenedModel(bench.model).plan.blocks
        counts = [
            [sum(int(li.num_weights * share) for li in block.linears) for block in blocks]
            for share in (0.25, 0.5)
        ]
        pruned = [
            sum(counts[1][i] if i in layers else counts[0][i] for i in (0, 1))
            for layers in sampled(folder).values()
        ]
        expected = sum(pruned) / 4 / OpenedModel(bench.model).plan.num_weights
        assert summary(folder)["sparsity"]["local"] == pytest.approx(expected, abs=1e-12)

    def test_table_has_sparsity_of_each_model(self, whole: Uninterrupted) -> None:
        """Local models have the sparsity of the previous test; the others have 50%."""
        local = summary(whole.folder)["sparsity"]["local"]
        rows = [line.split("│") for line in whole.printed.splitlines() if line.startswith("│")]
        found = {
            cells[1].strip(): next(cell.strip() for cell in cells[2:] if "%" in cell)
            for cells in rows
        }
        half = f"{self.expected_sparsity(OpenedModel(whole.bench.model)):.2%}"
        expected = {
            "dense": "0.00%",
            "local-baseline (mean)": f"{local:.2%}",
            "centralized": half,
            "federated": half,
        }
        assert found == expected
        assert found["local-baseline (mean)"] != half

    def test_run_ends_if_no_client_takes_layers(self, bench: Bench, monkeypatch: Any) -> None:
        def refuse(site: Any, request: Any) -> Any:
            raise InputError("the disk is full")

        monkeypatch.setattr("client_app.methods.pruning.fedspallm_layers.answer_push", refuse)
        with pytest.raises(
            RunFailed,
            match=r"0 clients left for round 2(.|\n)*node-00003: push: the disk is full",
        ):
            bench.run()

    def test_weak_clients_do_not_replace_strong_ones(self, bench: Bench) -> None:
        """The clients have capabilities 1, 2, 2, 2, and all but the weak one die before round 3.

        The weak client keeps its one layer.
        """
        grid = bench.grid(federation__rounds=4, quorum=0.25)
        sent = []

        def die(request: Any, reply: Any) -> Any:
            header = read(request.content).header
            return None if (header.kind, header.server_round) == ("train", 3) else reply

        grid.tamper = dict.fromkeys((1, 2, 3), die)
        grid.before_push = lambda message: sent.append(read(message.content))
        folder = bench.run(grid, federation__rounds=4, quorum=0.25)
        last = [
            body for body in sent if body.header.kind == "train" and body.header.server_round == 4
        ]
        assert [(body.header.client, len(body.fields["blocks"])) for body in last] == [(0, 1)]
        assert [event["round"] for event in events(folder) if event["event"] == "not_covered"] == [
            4
        ]
        assert summary(folder)["sparsity"]["achieved"] == pytest.approx(
            self.expected_sparsity(OpenedModel(bench.model))
        )

    def test_a_round_s_sparsity_is_the_schedule_s(self, plain: Uninterrupted) -> None:
        plan = OpenedModel(plain.bench.model).plan
        for server_round, sparsity in ((1, 0.25), (2, 0.5)):
            for blobs in pruned_layers(plain, server_round).values():
                for key, tensors in blobs.items():
                    for linear in plan.blocks[int(key[-4:])].linears:
                        assert tensors[f"{linear.name}.kept"].numel() == linear.num_weights - int(
                            linear.num_weights * sparsity
                        )

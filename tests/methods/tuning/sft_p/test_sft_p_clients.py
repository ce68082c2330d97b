"""State of SFT-P at a client from one round to the next, and late clients."""

import json
import shutil
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from client_app.protocol import client_state
from client_app.protocol.client_state import CONDITIONING
from espalier.messages.records import read
from espalier.settings.run import parse
from espalier.training.masked_training import first_embedding
from strategies.base.rounds import RunFailed
from tests.bench import Bench, summary
from tests.methods.promises.federations import Uninterrupted
from tests.methods.tuning.sft_p.sft_p_runs import SftPRuns, private, real_sites


class TestSftP(SftPRuns):
    # ----- state from one round to the next -------------------------------------------------------

    def test_moments_of_the_embedding_go_on(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("server_app.app._remove_private_state", lambda run: None)
        found = [private(Uninterrupted(bench, bench.run(), [], [], ""), 0)]
        assert found[0]["step"].item() == 6
        real = client_state.before

        def without_moments(state: Any, document: str, server_round: int) -> Any:
            kept = real(state, document, server_round)
            return (
                {key: {"embedding": own["embedding"]} for key, own in kept.items()}
                if document == CONDITIONING
                else kept
            )

        monkeypatch.setattr("client_app.methods.tuning.sft_p.client_state.before", without_moments)
        shutil.rmtree(bench.folder / "state")
        found.append(private(Uninterrupted(bench, bench.run(), [], [], ""), 0))
        assert found[1]["step"].item() == 3
        assert not torch.equal(found[0]["embedding"], found[1]["embedding"])

    # ----- late clients ---------------------------------------------------------------------------

    def test_a_late_client_fits_its_embedding_alone(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A late client takes part in no round.

        Its embedding changes, and generator and LoRA stay those of the other clients.
        """
        monkeypatch.setattr("server_app.app._remove_private_state", lambda run: None)
        changes = {
            "sft_p__late_clients": 1,
            "sft_p__late_steps": 12,
            "evaluation__local_baseline": True,
        }
        grid = bench.grid(**changes)
        folder = bench.run(grid, **changes)
        kinds = {client: [] for client in range(4)}
        for client, reply in grid.received:
            kinds[client].append(read(reply.content).header.kind)
        assert "train" not in kinds[3]
        assert [kinds[client].count("local_baseline") for client in range(4)] == [0, 0, 0, 1]
        alone = next(
            read(reply.content)
            for _, reply in grid.received
            if read(reply.content).header.kind == "local_baseline"
        )
        assert alone.fields.keys() == {"seconds"}
        settings = parse(bench.config(**changes))
        first = first_embedding(settings, 3)
        found = private(Uninterrupted(bench, folder, [], [], ""), 3)["embedding"]
        assert (found - first).abs().max() > 0.01
        document = json.loads((folder / "masks.json").read_text())
        assert document["late"].keys() == {"3"}
        assert document["late"]["3"]["steps"] == 12
        three = bench.run(bench.grid(), sft_p__late_clients=1)
        assert (
            load_file(three / "generator.safetensors").keys()
            == load_file(folder / "generator.safetensors").keys()
        )
        for name, value in load_file(three / "generator.safetensors").items():
            assert torch.equal(value, load_file(folder / "generator.safetensors")[name])

    def test_last_client_is_late_for_missing_site(self, bench: Bench) -> None:
        changes = {
            "sft_p__ratios": "",
            "sft_p__late_clients": 1,
            "sft_p__late_steps": 3,
            "quorum": 0.5,
        }
        grid = real_sites(bench, bench.grid(**changes))
        list(grid.contexts.values())[1].node_config["allowed-methods"] = "fedprllm"
        bench.run(grid, **changes)
        kinds = {
            (body.header.client, body.header.kind)
            for body in (read(reply.content) for _, reply in grid.received)
        }
        assert {client for client, kind in kinds if kind == "train"} == {0, 1}
        assert {client for client, kind in kinds if kind == "local_baseline"} == {2}

    def test_unsampled_client_fits_its_embedding(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changes = {
            "federation__sampled_clients": 0.25,
            "pruning__keep_models": True,
            "sft_p__late_steps": 4,
        }
        grid = bench.grid(**changes)
        folder = bench.run(grid, **changes)
        drawn = {
            client for client, reply in grid.received if read(reply.content).header.kind == "train"
        }
        document = json.loads((folder / "masks.json").read_text())
        assert len(drawn) in (1, 2)
        assert {int(client) for client in document["late"]} == {0, 1, 2, 3} - drawn

    def test_fitting_counts_towards_site_s_limit(self, bench: Bench) -> None:
        changes = {"sft_p__ratios": "", "sft_p__late_clients": 1, "sft_p__late_steps": 50}
        grid = real_sites(bench, bench.grid(**changes))
        for context in grid.contexts.values():
            context.node_config["max-steps"] = 5
        with pytest.raises(
            RunFailed, match=r"max-steps = 5: sft-p.late-steps x training.accumulation = 50"
        ):
            bench.run(grid, **changes)

    def test_lost_embedding_leaves_no_reported_model(self, bench: Bench) -> None:
        """The client loses its metrics and its model; the other clients keep theirs."""
        changes = {"pruning__keep_models": True, "evaluation__local_baseline": True}
        grid = bench.grid(**changes)

        def lose(message: Message) -> None:
            body = read(message.content)
            if (body.header.kind, body.header.client, body.header.part) == (
                "push",
                1,
                0,
            ) and body.header.server_round == 3:
                shutil.rmtree(bench.folder / "state" / body.header.lineage / "node-00001")

        grid.before_push = lose
        folder = bench.run(grid, **changes)
        told = {client["client"]: client for client in summary(folder)["clients"]}
        assert "no longer has its embedding" in told[1]["reason"]
        assert [
            client
            for client, own in told.items()
            if "perplexity/public/federated" in own["metrics"]
        ] == [0, 2, 3]
        assert sorted(path.name for path in (folder / "clients").iterdir()) == [
            "node-00000",
            "node-00002",
            "node-00003",
        ]

"""SFT-P: promises of every method.

The server averages generator and LoRA. Embeddings, masks and budgets stay at the clients.
"""

import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from client_app.methods.tuning.sft_p import OUTWARD, own_target
from client_app.protocol import client_state
from client_app.protocol.client_state import CONDITIONING
from client_app.site import Site
from espalier.errors import EspalierError
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.structured.residual_gates import ResidualGates
from espalier.messages.message import SCHEMA_VERSION, Header
from espalier.messages.records import read
from espalier.methods.tuning.sft_p import shape_of, trained
from espalier.settings.node import OF_A_SECRET, NodeSettings, simulated_node
from espalier.settings.run import RunSettings, parse
from espalier.training.mask_history import steps_to_budget
from espalier.training.masked_training import first_embedding, first_shared, gate_logits
from pruning_kernels.votes.bitmask import pack
from server_app.artifacts import mask_analysis, personal_models
from strategies.base.rounds import RunFailed
from tests.bench import Bench, Home, private_text, summary
from tests.in_process import InProcessGrid
from tests.methods.promises.contracts import assert_planned, outgoing_bytes
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.personal_promises import PersonalPromises, perplexity_of, samples_of
from tests.methods.promises.promises import held_out
from tests.run_names import BY_HAND
from tests.tiny_model import WORDS, save_tiny_llama


class TestSftP(PersonalPromises):
    """Federations with two rounds of a few steps; two clients prune 20% and two clients 50%."""

    method = "sft-p"
    settings: ClassVar[dict[str, Any]] = {
        "federation.rounds": 2,
        "training.steps": 3,
        "training.batch-size": 2,
        "training.learning-rate": 0.01,
        "lora.rank": 2,
        "lora.alpha": 4.0,
        "sft-p.pruning-ratios": "0.2,0.2,0.5,0.5",
        "sft-p.embedding": 8,
        "sft-p.code": 4,
        "sft-p.learning-rate": 0.01,
        "sft-p.keep-models": False,
        "part-bytes": 4096,
    }
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def no_pictures(cls) -> Iterator[None]:
        """Draw no pictures: few tests need them, and drawing takes most of a run's time."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(personal_models, "draw", lambda figures, folder: [])
            yield

    # ----- private and outgoing values ------------------------------------------------------------

    def test_no_outgoing_byte_is_of_embedding_or_mask(self, kept: Uninterrupted) -> None:
        for client in range(kept.bench.num_clients):
            rounds = every_round(kept, client)
            assert [own.keys() for own in rounds] == 2 * [
                {"embedding", "exp_avg", "exp_avg_sq", "step"}
            ]
            secrets = [
                value.numpy().tobytes()
                for own in rounds
                for name, value in own.items()
                if name != "step"
            ]
            some = [mask.numpy() for mask in masks(kept, client).values() if not mask.all()]
            secrets += [
                made for mask in some for made in (pack(mask[None]).tobytes(), mask.tobytes())
            ]
            lanes = [np.flatnonzero(mask) for mask in some]
            secrets += [
                own.astype(kind).tobytes()
                for own in lanes
                for kind in (np.int16, np.int32, np.int64)
            ]
            for _, reply in kept.received:
                data = outgoing_bytes(reply)
                assert not [secret for secret in secrets if secret in data and len(secret) >= 8]
                assert not [
                    secret
                    for secret in secrets
                    if secret[: len(secret) // 2] in data and len(secret) >= 32
                ]

    @pytest.mark.parametrize("factor", [0.0, 10.0])
    def test_no_budget_leaves_a_real_site(self, bench: Bench, factor: float) -> None:
        """No message reveals a budget, whether it is met, impossible or missing.

        The site's own log reports impossible and missing budgets.
        """
        own = {"sft_p__pruning_ratios": "", "sft_p__budget_input": factor}
        grid = real_sites(bench, bench.grid(**own))
        for share, context in zip(
            (0.5173, 0.9473, 0.9673, 0.0), grid.contexts.values(), strict=True
        ):
            context.node_config["pruned-share"] = share
        changes = own | {"sft_p__pruning_ratio_of": "model", "quorum": 0.5}
        document = summary(bench.run(grid, **changes))
        assert {client["status"] for client in document["clients"]} == {"completed"}
        assert document["refused"] == {
            "site-1": OUTWARD,
            "site-2": f"the node's configuration is wrong: {OF_A_SECRET}",
        }
        secrets = [b"0.517", b"0.947", b"0.967"]
        budget = 10 * math.log((1 - 0.5173) / (1 - 0.2))
        secrets += [np.array(budget, kind).tobytes() for kind in (np.float32, np.float64)]
        assert not [
            share
            for _, reply in grid.received
            for share in secrets
            if share in outgoing_bytes(reply)
        ]

    def test_what_is_sent_is_generator_and_lora(self, plain: Uninterrupted) -> None:
        expected = {key: set(own) for key, own in shared_shapes(plain).items()}
        sent: dict[str, set[str]] = {}
        for _, reply in plain.received:
            for key, blob in read(reply.content).blobs.items():
                sent.setdefault(key, set()).update(load(blob))
        assert sent == expected
        assert any(name.startswith("mask.") for name in sent["block-0000"])

    def test_generator_is_the_mean_of_those_sent(self, bench: Bench) -> None:
        grid = bench.grid(federation__rounds=1)
        folder = bench.run(grid, federation__rounds=1)
        sent: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
        for client, reply in grid.received:
            body = read(reply.content)
            if body.header.kind in ("train", "fetch"):
                sent.setdefault(client, {}).update(
                    {key: load(blob) for key, blob in body.blobs.items()}
                )
        written = load_file(folder / "generator.safetensors")
        for name, value in written.items():
            key, _, tensor = name.partition(".")
            mean = sum(sent[client][key][tensor].double() for client in sent) / len(sent)
            torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-8)
        begun = first_shared(
            OpenedModel(bench.model).plan, parse(bench.config(federation__rounds=1))
        )
        moved = [
            not torch.equal(begun[key][name], own)
            for key in begun
            for name, own in sent[0][key].items()
        ]
        assert all(moved)

    # ----- each client's own model ----------------------------------------------------------------

    def masked_model(self, run: Uninterrupted, client: int) -> torch.nn.Module:
        """Return transformers' full model with LoRA.

        Rows and columns of residual dimensions that a client neither writes nor reads are zero.
        """
        model = AutoModelForCausalLM.from_pretrained(run.bench.model, dtype=torch.float32)
        lora = load_file(run.folder / "adapter" / "adapter_model.safetensors")
        found = masks(run, client)
        reads = {
            "attn_reads": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp_reads": ("mlp.gate_proj", "mlp.up_proj"),
        }
        writes = {"attn_writes": "self_attn.o_proj", "mlp_writes": "mlp.down_proj"}
        with torch.no_grad():
            for index, block in enumerate(model.model.layers):
                for name in ("q_proj", "v_proj"):
                    prefix = f"base_model.model.model.layers.{index}.self_attn.{name}"
                    block.self_attn.get_submodule(name).weight += (
                        2.0 * lora[f"{prefix}.lora_B.weight"] @ lora[f"{prefix}.lora_A.weight"]
                    )
                for kind, paths in reads.items():
                    for path in paths:
                        block.get_submodule(path).weight[:, ~found[index, kind]] = 0
                for kind, path in writes.items():
                    block.get_submodule(path).weight[~found[index, kind]] = 0
        return model

    def test_client_models_are_written_as_reported(self, bench: Bench) -> None:
        """The written model is complete and has the client's budget.

        No message says where the model lies.
        """
        changes = {
            "sft_p__keep_models": True,
            "evaluation__local_baseline": True,
            "evaluation__max_samples": 1000,
        }
        grid = bench.grid(**changes)
        folder = bench.run(grid, **changes)
        samples = samples_of(bench, bench.public.read_text())
        gates = ResidualGates(OpenedModel(bench.model).plan)
        whole = OpenedModel(bench.model).plan.num_parameters
        for client, told in enumerate(summary(folder)["clients"]):
            model = AutoModelForCausalLM.from_pretrained(
                folder / "clients" / told["site"], dtype=torch.float32
            ).eval()
            assert told["metrics"]["perplexity/public/federated"] == pytest.approx(
                perplexity_of(model, samples), rel=1e-3
            )
            pruned = whole - sum(value.numel() for value in model.parameters())
            wanted = gates.total - gates.target((0.2, 0.2, 0.5, 0.5)[client], "blocks")
            assert 0 <= pruned - wanted < max(gates.costs.values()) + 1
        alone = [
            read(reply.content)
            for _, reply in grid.received
            if read(reply.content).header.kind == "alone"
        ]
        assert [body.fields.keys() for body in alone] == [{"seconds"}] * 4

    def test_real_site_writes_where_its_owner_says(self, bench: Bench) -> None:
        grid = real_sites(bench, bench.grid(sft_p__keep_models=True))
        for client, context in enumerate(grid.contexts.values()):
            context.node_config |= (
                {"models-dir": str(bench.folder / "own" / str(client))} if client % 2 else {}
            )
        folder = bench.run(grid, sft_p__keep_models=True)
        lineage = json.loads((folder / "run.json").read_text())["lineage"]
        assert {path.name for path in (bench.folder / "own").glob("*/*")} == {
            f"{lineage}-site-1",
            f"{lineage}-site-3",
        }
        assert all(
            (path / "model.safetensors").exists() for path in (bench.folder / "own").glob("*/*")
        )
        assert not (folder / "clients").exists()

    def test_masks_keep_each_client_s_budget(self, kept: Uninterrupted) -> None:
        gates = ResidualGates(OpenedModel(kept.bench.model).plan)
        for client, share in enumerate((0.2, 0.2, 0.5, 0.5)):
            spent = int(
                gates.spent({gate: mask.float() for gate, mask in masks(kept, client).items()})
            )
            assert 0 <= int((1 - share) * gates.total) - spent < max(gates.costs.values())

    def test_clients_have_masks_of_their_own(self, kept: Uninterrupted) -> None:
        one, other = (torch.cat(list(masks(kept, client).values())) for client in (0, 1))
        assert not torch.equal(one, other)

    # ----- variants -------------------------------------------------------------------------------

    def test_without_adapters_masks_alone_travel(self, bench: Bench) -> None:
        grid = bench.grid(sft_p__adapters=False)
        folder = bench.run(grid, **{"sft_p__adapters": False})
        names = {
            name
            for _, reply in grid.received
            for blob in read(reply.content).blobs.values()
            for name in load(blob)
        }
        assert names
        assert all(name.startswith("mask.") for name in names)
        assert not (folder / "adapter").exists()

    def test_unconditioned_equal_budgets_share_a_mask(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("server_app.app._remove_private_state", lambda run: None)
        folder = bench.run(sft_p__conditioned=False, sft_p__pruning_ratios="0.3")
        run = Uninterrupted(bench, folder, [], [], "")
        settings = parse(bench.config(sft_p__conditioned=False, sft_p__pruning_ratios="0.3"))
        found = [masks(run, client, settings, 0.3) for client in range(4)]
        assert all(torch.equal(one[gate], found[0][gate]) for one in found for gate in one)

    @pytest.mark.parametrize(
        "changes",
        [
            {"sft_p__heads": "shared"},
            {"sft_p__estimator": "gumbel", "sft_p__tau": 0.4},
            {"sft_p__masks": "sign", "federation__sampled_clients": 0.5},
            {"sft_p__norm": "read", "evaluation__local_baseline": True},
        ],
    )
    def test_other_generators_work(self, bench: Bench, changes: dict[str, Any]) -> None:
        assert {
            client["status"]
            for client in summary(bench.run(bench.grid(**changes), **changes))["clients"]
        } == {"completed"}

    def test_budget_input_makes_masks_and_stays_at_clients(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Masks follow from embedding and budget, also those of a late client.

        No outgoing byte is of the budget, and the plan has the bytes of the larger generator.
        """
        monkeypatch.setattr("server_app.app._remove_private_state", lambda run: None)
        shares = (0.2173, 0.3191, 0.5173, 0.4673)
        changes = {
            "sft_p__budget_input": 10.0,
            "sft_p__pruning_ratio": 0.3,
            "sft_p__pruning_ratios": ",".join(map(str, shares)),
            "sft_p__late_clients": 1,
            "sft_p__late_steps": 4,
            "evaluation__local_baseline": True,
        }
        grid = bench.grid(**changes)
        run = Uninterrupted(bench, bench.run(grid, **changes), [], [], "")
        settings = parse(bench.config(**changes))
        document = json.loads((run.folder / "masks.json").read_text())
        assert "3" in document["late"]
        blocks = range(len(OpenedModel(bench.model).plan.blocks))
        for client, share in enumerate(shares):
            budget = 10 * math.log((1 - share) / 0.7)
            found = masks(run, client, settings, share, budget)
            for kind, densities in document["density"][str(client)].items():
                expected = [float(found[block, kind].double().mean()) for block in blocks]
                assert densities == pytest.approx(expected)
            secrets = [str(share).encode()]
            secrets += [np.array(budget, kind).tobytes() for kind in (np.float32, np.float64)]
            assert not [
                secret
                for _, reply in grid.received
                for secret in secrets
                if secret in outgoing_bytes(reply)
            ]
        assert_planned(bench, run.folder, **changes)

    def test_resumed_run_with_budget_input_is_the_same(self, bench: Bench) -> None:
        changes = {
            "sft_p__budget_input": 10.0,
            "sft_p__embedding_deviation": 1.0,
        }
        folder = bench.killed(lambda header: header.server_round >= 1, **changes)
        assert summary(folder)["status"] == "failed"
        resumed = bench.run(bench.grid(**changes), resume_from=str(folder), **changes)
        shutil.rmtree(bench.folder / "state")
        whole = bench.run(bench.grid(**changes), **changes)
        assert resumed == folder
        name = "generator.safetensors"
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()

    def test_clients_score_own_models_on_task_items(self, bench: Bench) -> None:
        """The server sends public items along.

        Clients also evaluate their own items, and compare with the dense model.
        """
        for client in range(bench.num_clients):
            (bench.folder / f"items-{client}.jsonl").write_text(reviews(40))
        (bench.folder / "tests.jsonl").write_text(reviews(12))
        changes = of_reviews(bench)
        grid = bench.grid(**changes)
        for context in grid.contexts.values():
            context.node_config.pop("data-path")
        document = summary(bench.run(grid, **changes))
        found = {
            metric["name"]: metric["values"]
            for metric in document["metrics"]
            if metric["dataset"] == "sst2"
        }
        told = [client["metrics"]["acc/sst2"] for client in document["clients"]]
        assert found["acc"]["federated"] == pytest.approx(np.mean(told), abs=1e-3)
        assert found["acc"]["dense"] is not None

    def test_nf4_clients_are_measured_on_task_items(self, tmp_path: Path) -> None:
        """The numbers of residual dimensions need not be multiples of NF4's block size."""
        pytest.importorskip("bitsandbytes")
        base = save_tiny_llama(tmp_path / "base", blocks=1, hidden=64, feed_forward=64)
        (tmp_path / "public.txt").write_text(private_text(99))
        bench = Bench(
            tmp_path,
            "sft-p",
            self.settings,
            num_clients=2,
            home=Home(base, tmp_path / "public.txt"),
        )
        for name, number in (("items-0", 40), ("items-1", 40), ("tests", 12)):
            (tmp_path / f"{name}.jsonl").write_text(reviews(number))
        changes = of_reviews(bench) | {"training__base": "nf4", "federation__rounds": 1}
        grid = bench.grid(**changes)
        for context in grid.contexts.values():
            context.node_config.pop("data-path")
        found = {
            metric["name"]: metric["values"]
            for metric in summary(bench.run(grid, **changes))["metrics"]
        }
        assert found["acc"]["federated"] is not None

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
        assert [kinds[client].count("alone") for client in range(4)] == [0, 0, 0, 1]
        alone = next(
            read(reply.content)
            for _, reply in grid.received
            if read(reply.content).header.kind == "alone"
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
            "sft_p__pruning_ratios": "",
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
        assert {client for client, kind in kinds if kind == "alone"} == {2}

    def test_unsampled_client_fits_its_embedding(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changes = {
            "federation__sampled_clients": 0.25,
            "sft_p__keep_models": True,
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
        changes = {"sft_p__pruning_ratios": "", "sft_p__late_clients": 1, "sft_p__late_steps": 50}
        grid = real_sites(bench, bench.grid(**changes))
        for context in grid.contexts.values():
            context.node_config["max-steps"] = 5
        with pytest.raises(
            RunFailed, match=r"max-steps = 5: sft-p.late-steps x training.accumulation = 50"
        ):
            bench.run(grid, **changes)

    def test_lost_embedding_leaves_no_reported_model(self, bench: Bench) -> None:
        """The client loses its metrics and its model; the other clients keep theirs."""
        changes = {"sft_p__keep_models": True, "evaluation__local_baseline": True}
        grid = bench.grid(**changes)

        def lose(message: Message) -> None:
            body = read(message.content)
            if (body.header.kind, body.header.client, body.header.part) == (
                "deliver",
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

    @pytest.mark.parametrize("before", ["all", "read"])
    @pytest.mark.parametrize("norm", ["all", "read"])
    def test_lanes_are_cut_again_only_with_norm_all(
        self, bench: Bench, before: str, norm: str
    ) -> None:
        smaller = (
            bench.run(sft_p__keep_models=True, federation__rounds=1, sft_p__norm=before)
            / "clients"
            / "node-00002"
        )
        changes = {"model": str(smaller), "federation__rounds": 1, "sft_p__norm": norm}
        if (before, norm) == ("all", "all"):
            grid = bench.grid(**changes)
            for context in grid.contexts.values():
                context.node_config["model-path"] = str(smaller)
            assert {
                client["status"] for client in summary(bench.run(grid, **changes))["clients"]
            } == {"completed"}
            return
        with pytest.raises(
            EspalierError,
            match=f"sft-p.norm = '{norm}': residual dimensions of the model were removed before",
        ):
            bench.run(**changes)

    # ----- figures for people ---------------------------------------------------------------------

    def test_mask_figures_are_those_of_private_state(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("server_app.app._remove_private_state", lambda run: None)
        monkeypatch.setattr(personal_models, "draw", mask_analysis.draw)
        changes = {"sft_p__validation_samples": 2, "evaluation__local_baseline": True}
        grid = bench.grid(**changes)
        run = Uninterrupted(bench, bench.run(grid, **changes), [], [], "")
        document = json.loads((run.folder / "masks.json").read_text())
        found = [masks(run, client) for client in range(4)]
        pair = next(entry for entry in document["agreement"] if entry["clients"] == [0, 3])
        one, other = (torch.cat(list(own.values())) for own in (found[0], found[3]))
        assert pair["agreement"] == pytest.approx(float((one == other).double().mean()))
        ratios = [
            (float(found[0][gate].double().mean()), float(found[3][gate].double().mean()))
            for gate in found[0]
        ]
        sizes = [len(mask) for mask in found[0].values()]
        chance = sum(
            size * (a * b + (1 - a) * (1 - b)) for size, (a, b) in zip(sizes, ratios, strict=True)
        ) / sum(sizes)
        assert pair["chance"] == pytest.approx(chance)
        blocks = len({block for block, _ in found[0]})
        expected = [float(found[1][block, "mlp_reads"].double().mean()) for block in range(blocks)]
        assert document["density"]["1"]["mlp_reads"] == pytest.approx(expected)
        assert [len(spent) for spent in document["spent"]["2"]] == [3, 3]
        assert all(
            0.2 < value < 3
            for rounds in document["spent"].values()
            for spent in rounds
            for value in spent
        )
        assert {number: value > 1 for number, value in document["perplexity"]["2"].items()} == {
            "1": True,
            "2": True,
        }
        for name in ("agreement", "density", "budget", "perplexity"):
            assert (run.folder / f"masks-{name}.png").read_bytes().startswith(b"\x89PNG")
        sent = {name for _, reply in grid.received for name in read(reply.content).fields}
        assert not sent & {"spent", "perplexity", "target", "masks"}

    def test_client_short_of_held_out_text_trains(self, bench: Bench) -> None:
        for client in range(bench.num_clients):
            passages = private_text(client).split("\n\n")
            kept = [passage for passage in passages if not held_out(passage)]
            (bench.folder / f"text-{client}.txt").write_text(
                "\n\n".join([*kept, next(filter(held_out, passages))])
            )
        document = summary(bench.run(sft_p__validation_samples=2, evaluation__sequence_length=64))
        assert {client["status"] for client in document["clients"]} == {"completed"}

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"sft_p__pruning_ratios": "0.2,,0.5"}, "'' is not a number"),
            ({"sft_p__pruning_ratios": ","}, "'' is not a number"),
            (
                {"sft_p__validation_samples": 2, "task__name": "sst2"},
                "validation-samples = 2: task.name = 'sst2' does not read it",
            ),
            ({"sft_p__pruning_ratios": "0.2,x"}, "'x' is not a number"),
            (
                {"sft_p__pruning_ratios": "0.2,0.99"},
                "'0.99' is not a number above 0 and up to 0.95",
            ),
            (
                {"sft_p__pruning_ratio_of": "model", "sft_p__pruning_ratios": "0.95"},
                r"sft-p.pruning-ratio = 0.95 \(pruning-ratio-of = 'model'\)",
            ),
            (
                {"sft_p__late_clients": 4},
                "late-clients = 4: of 4 clients none is left for the rounds",
            ),
            (
                {"sft_p__late_clients": 1, "sft_p__conditioned": False},
                "a late client has nothing to fit",
            ),
            (
                {"lora__merge": True},
                "lora.merge = true: clients of sft-p end with models of different shapes",
            ),
        ],
    )
    def test_incompatible_settings_are_refused_early(
        self, bench: Bench, changes: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(EspalierError, match=words):
            bench.run(bench.grid(), **changes)
        assert not (bench.folder / "runs").exists()


def test_real_site_ignores_ratios_by_client() -> None:
    """Only simulated clients use the list of ratios by client number."""
    config = {"method": "sft-p", "sft-p.pruning-ratio": 0.3, "sft-p.pruning-ratios": "0.5"}
    gates = ResidualGates(Site(config, NodeSettings()).model.plan)
    header = Header(
        schema_version=SCHEMA_VERSION, kind="train", method="sft-p", lineage=BY_HAND, server_round=1, client=0, attempt=1,
        part=0, num_parts=1,
    )  # fmt: skip
    assert own_target(Site(config, NodeSettings()), header) == gates.target(0.3, "blocks")
    assert own_target(Site(config, simulated_node()), header) == gates.target(0.5, "blocks")
    assert own_target(Site(config, NodeSettings(pruned_share=0.4)), header) == gates.target(
        0.4, "blocks"
    )


def test_budget_is_met_by_ten_draws_on_average() -> None:
    assert steps_to_budget([1.5] * 5 + [1.0] * 10) == 15
    assert steps_to_budget([1.1, 0.9] * 5 + [3.0]) == 10
    assert steps_to_budget([1.0] * 9) is None
    assert steps_to_budget([1.03] * 50) is None


def real_sites(bench: Bench, grid: InProcessGrid) -> InProcessGrid:
    """Turn the sites of a grid into real sites."""
    grid.simulated = False
    for client, context in enumerate(grid.contexts.values()):
        own = {"site": f"site-{client}", "model-path": str(bench.model), "min-tokens": 1}
        context.node_config |= own | {"partition-id": -1, "num-partitions": 0}
    return grid


def reviews(number: int) -> str:
    """Return JSON Lines records with sentences and labels."""
    generator = random.Random(number)
    labelled = (
        (" ".join(generator.choices(WORDS, k=4)), generator.randrange(2)) for _ in range(number)
    )
    return "".join(
        json.dumps({"sentence": words, "label": label}) + "\n" for words, label in labelled
    )


def of_reviews(bench: Bench) -> dict[str, Any]:
    """Return the settings of a run on items in the bench's folder."""
    return {
        "task__name": "sst2",
        "task__max_tokens": 48,
        "task__test_path": str(bench.folder / "tests.jsonl"),
        "data__source": "files",
        "data__path": str(bench.folder / "items-{client}.jsonl"),
        "evaluation__local_baseline": True,
    }


def shared_shapes(run: Uninterrupted) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors that clients share, from the settings."""
    return trained(OpenedModel(run.bench.model).plan, parse(run.bench.config())).shapes()


def every_round(run: Uninterrupted, client: int) -> list[dict[str, torch.Tensor]]:
    """Return a client's private tensors after each round."""
    (folder,) = (run.bench.folder / "state").glob(f"*/node-{client:05d}/lasting")
    document = json.loads((folder / "conditioning.json").read_text())
    return [
        load((folder / f"{entry['blobs']['own']}.blob").read_bytes()) for entry in document["kept"]
    ]


def private(run: Uninterrupted, client: int) -> dict[str, torch.Tensor]:
    """Return a client's private tensors after the last round."""
    return every_round(run, client)[-1]


def result_of(run: Uninterrupted) -> dict[str, dict[str, torch.Tensor]]:
    """Return the written generator, by blob key and name."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in load_file(run.folder / "generator.safetensors").items():
        key, _, tensor = name.partition(".")
        found.setdefault(key, {})[tensor] = value
    return found


def masks(
    run: Uninterrupted,
    client: int,
    settings: RunSettings | None = None,
    share: float | None = None,
    *budget: float,
) -> dict[tuple[int, str], torch.Tensor]:
    """Return a client's masks, computed from its private tensors and the written generator."""
    settings = settings or parse(run.bench.config())
    plan = OpenedModel(run.bench.model).plan
    gates = ResidualGates(plan)
    embedding = private(run, client).get("embedding")
    assert embedding is not None
    own = torch.cat([embedding, torch.tensor(budget)])
    logits = gate_logits(plan, shape_of(settings), result_of(run), own)
    share = (0.2, 0.2, 0.5, 0.5)[client] if share is None else share
    return gates.chosen(logits, gates.target(share, "blocks"))

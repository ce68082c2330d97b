"""SFT-P: promises of every method, and each client's own model.

The server averages generator and LoRA. Embeddings, masks and budgets stay at the clients.
"""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from client_app.methods.tuning.sft_p import OUTWARD
from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.structured.residual_gates import ResidualGates
from espalier.messages.records import read
from espalier.methods.tuning.sft_p import trained
from espalier.settings.node import OF_A_SECRET
from espalier.settings.run import parse
from espalier.training.mask_history import steps_to_budget
from espalier.training.masked_training import first_shared
from pruning_kernels.votes.bitmask import pack
from server_app.artifacts import mask_analysis, personal_models
from tests.bench import Bench, private_text, summary
from tests.methods.promises.contracts import outgoing_bytes
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.personal_promises import PersonalPromises, perplexity_of, samples_of
from tests.methods.promises.promises import held_out
from tests.methods.tuning.sft_p.sft_p_runs import SftPRuns, every_round, masks, real_sites


class TestSftP(SftPRuns, PersonalPromises):
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
            places = [np.flatnonzero(mask) for mask in some]
            secrets += [
                own.astype(kind).tobytes()
                for own in places
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
        own = {"sft_p__ratios": "", "sft_p__budget_input": factor}
        grid = real_sites(bench, bench.grid(**own))
        for share, context in zip(
            (0.5173, 0.9473, 0.9673, 0.0), grid.contexts.values(), strict=True
        ):
            context.node_config["pruning-ratio"] = share
        changes = own | {"sft_p__ratio_of": "model", "quorum": 0.5}
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
            "pruning__keep_models": True,
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
            if read(reply.content).header.kind == "local_baseline"
        ]
        assert [body.fields.keys() for body in alone] == [{"seconds"}] * 4

    def test_real_site_writes_where_its_owner_says(self, bench: Bench) -> None:
        grid = real_sites(bench, bench.grid(pruning__keep_models=True))
        for client, context in enumerate(grid.contexts.values()):
            context.node_config |= (
                {"models-dir": str(bench.folder / "own" / str(client))} if client % 2 else {}
            )
        folder = bench.run(grid, pruning__keep_models=True)
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

    @pytest.mark.parametrize("before", ["all", "read"])
    @pytest.mark.parametrize("norm", ["all", "read"])
    def test_residual_dimensions_are_cut_again_only_with_norm_all(
        self, bench: Bench, before: str, norm: str
    ) -> None:
        smaller = (
            bench.run(pruning__keep_models=True, federation__rounds=1, sft_p__norm=before)
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


def test_budget_is_met_by_ten_draws_on_average() -> None:
    assert steps_to_budget([1.5] * 5 + [1.0] * 10) == 15
    assert steps_to_budget([1.1, 0.9] * 5 + [3.0]) == 10
    assert steps_to_budget([1.0] * 9) is None
    assert steps_to_budget([1.03] * 50) is None


def shared_shapes(run: Uninterrupted) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors that clients share, from the settings."""
    return trained(OpenedModel(run.bench.model).plan, parse(run.bench.config())).shapes()

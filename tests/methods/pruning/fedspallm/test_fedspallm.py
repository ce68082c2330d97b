"""FedSpaLLM: aggregation as in the paper, in one round."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array
from safetensors import safe_open
from safetensors.torch import load, save

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.records import STYPE
from espalier.storage.blobs import sha256
from tests.bench import EVALUATED, Bench, model_files, summary
from tests.methods.promises.federations import Federations, Uninterrupted
from tests.methods.promises.spoiled_replies import spoiled
from tests.methods.pruning.fedspallm.fedspallm_runs import exact, pruned_layers
from tests.methods.pruning.fedspallm.test_fedspallm_rounds import SpaLLMPromises


def dense_of(tensors: dict[str, torch.Tensor], name: str, size: int) -> list[float | None]:
    """Return one matrix as a list of weights; pruned ones are None."""
    words = tensors[f"{name}.prune_mask"].tolist()
    kept = iter(tensors[f"{name}.kept"].float().tolist())
    return [None if words[i // 64] >> (i % 64) & 1 else next(kept) for i in range(size)]


class TestFedSpaLLM(Federations):
    """Federations with one round in which every client prunes every layer.

    The class takes over those promises that runs of one and of several rounds keep differently.
    """

    test_every_message_matches_its_contract = SpaLLMPromises.test_every_message_matches_its_contract
    test_nothing_private_in_any_outgoing_byte = (
        SpaLLMPromises.test_nothing_private_in_any_outgoing_byte
    )
    test_same_seed_gives_same_bytes = SpaLLMPromises.test_same_seed_gives_same_bytes
    test_killed_and_resumed_equals_never_killed = (
        SpaLLMPromises.test_killed_and_resumed_equals_never_killed
    )
    test_full_disk_at_checkpoint_loses_no_round = (
        SpaLLMPromises.test_full_disk_at_checkpoint_loses_no_round
    )
    test_one_client_dead_the_round_still_ends = (
        SpaLLMPromises.test_one_client_dead_the_round_still_ends
    )
    test_a_malformed_reply_costs_its_sender_alone = (
        SpaLLMPromises.test_a_malformed_reply_costs_its_sender_alone
    )
    test_a_round_is_answered_once = SpaLLMPromises.test_a_round_is_answered_once
    other_orders = SpaLLMPromises.other_orders
    test_exported_model_has_reported_perplexity = (
        SpaLLMPromises.test_exported_model_has_reported_perplexity
    )
    test_own_text_figures_equal_transformers = (
        SpaLLMPromises.test_own_text_figures_equal_transformers
    )
    test_unpushed_result_costs_figures_alone = (
        SpaLLMPromises.test_unpushed_result_costs_figures_alone
    )
    test_exact_sparsity = SpaLLMPromises.test_exact_sparsity

    method = "fedspallm"
    settings: ClassVar[dict[str, Any]] = {"pruning.sparsity": 0.5}
    last_round = 1

    def expected_sparsity(self, model: OpenedModel) -> float:
        return exact(model, 0.5)

    @pytest.mark.parametrize("aggregation", ["l0", "mean"])
    @pytest.mark.parametrize("weights", ["equal", "samples"])
    def test_the_fold_is_that_of_a_slow_loop(
        self, bench: Bench, aggregation: str, weights: str
    ) -> None:
        """A weight's mean counts only the clients that kept it.

        The most pruned weights are pruned, then those with the smaller mean, then the lower index.
        """
        changes: dict[str, Any] = {
            "fedspallm__aggregation": aggregation,
            "federation__client_weights": weights,
        }
        # This value disables the limit.
        changes["federation__max_update_ratio"] = 1e6
        if weights == "samples":
            changes["federation__max_weight_ratio"] = 1e6
        grid = bench.grid(**changes)
        for context in grid.contexts.values():
            context.node_config["num-samples"] = 1 + context.node_config["partition-id"]
        folder = bench.run(grid, **changes)
        weight_of = np.float32([1, 2, 3, 4] if weights == "samples" else [1, 1, 1, 1])
        model = OpenedModel(bench.model)
        sent = pruned_layers(grid, 1)
        assert sorted(sent) == list(range(bench.num_clients))
        with safe_open(folder / "model" / "model.safetensors", "pt") as written:
            for block in model.plan.blocks:
                for linear in block.linears:
                    size = linear.num_weights
                    clients = [
                        dense_of(sent[client][f"block-{block.index:04d}"], linear.name, size)
                        for client in sorted(sent)
                    ]
                    means = []
                    votes = []
                    for values in zip(*clients, strict=True):
                        kept = [
                            (w, np.float32(value))
                            for w, value in zip(weight_of, values, strict=True)
                            if value is not None
                        ]
                        divisor = (
                            weight_of.sum()
                            if aggregation == "mean"
                            else sum((w for w, _ in kept), np.float32(0))
                        )
                        total = sum((value * w for w, value in kept), np.float32(0))
                        means.append(total / divisor if kept else np.float32(0))
                        votes.append(len(values) - len(kept))
                    order = sorted(range(size), key=lambda i: (-votes[i], abs(means[i]), i))
                    for i in order[: size // 2]:
                        means[i] = np.float32(0)
                    stored = model.checkpoint.read(linear.parameter).dtype
                    found = written.get_tensor(linear.parameter).flatten()
                    assert torch.equal(found, torch.tensor(np.array(means)).to(stored))

    def test_equal_windows_are_equal_weights(self, bench: Bench, plain: Uninterrupted) -> None:
        assert model_files(bench.run(federation__client_weights="samples")) == model_files(
            plain.folder
        )

    def test_unexpanded_mask_prunes_unanimous_weights(self, bench: Bench) -> None:
        grid = bench.grid(fedspallm__mask_expansion=False)
        folder = bench.run(grid, fedspallm__mask_expansion=False)
        model = OpenedModel(bench.model)
        sent = pruned_layers(grid, 1)
        unanimous = 0
        for block in model.plan.blocks:
            for linear in block.linears:
                tensors = [sent[client][f"block-{block.index:04d}"] for client in sent]
                clients = [dense_of(one, linear.name, linear.num_weights) for one in tensors]
                unanimous += sum(
                    all(value is None for value in values) for values in zip(*clients, strict=True)
                )
        share = unanimous / model.plan.num_weights
        document = summary(folder)
        assert document["sparsity"]["achieved"] == pytest.approx(share, abs=1e-12)
        assert document["report"]["sparsity_before_expansion"] == pytest.approx(share, abs=1e-12)
        assert 0 < share < 0.5

    def test_single_client_baseline_equals_federated(self, tmp_path: Path, bench: Bench) -> None:
        alone = Bench(
            tmp_path / "local_baseline", self.method, bench.settings | EVALUATED, num_clients=1
        )
        for values in (metric["values"] for metric in summary(alone.run())["metrics"]):
            # Clients round their losses.
            assert values["local_baseline"] == pytest.approx(values["federated"], rel=6e-4)
            assert values["federated"] != values["dense"]

    @pytest.mark.parametrize("method", ["wanda", "ria", "magnitude"])
    def test_other_local_methods_keep_other_weights(self, bench: Bench, method: str) -> None:
        folder = bench.run(fedspallm__local_method=method)
        model = OpenedModel(bench.model)
        with safe_open(folder / "model" / "model.safetensors", "pt") as written:
            for linear in (linear for block in model.plan.blocks for linear in block.linears):
                found = written.get_tensor(linear.parameter)
                dense = model.checkpoint.read(linear.parameter)
                assert torch.equal(found[found != 0], dense[found != 0])

    def test_sparsegpt_changes_the_kept_weights(self, plain: Uninterrupted) -> None:
        folder = plain.folder
        model = OpenedModel(plain.bench.model)
        linear = model.plan.blocks[0].linears[0]
        with safe_open(folder / "model" / "model.safetensors", "pt") as written:
            found = written.get_tensor(linear.parameter)
            dense = model.checkpoint.read(linear.parameter)
        assert not torch.equal(found[found != 0], dense[found != 0])

    def test_low_precision_leaves_kept_weights_alone(self, bench: Bench) -> None:
        """Activations are float16, but the kept weights are those of the file.

        These are bfloat16, and float16 cannot hold their range.
        """
        folder = bench.run(fedspallm__local_method="magnitude", dtype="float16")
        model = OpenedModel(bench.model)
        with safe_open(folder / "model" / "model.safetensors", "pt") as written:
            for linear in (linear for block in model.plan.blocks for linear in block.linears):
                found = written.get_tensor(linear.parameter)
                dense = model.checkpoint.read(linear.parameter)
                assert torch.equal(found[found != 0], dense[found != 0])

    def test_a_pattern_has_no_schedule(self, bench: Bench) -> None:
        with pytest.raises(EspalierError, match="a pattern has one sparsity"):
            bench.run(pruning__pattern="2:4", fedspallm__schedule="linear")

    def test_implausible_values_drop_their_senders(self, bench: Bench) -> None:
        """Each of three clients sends one implausible value: seconds, samples or kept weights."""

        def saying(name: str, value: Any) -> Callable[[Any], Any]:
            def lie(reply: Any) -> Any:
                reply.content["fields"][name] = value
                return reply

            return lie

        def inflate(reply: Any) -> Any:
            hashes = list(reply.content["fields"]["blob_sha256"])
            for place, key in enumerate(sorted(reply.content["blobs"])):
                tensors = load(reply.content["blobs"][key].data)
                blown = save(
                    {
                        n: torch.full_like(t, 3e38) if n.endswith(".kept") else t
                        for n, t in tensors.items()
                    }
                )
                reply.content["blobs"][key], hashes[place] = (
                    Array("", (), STYPE, blown),
                    sha256(blown),
                )
            reply.content["fields"]["blob_sha256"] = hashes
            return reply

        changes = {"federation__client_weights": "samples", "quorum": 0.25}
        lies = {0: saying("seconds", 1.7e308), 1: inflate, 3: saying("calibration_samples", 2**60)}
        grid = bench.grid(**changes)
        grid.tamper = {client: spoiled(lie) for client, lie in lies.items()}
        clients = summary(bench.run(grid, **changes))["clients"]
        assert [client["status"] for client in clients] == [
            "dropped",
            "dropped",
            "completed",
            "dropped",
        ]
        assert "seconds" in clients[0]["reason"]
        assert "a kept weight is over 100 times the largest dense one" in clients[1]["reason"]
        assert "calibration_samples" in clients[3]["reason"]

    def test_a_pattern_holds_in_every_group(self, bench: Bench) -> None:
        folder = bench.run(pruning__pattern="2:4")
        with safe_open(folder / "model" / "model.safetensors", "pt") as written:
            for linear in (
                linear for block in OpenedModel(bench.model).plan.blocks for linear in block.linears
            ):
                zeros = (written.get_tensor(linear.parameter).view(-1, 4) == 0).sum(dim=1)
                assert set(zeros.tolist()) == {2}

    def test_incompatible_pattern_is_refused_early(self, bench: Bench) -> None:
        with pytest.raises(EspalierError, match=r"pruning\.pattern = '1:5'"):
            bench.run(pruning__pattern="1:5")
        with pytest.raises(EspalierError, match=r"128 columns at a time, which 3 does not divide"):
            bench.run(pruning__pattern="2:3", model=str(_three_wide(bench)))

    def test_bytes_are_masks_and_kept_weights(self, plain: Uninterrupted) -> None:
        """A layer in bfloat16 takes one bit per weight and two bytes per kept weight.

        A dense layer takes two bytes per weight.
        """
        folder = plain.folder
        bench = plain.bench
        entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        plan = OpenedModel(bench.model).plan
        linears = [linear for block in plan.blocks for linear in block.linears]
        expected = sum(
            -(-linear.num_weights // 64) * 8 + 2 * (linear.num_weights - linear.num_weights // 2)
            for linear in linears
        )
        for client in range(bench.num_clients):
            sent = [
                e
                for e in entries
                if e["client"] == client and e["direction"] == "up" and e["block"]
            ]
            assert sum(e["raw_bytes"] for e in sent) == expected < 0.6 * 2 * plan.num_weights
            assert sum(e["dense_bytes"] for e in sent) == 2 * plan.num_weights


def _three_wide(bench: Bench) -> Path:
    """Save a model whose widths are multiples of 3, so that the pattern 2:3 fits its rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = bench.folder / "three"
    shutil.copytree(bench.model, folder)
    sizes = {
        "hidden_size": 12,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vocabulary = json.loads((bench.model / "config.json").read_text())["vocab_size"]
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=vocabulary)).save_pretrained(folder)
    return folder

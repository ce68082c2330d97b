"""FedSpaLLM: promises of every method, and aggregation as in the paper."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array
from safetensors import safe_open
from safetensors.torch import load, save

import client_app.methods.pruning.fedspallm_layers
from espalier.errors import EspalierError, InputError
from espalier.hf.opening.opened import OpenedModel
from espalier.messages.message import MessageBody
from espalier.messages.records import STYPE, read
from espalier.methods.pruning.fedspallm import sparsity_of
from espalier.settings.run import parse
from espalier.storage.blobs import sha256
from strategies.base.rounds import RunFailed
from strategies.pruning.fedspallm.global_model import HeldLayers
from tests.bench import EVALUATED, Bench, Home, events, model_files, results, summary
from tests.in_process import InProcessGrid
from tests.methods.promises.federations import Federations, Uninterrupted, silent_after_enrolment
from tests.methods.promises.promises import PruningPromises
from tests.methods.promises.spoiled_replies import spoiled
from tests.tiny_model import save_tiny_llama


def exact(model: OpenedModel, sparsity: float) -> float:
    """Return the achieved sparsity if every matrix loses ``int(weights * sparsity)``."""
    shapes = [linear.shape for block in model.plan.blocks for linear in block.linears]
    return sum(int(rows * columns * sparsity) for rows, columns in shapes) / sum(
        rows * columns for rows, columns in shapes
    )


def pruned_layers(
    grid: InProcessGrid | Uninterrupted, server_round: int
) -> dict[int, dict[str, dict[str, torch.Tensor]]]:
    """Return the tensors that each client sent in a round: client -> blob key -> tensors."""
    found: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
    for _, reply in grid.received:
        body = read(reply.content)
        if body.header.kind in ("train", "fetch") and body.header.server_round == server_round:
            found.setdefault(body.header.client, {}).update(
                {key: load(blob) for key, blob in body.blobs.items()}
            )
    return found


def dense_of(tensors: dict[str, torch.Tensor], name: str, size: int) -> list[float | None]:
    """Return one matrix as a list of weights; pruned ones are None."""
    words = tensors[f"{name}.prune_mask"].tolist()
    kept = iter(tensors[f"{name}.kept"].float().tolist())
    return [None if words[i // 64] >> (i % 64) & 1 else next(kept) for i in range(size)]


def sampled(folder: Path) -> dict[int, list[int]]:
    """Return each client's layers in the last round."""
    return {client["client"]: client["metrics"]["layers"] for client in summary(folder)["clients"]}


STATES = ("checkpoint/state.json", "checkpoint/previous.json")
"""Paths of the documents that record which version of each layer a client holds."""


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


class SpaLLMPromises(PruningPromises):
    """Promises of runs with one and with several rounds."""

    def other_orders(self, order: MessageBody) -> list[MessageBody]:
        """Return orders with other samples of the layers."""
        sampled = [blocks for blocks in ([0], [1], [0, 1]) if blocks != order.fields["blocks"]]
        return [MessageBody(order.header, {**order.fields, "blocks": blocks}) for blocks in sampled]


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
    test_undelivered_result_costs_figures_alone = (
        SpaLLMPromises.test_undelivered_result_costs_figures_alone
    )
    test_exact_sparsity = SpaLLMPromises.test_exact_sparsity

    method = "fedspallm"
    settings: ClassVar[dict[str, Any]] = {"fedspallm.sparsity": 0.5}
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
        alone = Bench(tmp_path / "alone", self.method, bench.settings | EVALUATED, num_clients=1)
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
            bench.run(fedspallm__pattern="2:4", fedspallm__schedule="linear")

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
        folder = bench.run(fedspallm__pattern="2:4")
        with safe_open(folder / "model" / "model.safetensors", "pt") as written:
            for linear in (
                linear for block in OpenedModel(bench.model).plan.blocks for linear in block.linears
            ):
                zeros = (written.get_tensor(linear.parameter).view(-1, 4) == 0).sum(dim=1)
                assert set(zeros.tolist()) == {2}

    def test_incompatible_pattern_is_refused_early(self, bench: Bench) -> None:
        with pytest.raises(EspalierError, match=r"fedspallm\.pattern = '1:5'"):
            bench.run(fedspallm__pattern="1:5")
        with pytest.raises(EspalierError, match=r"128 columns at a time, which 3 does not divide"):
            bench.run(fedspallm__pattern="2:3", model=str(_three_wide(bench)))

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


SIX_LAYERS = {
    "federation.rounds": 4,
    "fedspallm.sampled-layers": 0.33,
    "evaluation.local-baseline": True,
}
"""Settings of four rounds on a model of six layers.

A client samples one or two layers per round and gets all layers at the end.
"""


class TestRounds(SpaLLMPromises):
    """Two rounds with rising sparsity.

    Clients of capability 1, 2, 2, 2 sample one layer or both.
    """

    method = "fedspallm"
    settings: ClassVar[dict[str, Any]] = {
        "federation.rounds": 2,
        "fedspallm.schedule": "linear",
        "fedspallm.sparsity": 0.5,
        "fedspallm.capabilities": "1,2",
    }
    last_round = 1
    result_round = 3

    def expected_sparsity(self, model: OpenedModel) -> float:
        return exact(model, 0.5)

    @pytest.fixture(scope="class")
    @classmethod
    def model_of_six(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return save_tiny_llama(tmp_path_factory.mktemp("six"), blocks=6)

    @pytest.fixture
    def six(self, bench: Bench, model_of_six: Path) -> Bench:
        """Return a bench whose model has six layers."""
        return replace(
            bench, home=Home(model_of_six, bench.public), settings=bench.settings | SIX_LAYERS
        )

    @pytest.fixture(scope="class")
    @classmethod
    def whole_six(
        cls, model_of_six: Path, home: Home, tmp_path_factory: pytest.TempPathFactory
    ) -> Uninterrupted:
        """Execute one undisturbed run on six layers."""
        return cls._uninterrupted(
            tmp_path_factory.mktemp("whole-six"), Home(model_of_six, home.public), SIX_LAYERS
        )

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
            if body.header.server_round == 1 and body.header.kind in ("train", "deliver")
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
        held = [[0] * 6 for _ in range(4)]
        brought = set[int]()
        spared = 0
        # The order of each client's letters matters, not that between clients.
        for body in sorted(sent, key=lambda body: body.header.client):
            before = versions[body.header.server_round - 1]
            own = held[body.header.client]
            if body.header.kind == "deliver":
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
        assert held == [versions[3]] * 4

    def test_results_equal_those_of_all_stale_layers(
        self, six: Bench, whole_six: Uninterrupted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        push = HeldLayers.push
        monkeypatch.setattr(
            HeldLayers,
            "push",
            lambda held, rounds, number, model, ends=None: push(held, rounds, number, model),
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
            lambda header: (header.kind, header.server_round, header.client) == ("deliver", 5, 2)
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

        monkeypatch.setattr("client_app.methods.pruning.fedspallm_layers.take_layers", refuse)
        with pytest.raises(
            RunFailed,
            match=r"0 clients left for round 2(.|\n)*node-00003: deliver: the disk is full",
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

    def test_clients_recover_lost_layers(self, six: Bench, whole_six: Uninterrupted) -> None:
        """The state of one client and a part of two others is lost before round 4.

        Layers that these clients hold but do not read follow at the end.
        """
        damaged = {0: "", 1: "held.json", 2: "*.blob"}
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
            assert ("deliver" in own[own.index("train") : -own[::-1].index("train")]) == (
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
            return deliver(site, request)

        deliver = client_app.methods.pruning.fedspallm_layers.take_layers
        monkeypatch.setattr(client_app.methods.pruning.fedspallm_layers, "take_layers", refuse)
        document = summary(bench.run())
        assert [client["status"] for client in document["clients"]] == [
            "completed",
            "dropped",
            "completed",
            "completed",
        ]
        assert document["clients"][1]["reason"] == "deliver: the disk is full"

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


class TestSampling:
    """Samples that do not cover all layers, and clients that die with their layers."""

    @pytest.fixture
    def bench(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
        monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
        monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
        return Bench(tmp_path, "fedspallm", {"fedspallm.sampled-layers": 0.5}, num_clients=1)

    def test_too_few_layer_places_are_refused(self, bench: Bench) -> None:
        with pytest.raises(
            EspalierError,
            match=r"prune 1 layer in a round, the model has 2 \(node-00000 1\); raise it",
        ):
            bench.run()

    def test_or_covered_over_rounds(self, bench: Bench) -> None:
        folder = bench.run(fedspallm__coverage="over-rounds")
        document = summary(folder)
        assert document["rounds"] == 2
        assert sorted(document["report"]["layer_versions"]) == [1, 2]
        assert document["sparsity"]["achieved"] == pytest.approx(
            exact(OpenedModel(bench.model), 0.5)
        )

    def test_layers_of_dead_client_are_pruned_later(self, tmp_path: Path, bench: Bench) -> None:
        """Two clients have one layer each; one of them never answers ``train``."""
        two = Bench(
            tmp_path / "two",
            "fedspallm",
            {"fedspallm.sampled-layers": 0.5, "quorum": 0.5},
            num_clients=2,
        )
        grid = two.grid()
        grid.tamper[1] = silent_after_enrolment
        document = summary(two.run(grid))
        assert [client["status"] for client in document["clients"]] == ["completed", "dropped"]
        assert sorted(document["report"]["layer_versions"]) == [1, 2]
        assert document["sparsity"]["achieved"] == pytest.approx(exact(OpenedModel(two.model), 0.5))

    def test_run_covering_over_rounds_resumes(self, bench: Bench) -> None:
        whole = bench.run(fedspallm__coverage="over-rounds")
        cut = bench.killed(
            lambda header: header.server_round == 2, fedspallm__coverage="over-rounds"
        )
        resumed = bench.run(fedspallm__coverage="over-rounds", resume_from=str(cut))
        assert results(resumed) == results(whole)

    def test_capability_is_stated_or_measured(self, bench: Bench) -> None:
        for stated in (3.0, 0.0):
            grid = bench.grid(fedspallm__coverage="over-rounds")
            seen = []
            for context in grid.contexts.values():
                context.node_config["capability"] = stated
            bench.run(grid, fedspallm__coverage="over-rounds")
            seen = [
                read(reply.content).fields
                for _, reply in grid.received
                if read(reply.content).header.kind == "enrol"
            ]
            assert [entry["measured"] for entry in seen] == [stated == 0]
            assert seen[0]["capability"] == 3.0 or stated == 0 < seen[0]["capability"]

    def test_mixed_capability_sources_are_refused(self, tmp_path: Path, bench: Bench) -> None:
        two = Bench(tmp_path / "two", "fedspallm", {}, num_clients=2)
        grid = two.grid()
        next(iter(grid.contexts.values())).node_config["capability"] = 0.0
        with pytest.raises(
            EspalierError, match="capability: node-00000 measured its own, others state theirs"
        ):
            two.run(grid)


@pytest.mark.parametrize("value", ["1,x", "0", "-1,2", "nan"])
def test_non_positive_capabilities_are_refused(value: str) -> None:
    with pytest.raises(EspalierError, match=r"fedspallm\.capabilities"):
        parse({"method": "fedspallm", "fedspallm.capabilities": value})


def test_schedules_by_hand() -> None:
    """Schedules of four rounds that end at 80% sparsity."""
    common = {"method": "fedspallm", "federation.rounds": 4, "fedspallm.sparsity": 0.8}
    jobs = {
        name: parse({**common, "fedspallm.schedule": name})
        for name in ("constant", "linear", "cubic")
    }
    found = {
        name: [round(sparsity_of(job, r), 10) for r in (1, 2, 3, 4, 5)]
        for name, job in jobs.items()
    }
    assert found["constant"] == [0.8] * 5
    assert found["linear"] == [0.2, 0.4, 0.6, 0.8, 0.8]
    assert found["cubic"] == [0.4625, 0.7, 0.7875, 0.8, 0.8]

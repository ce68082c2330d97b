"""Pooled pruning: promises of every method, and masks by pooled samples, bit for bit."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors import safe_open
from safetensors.numpy import load

from espalier.data.client_text import client_samples
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.records import read, write
from espalier.messages.tensor_blobs import pack_tensors
from espalier.settings.node import parse_node
from espalier.settings.run import parse
from pruning_kernels.selection.comparison_groups import pruned_in_matrix
from pruning_kernels.votes.bitmask import unpack
from tests.bench import EVALUATED, Bench, events, model_files, summary
from tests.hf.stream.plain_sums import plain_masks, plain_sums
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import PruningPromises
from tests.tiny_model import save_tiny_llama

GROUPS: dict[str, dict[str, Any]] = {
    "row": {"pruning.comparison-group": "row"},
    "layer": {"pruning.comparison-group": "layer"},
    "column": {"pruning.comparison-group": "column"},
    "2:4": {"pruning.pattern": "2:4"},
}


def samples_of(bench: Bench, own: Mapping[int, int] = {}) -> list[torch.Tensor]:
    """Return the calibration samples of each client; ``own`` are other numbers of samples."""
    run = parse(bench.config())
    opened = OpenedModel(bench.model)
    return [
        client_samples(
            run,
            parse_node(
                context.node_config | ({"num-samples": own[client]} if client in own else {}),
                simulated=True,
            ),
            opened.encode,
            context.node_config["partition-id"],
        )
        for client, context in enumerate(bench.grid().contexts.values())
    ]


def masks_of(folder: Path, bench: Bench) -> dict[str, np.ndarray]:
    """Return the masks of a run, bool, by parameter."""
    with safe_open(folder / "masks.safetensors", "np") as masks:
        return {
            linear.parameter: unpack(masks.get_tensor(linear.parameter), linear.shape)
            for block in OpenedModel(bench.model).plan.blocks
            for linear in block.linears
        }


def differing_bits(found: dict[str, np.ndarray], expected: dict[str, torch.Tensor]) -> int:
    assert found.keys() == expected.keys()
    return sum(int((found[name] != expected[name].numpy()).sum()) for name in found)


def require_centralized_equals_federated(bench: Bench) -> None:
    """Compare a run whose clients have parts of the run's data, as the centralized baseline."""
    changes = {"evaluation__centralized": "auto", "evaluation__local_baseline": True}
    grid = bench.grid(**changes)
    for context in grid.contexts.values():
        del context.node_config["data-path"]
    values = summary(bench.run(grid, **changes))["metrics"][0]["values"]
    assert values["centralized"] == values["federated"]
    assert values["local_baseline"] != pytest.approx(values["federated"], rel=6e-4)


class TestPooledPruning(PruningPromises):
    method = "pooled-pruning"
    settings: ClassVar[dict[str, Any]] = {"pruning.sparsity": 0.5}
    last_round = 1

    def expected_sparsity(self, model: OpenedModel) -> float:
        shapes = model.plan.shapes
        return sum(pruned_in_matrix(shape, 0.5, "row") for shape in shapes) / model.plan.num_weights

    @pytest.mark.parametrize("metric", ["wanda", "ria"])
    @pytest.mark.parametrize("group", list(GROUPS))
    @pytest.mark.parametrize("weighting", ["tokens", "equal"])
    def test_masks_equal_those_of_pooled_samples(
        self, bench: Bench, metric: str, group: str, weighting: str
    ) -> None:
        """No bit differs from masks by float64 sums of plain transformers' hooks."""
        changes = GROUPS[group] | {
            "pruning.metric": metric,
            "pooled-pruning.weighting": weighting,
        }
        bench.settings = bench.settings | changes
        grid = bench.grid()
        # This client has more tokens than the others.
        list(grid.contexts.values())[1].node_config["num-samples"] = 3
        found = masks_of(bench.run(grid), bench)
        expected = plain_masks(
            bench.model, samples_of(bench, {1: 3}), metric, group, 0.5, weighting, sequential=False
        )
        assert differing_bits(found, expected) == 0

    def test_sums_are_those_of_pooled_samples(self, plain: Uninterrupted) -> None:
        """The written sums equal float64 sums over all tokens of all clients."""
        expected = plain_sums(plain.bench.model, samples_of(plain.bench))
        with safe_open(plain.folder / "input-sums.safetensors", "pt") as file:
            assert set(file.keys()) == set(expected)
            counts = json.loads(file.metadata()["counts"])
            assert counts == [4 * 2 * 16] * len(OpenedModel(plain.bench.model).plan.blocks)
            for name, sums in expected.items():
                torch.testing.assert_close(file.get_tensor(name), sums, rtol=1e-14, atol=1e-16)
        assert summary(plain.folder)["report"] == {"tokens": 4 * 2 * 16}

    def test_messages_are_sums_of_words(self, plain: Uninterrupted) -> None:
        """Adding the sent words, modulo 2^64, and nothing else gives the sums of the run."""
        total: dict[tuple[str, str], np.ndarray] = {}
        for _, reply in plain.received:
            for key, blob in read(reply.content).blobs.items():
                for name, words in load(blob).items():
                    assert words.dtype == np.uint64
                    total[key, name] = total.get((key, name), np.zeros_like(words)) + words
        assert {name for _, name in total} == {
            "attn.q.squares", "attn.o.squares", "mlp.gate.squares", "mlp.down.squares", "count",
        }  # fmt: skip
        with safe_open(plain.folder / "input-sums.safetensors", "np") as file:
            for block in OpenedModel(plain.bench.model).plan.blocks:
                low, high = total[f"block-{block.index:04d}", "mlp.down.squares"]
                exact = [
                    int(upper) * 2**48 + int(lower) for lower, upper in zip(low, high, strict=True)
                ]
                found = file.get_tensor(block.linear("mlp.down").parameter).tolist()
                # Python divides integers with one rounding.
                assert found == [number / 2**56 for number in exact]
                assert total[f"block-{block.index:04d}", "count"].tolist() == [128]

    def test_centralized_equals_federated(self, bench: Bench) -> None:
        require_centralized_equals_federated(bench)

    def test_ledger_counts_every_byte_of_the_sums(self, whole: Uninterrupted) -> None:
        lines = (whole.folder / "ledger.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        blocks = OpenedModel(whole.bench.model).plan.blocks
        names = ("attn.q", "attn.o", "mlp.gate", "mlp.down")
        sums = sum(
            8 + 16 * block.linear(name).shape[1] - 8 * (name != "attn.q")
            for block in blocks
            for name in names
        )
        for client in range(whole.bench.num_clients):
            raw = [
                entry["raw_bytes"]
                for entry in entries
                if entry["client"] == client and entry["direction"] == "up" and entry["block"]
            ]
            assert sum(raw) == sums

    def test_single_client_baseline_equals_federated(self, tmp_path: Path, bench: Bench) -> None:
        alone = Bench(tmp_path / "alone", self.method, bench.settings | EVALUATED, num_clients=1)
        for values in (metric["values"] for metric in summary(alone.run())["metrics"]):
            # Clients round their losses.
            assert values["local_baseline"] == pytest.approx(values["federated"], rel=6e-4)
            assert values["federated"] != values["dense"]

    def test_client_lost_between_rounds_counts_in_its_blocks_only(self, bench: Bench) -> None:
        """Each block has the count of the clients that sent its sums."""

        def silent_in_round_2(request: Message, reply: Message) -> Message | None:
            return None if read(request.content).header.server_round == 2 else reply

        chosen = {"pruning.strategy": "iterative"}
        grid = bench.grid(**chosen)
        grid.tamper[1] = silent_in_round_2
        folder = bench.run(grid, **chosen, quorum=0.5)
        blocks = len(OpenedModel(bench.model).plan.blocks)
        expected = [4 * 2 * 16] + [3 * 2 * 16] * (blocks - 1)
        with safe_open(folder / "input-sums.safetensors", "pt") as file:
            assert json.loads(file.metadata()["counts"]) == expected
        assert summary(folder)["report"] == {"tokens": expected}

    def test_limits_that_nobody_meets_change_nothing(
        self, bench: Bench, plain: Uninterrupted
    ) -> None:
        folder = bench.run(
            federation__aggregation_rule="clipped-mean",
            federation__max_update_ratio=1e6,
            federation__max_weight_ratio=1e6,
        )
        assert model_files(folder) == model_files(plain.folder)
        assert all(client["capped"] == {} for client in summary(folder)["clients"])

    def test_met_limits_are_reported(self, bench: Bench, plain: Uninterrupted) -> None:
        limits = {
            "federation__aggregation_rule": "clipped-mean",
            "federation__max_update_ratio": 1.0,
            "federation__max_weight_ratio": 1.0,
        }
        grid = bench.grid(**limits)
        list(grid.contexts.values())[1].node_config["num-samples"] = 3
        folder = bench.run(grid, **limits)
        capped = [client["capped"] for client in summary(folder)["clients"]]
        assert all(one["sums"]["factor"] > 1 for one in capped)
        assert capped[1]["count"] == {"claimed": 48.0, "counted": 32.0}
        assert summary(folder)["report"] == {"tokens": 4 * 32}
        assert model_files(folder) != model_files(plain.folder)

    def test_a_count_that_no_client_has_is_refused(self, bench: Bench) -> None:
        grid = bench.grid()

        def claim(request: Message, reply: Message) -> Message:
            body = read(reply.content)
            for key, blob in body.blobs.items():
                arrays = load(blob)
                arrays["count"] = np.array([0], np.uint64)
                body.blobs[key] = pack_tensors(arrays)
            return Message(write(body), reply_to=request) if body.blobs else reply

        grid.tamper[2] = claim
        client = summary(bench.run(grid))["clients"][2]
        assert client["status"] == "dropped"


class TestIterativePooledPruning(PruningPromises):
    method = "pooled-pruning"
    settings: ClassVar[dict[str, Any]] = {
        "pruning.sparsity": 0.5,
        "pruning.strategy": "iterative",
    }
    last_round = 1

    def expected_sparsity(self, model: OpenedModel) -> float:
        shapes = model.plan.shapes
        return sum(pruned_in_matrix(shape, 0.5, "row") for shape in shapes) / model.plan.num_weights

    @pytest.mark.parametrize("metric", ["wanda", "ria"])
    @pytest.mark.parametrize("group", list(GROUPS))
    def test_masks_equal_sequential_pruning(self, bench: Bench, metric: str, group: str) -> None:
        """No bit differs from plain pruning, block by block, of the pooled samples."""
        bench.settings = bench.settings | GROUPS[group] | {"pruning.metric": metric}
        found = masks_of(bench.run(), bench)
        expected = plain_masks(
            bench.model, samples_of(bench), metric, group, 0.5, "tokens", sequential=True
        )
        assert differing_bits(found, expected) == 0

    def test_centralized_equals_federated(self, bench: Bench) -> None:
        require_centralized_equals_federated(bench)

    def test_only_masks_travel_back(self, plain: Uninterrupted) -> None:
        lines = (plain.folder / "ledger.jsonl").read_text().splitlines()
        found = {
            (entry["direction"], entry["round"], entry["block"])
            for entry in map(json.loads, lines)
            if entry["direction"] and entry["kind"] == "train" and entry["block"]
        }
        assert found == {
            ("up", 1, "block-0000"), ("down", 2, "block-0000"), ("up", 2, "block-0001"),
        }  # fmt: skip

    def test_client_recovers_lost_hidden_states(self, bench: Bench) -> None:
        """The client's state is removed before round 3; the result is the same as without."""
        changes = {"model": str(save_tiny_llama(bench.folder / "deep", blocks=4))}
        whole = bench.run(**changes)
        grid = bench.grid(**changes)
        lost = []

        def lose(message: Message) -> None:
            header = read(message.content).header
            if (header.kind, header.server_round, header.client) == ("train", 3, 2) and not lost:
                (folder,) = (bench.folder / "state").glob(f"{header.lineage}/node-00002")
                lost.append(shutil.rmtree(folder))

        grid.before_push = lose
        folder = bench.run(grid, **changes)
        assert lost
        assert model_files(folder) == model_files(whole)
        assert [event["client"] for event in events(folder) if event["event"] == "lost"] == [2]

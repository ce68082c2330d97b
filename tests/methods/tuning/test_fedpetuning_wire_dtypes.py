"""Wire dtypes of FedPETuning: bytes, rounded changes and error feedback."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load

from espalier.hf.opening.opened_model import open_model
from espalier.messages.blobs.adapters import pack_adapters
from espalier.messages.records import read
from espalier.models.adapters import adapter_plan
from espalier.settings.tables.lora import LoraSettings
from espalier.training.initial_values import initial_adapters
from tests.bench import Bench, summary
from tests.methods.tuning.adapters_sent import PATHS, bodies, num_data_bytes, sent_adapters, written
from tests.methods.tuning.fedpetuning_runs import FedPETuningRuns

SHAPES = {"attn.q": (16, 16), "attn.v": (8, 16)}
"""Shapes (out, in) of the adapted matrices of the bench's model, which has two blocks."""
BYTES_OF = {
    "float32": lambda numbers: 4 * numbers,
    "bfloat16": lambda numbers: 2 * numbers,
    "nf4": lambda numbers: math.ceil(numbers / 2) + 4 * math.ceil(numbers / 64),
}


def block_bytes(wire_dtype: str, lora_rank: int) -> int:
    """Return the wire bytes of one block's adapters, computed from the shapes."""
    return sum(
        BYTES_OF[wire_dtype](lora_rank * side) for shape in SHAPES.values() for side in shape
    )


def first_adapters(bench: Bench, lora_rank: int = 2) -> dict[str, dict[str, torch.Tensor]]:
    """Return the initial adapters of every run of the bench.

    B is zero; A is made from the seed by the server and every client.
    """
    opened = open_model(str(bench.model))
    return initial_adapters(
        adapter_plan(opened.plan, LoraSettings(rank=lora_rank, alpha=2.0 * lora_rank)), 0
    )


def brought(
    requests: list[Message], server_round: int
) -> dict[int, dict[str, dict[str, torch.Tensor]]]:
    """Return the tensors sent to each client before a round, by blob key and name."""
    found: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
    for body in (read(request.content) for request in requests):
        if body.header.kind in ("push", "train") and body.header.server_round == server_round:
            found.setdefault(body.header.client, {}).update(
                {key: load(blob) for key, blob in body.blobs.items()}
            )
    return found


class TestFedPETuning(FedPETuningRuns):
    @pytest.mark.parametrize("wire_dtype", ["bfloat16", "nf4"])
    def test_bytes_of_blobs_are_those_of_the_formulas(self, bench: Bench, wire_dtype: str) -> None:
        changes = {"federation__wire_dtype": wire_dtype, "num_clients": 2}
        grid = bench.grid(**changes)
        requests = []
        grid.before_push = requests.append
        bench.run(grid, **changes)
        up = [
            blob
            for number in (1, 2)
            for kind in ("train", "fetch")
            for blob in self._blobs(grid, number, kind)
        ]
        asked = [read(request.content) for request in requests]
        down = [
            blob
            for body in asked
            if body.header.kind in ("train", "push")
            for blob in body.blobs.values()
        ]
        # Two blocks, two rounds, two clients.
        assert len(up) == 2 * 2 * 2
        # Two blocks of the second round, two clients.
        assert len(down) == 2 * 2
        assert {num_data_bytes(blob) for blob in up + down} == {block_bytes(wire_dtype, 2)}

    def _blobs(self, grid: Any, server_round: int, kind: str) -> list[bytes]:
        replies = bodies(grid, server_round, kind)
        return [
            blob for client in replies for body in replies[client] for blob in body.blobs.values()
        ]

    def test_first_round_sends_rounded_changes(self, bench: Bench) -> None:
        changes = {"federation__wire_dtype": "bfloat16"}
        exact = bench.grid()
        rounded = bench.grid(**changes)
        bench.run(exact, federation__rounds=1)
        bench.run(rounded, **changes, federation__rounds=1)
        trained = sent_adapters(exact, 1)
        found = sent_adapters(rounded, 1)
        start = first_adapters(bench)
        for client, blobs in trained.items():
            for key, tensors in blobs.items():
                assert tensors
                for name, tensor in tensors.items():
                    meant = tensor - start[key][name]
                    assert torch.equal(found[client][key][name], meant.to(torch.bfloat16))

    def test_differences_are_added_before_rounding(self, bench: Bench) -> None:
        """Replies carry differences from the round's start, pushes from the initial adapters.

        Two rounds are recomputed with loops.
        """
        changes = {"federation__wire_dtype": "bfloat16"}
        grid = bench.grid(**changes)
        requests = list[Message]()
        grid.before_push = requests.append
        folder = bench.run(grid, **changes)
        first = first_adapters(bench)
        samples = {
            client["client"]: client["metrics"]["samples"] for client in summary(folder)["clients"]
        }
        kept: dict[str, dict[str, np.ndarray]] = {
            key: {name: tensor.double().numpy() for name, tensor in block.items()}
            for key, block in first.items()
        }
        for server_round in (1, 2):
            changed = sent_adapters(grid, server_round)
            for key, block in kept.items():
                for name in block:
                    total = sum(
                        samples[client] * changed[client][key][name].double().numpy()
                        for client in samples
                    )
                    block[name] = block[name] + total / sum(samples.values())
            if server_round == 1:
                for client, blobs in brought(requests, 2).items():
                    assert set(blobs) == set(kept), client
                    for key, tensors in blobs.items():
                        for name, tensor in tensors.items():
                            moved = torch.from_numpy(
                                kept[key][name] - first[key][name].double().numpy()
                            )
                            torch.testing.assert_close(
                                tensor.double(), moved, rtol=2**-8, atol=1e-8
                            )
        for block_number in (0, 1):
            for matrix in PATHS:
                b, a = written(folder, block_number, matrix)
                np.testing.assert_allclose(
                    b, kept[f"block-{block_number:04d}"][f"{matrix}.lora_b"], rtol=1e-6, atol=1e-8
                )
                np.testing.assert_allclose(
                    a, kept[f"block-{block_number:04d}"][f"{matrix}.lora_a"], rtol=1e-6, atol=1e-8
                )

    def test_client_goes_on_without_private_state(self, bench: Bench) -> None:
        changes = {"federation__wire_dtype": "nf4", "federation__rounds": 3, "part_bytes": 1 << 20}
        state = bench.folder / "state"
        grid = bench.grid(**changes)
        removed = list[Path]()
        for context in grid.contexts.values():
            context.node_config["state-dir"] = str(state)

        def lose(message: Message) -> None:
            header = read(message.content).header
            if (header.kind, header.server_round, header.client) == ("train", 3, 2):
                (folder,) = state.glob("*/node-00002")
                shutil.rmtree(folder)
                removed.append(folder)

        grid.before_push = lose
        clients = summary(bench.run(grid, **changes))["clients"]
        assert len(removed) == 1
        assert {client["status"] for client in clients} == {"completed"}

    @pytest.mark.parametrize("aggregation", ["factors", "svd"])
    def test_svd_aggregation_leaves_out_feedback(
        self, bench: Bench, aggregation: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The rounding losses of A and B belong to other directions after an SVD."""
        owed = []

        def pack(tensors: Any, wire_dtype: Any, residuals: Any = None) -> Any:
            owed.append(bool(residuals))
            return pack_adapters(tensors, wire_dtype, residuals)

        monkeypatch.setattr("client_app.methods.tuning.round_adapters.pack_adapters", pack)
        monkeypatch.setattr("strategies.averaging.adapters.pack_adapters", pack)
        bench.run(federation__wire_dtype="nf4", fedpetuning__aggregation=aggregation)
        assert any(owed) == (aggregation == "factors")

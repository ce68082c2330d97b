"""Aggregation rules in runs: the server's numbers against loops over the clients' replies."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from espalier.hf.opening.opened_model import OpenedModel
from pruning_kernels.fixed_point import from_words
from pruning_kernels.votes.bitmask import unpack
from tests.bench import Bench, summary
from tests.methods.tuning.adapters_sent import PATHS, factors, sent_adapters, written

TUNED: dict[str, Any] = {
    "federation.rounds": 1,
    "federation.client-weights": "equal",
    "training.steps": 2,
    "training.batch-size": 2,
    "training.learning-rate": 0.01,
    "lora.rank": 2,
    "lora.alpha": 4.0,
    "lora.merge": True,
}
RULE = "federation__aggregation_rule"


@pytest.mark.parametrize(("rule", "clients"), [("median", 4), ("median", 5), ("trimmed-mean", 5)])
def test_adapters_have_the_rule_s_coordinates(tmp_path: Path, rule: str, clients: int) -> None:
    bench = Bench(tmp_path, "fedpetuning", TUNED, num_clients=clients)
    changes = {RULE: rule}
    grid = bench.grid(**changes)
    folder = bench.run(grid, **changes)
    sent = sent_adapters(grid, 1)
    trim = 1 if rule == "trimmed-mean" else (clients - 1) // 2
    for block in (0, 1):
        for matrix in PATHS:
            of_all = [factors(sent, client, block, matrix) for client in range(clients)]
            for side, found in enumerate(written(folder, block, matrix)):
                stacked = np.stack([np.asarray(pair[side], np.float64) for pair in of_all])
                for place in np.ndindex(stacked.shape[1:]):
                    ordered = sorted(stacked[(slice(None), *place)].tolist())
                    expected = statistics.fmean(ordered[trim : clients - trim])
                    assert float(found[place]) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert all(client["capped"] == {} for client in summary(folder)["clients"])


def test_sums_have_the_median_of_the_means(tmp_path: Path) -> None:
    """Of five clients' means per channel the middle one, times the number of all tokens."""
    bench = Bench(tmp_path, "pooled-pruning", {}, num_clients=5)
    changes = {RULE: "median"}
    grid = bench.grid(**changes)
    folder = bench.run(grid, **changes)
    sent = sent_adapters(grid, 1)
    tokens = 5 * 2 * 16
    with safe_open(folder / "input-sums.safetensors", "np") as file:
        names = [name for name in file.keys() if "mlp.down" in name or "down_proj" in name]  # noqa: SIM118
        found = {name: file.get_tensor(name) for name in names}
    assert len(found) == 2
    for index, (_, numbers) in enumerate(sorted(found.items())):
        means = [
            from_words(own[f"block-{index:04d}"]["mlp.down.squares"].numpy(), 56).numpy() / (2 * 16)
            for own in sent.values()
        ]
        for channel, number in enumerate(numbers.reshape(-1).tolist()):
            expected = statistics.median(float(own[channel]) for own in means) * tokens
            assert number == pytest.approx(expected, rel=1e-6)


def test_votes_have_a_median(tmp_path: Path) -> None:
    """Of five clients' votes the middle one stays; ties go to the smaller magnitude."""
    bench = Bench(tmp_path, "fedprllm", {"pruning.sparsity": 0.5}, num_clients=5)
    changes = {RULE: "median"}
    grid = bench.grid(**changes)
    folder = bench.run(grid, **changes)
    sent = sent_adapters(grid, 1)
    opened = OpenedModel(bench.model)
    differing = 0
    with safe_open(folder / "masks.safetensors", "np") as masks:
        for block in opened.plan.blocks:
            for linear in block.linears:
                votes = sum(
                    unpack(
                        own[f"block-{block.index:04d}"][f"{linear.name}.prune_mask"].numpy(),
                        linear.shape,
                    )
                    .reshape(-1)
                    .astype(int)
                    for own in sent.values()
                )
                weights = opened.checkpoint.read(linear.parameter).abs().reshape(-1).tolist()
                kept = [int(number >= 3) for number in votes]
                order = sorted(range(len(kept)), key=lambda i: (-kept[i], weights[i], i))
                expected = np.zeros(len(kept), bool)
                expected[order[: len(kept) // 2]] = True
                found = unpack(masks.get_tensor(linear.parameter), linear.shape).reshape(-1)
                assert (found == expected).all()
                by_mean = sorted(range(len(kept)), key=lambda i: (-votes[i], weights[i], i))
                differing += len(set(by_mean[: len(kept) // 2]) - set(order[: len(kept) // 2]))
    assert differing > 0

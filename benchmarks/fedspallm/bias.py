"""Bias of the l0 mean with layer sampling, averaged over draws (the paper's theorem 4.2).

    python -m benchmarks.fedspallm.bias --model DIRECTORY --private FILE [--draws 400]

Eight clients prune every layer. Then samples are drawn repeatedly, and one layer in the middle of
the model is averaged over the clients that sampled it. The output is ``|mean over draws - W| /
|W|``, where W is the mean over all clients, and its expected value by chance for this number of
draws. It covers the l0 mean, and a mean over all clients in which sampled ones are weighted by the
inverse of their probability (Horvitz & Thompson 1952), compared with the plain mean. Mask expansion
is applied after both.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.fedspallm.clients import Clients
from espalier.hf.machine.computing import set_up
from espalier.hf.opening.opened_model import open_model
from espalier.hf.stream.block_stream import BlockStream
from espalier.messages.blobs.mask_tensors import unpack_kept
from espalier.settings.run import parse
from strategies.pruning.fedspallm.strategy import layers_per_client, sample_layers

CLIENTS = 8
CAPABILITIES: dict[str, list[float]] = {
    "equal": [1.0] * CLIENTS,
    "1 to 4": [1, 1, 1, 2, 2, 2, 4, 4],
}
SHARES = (0.25, 0.5, 0.75)


def kept_matrices(clients: Clients, block: int) -> tuple[Tensor, Tensor]:
    """Return pruned weights and keep masks of every client.

    Shape (clients, weights of the block), float32; masks are 0 or 1.
    """
    values = []
    for client in range(CLIENTS):
        matrices = unpack_kept(
            clients.plan.blocks[block], clients.store.get(clients.layers(client)[block])
        )
        values.append(
            [
                (m.weight().float().flatten(), (~m.prune_mask).float().flatten())
                for m in matrices.values()
            ]
        )
    weights = torch.stack([torch.cat([weight for weight, _ in client]) for client in values])
    return weights, torch.stack([torch.cat([keep for _, keep in client]) for client in values])


def l0_mean(weights: Tensor, keep: Tensor, sampled: list[int]) -> Tensor:
    """Return the mean over the sampled clients that kept a weight; 0 if none did."""
    return weights[sampled].sum(dim=0) / keep[sampled].sum(dim=0).clamp(min=1)


def weighted_mean(weights: Tensor, probability: Tensor, sampled: list[int]) -> Tensor:
    """Return the mean over all clients, with inverse probabilities as weights of sampled ones."""
    return (weights[sampled] / probability[sampled, None]).sum(dim=0) / len(weights)


def distance(
    estimate: Callable[[list[int]], Tensor], truth: Tensor, draws: list[list[int]]
) -> tuple[float, float]:
    """Return the relative distance of the mean over draws from the truth.

    The second value is the distance that independent draws leave by chance.
    """
    total = torch.zeros_like(truth, dtype=torch.float64)
    squares = torch.zeros_like(truth, dtype=torch.float64)
    for sampled in draws:
        found = estimate(sampled).double()
        total += found
        squares += found.square()
    mean = total / len(draws)
    variance = (squares / len(draws) - mean.square()).clamp(min=0)
    size = truth.double().norm()
    return float((mean - truth).norm() / size), float((variance.sum() / len(draws)).sqrt() / size)


def main() -> None:
    """Run the measurement and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--private", required=True)
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--draws", type=int, default=400)
    given = parser.parse_args()
    flat = {
        "method": "fedspallm", "model": given.model, "num-clients": CLIENTS,
        "pruning.sparsity": given.sparsity, "data.source": "files", "data.path": given.private,
        "data.num-samples": given.num_samples,
    }  # fmt: skip
    settings = parse(flat)
    model = open_model(given.model)
    num_layers = len(model.plan.blocks)
    layer = num_layers // 2
    with tempfile.TemporaryDirectory() as scratch:
        clients = Clients(settings, BlockStream(model, set_up(settings, Path())), Path(scratch))
        weights, keep = kept_matrices(clients, layer)
    l0 = l0_mean(weights, keep, list(range(CLIENTS)))
    print(
        "| capabilities | layers sampled | l0 mean | chance | weighted mean | chance"
        " |\n|---|---|---|---|---|---|"
    )
    for name, capabilities in CAPABILITIES.items():
        for share in SHARES:
            places = layers_per_client(num_layers, share, dict(enumerate(capabilities)))
            probability = torch.tensor([places[client] / num_layers for client in range(CLIENTS)])
            generator = np.random.default_rng(0)
            sampled = [
                sample_layers(range(num_layers), places, generator) for _ in range(given.draws)
            ]
            draws = [
                [client for client, layers in sampled.items() if layer in layers]
                for sampled in sampled
            ]
            found = distance(partial(l0_mean, weights, keep), l0, draws)
            weighted = distance(
                partial(weighted_mean, weights, probability), weights.mean(dim=0), draws
            )
            figures = " | ".join(f"{value:.4f}" for value in (*found, *weighted))
            print(f"| {name} | {share:.0%} | {figures} |", flush=True)


if __name__ == "__main__":
    main()

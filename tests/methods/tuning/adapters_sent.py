"""Adapters that clients sent in a run of a tuning method, and their means by slow loops."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from flwr.app import Message
from numpy.typing import NDArray
from safetensors.torch import load, load_file, save

from espalier.messages.message import MessageBody
from espalier.messages.records import read, write
from espalier.storage.blobs import sha256
from pruning_kernels.lora.nf4 import LEVELS
from tests.in_process import InProcessGrid

Matrix = NDArray[np.float64]
Sent = dict[int, dict[str, dict[str, torch.Tensor]]]
"""Type of sent adapters: client -> blob key -> tensors."""

SIDES = {"attn.q": (16, 16), "attn.v": (8, 16)}
"""Shapes (out, in) of the adapted matrices of the bench's model."""
PATHS = {"attn.q": "self_attn.q_proj", "attn.v": "self_attn.v_proj"}


def bodies(grid: InProcessGrid, server_round: int, kind: str) -> dict[int, list[MessageBody]]:
    """Return every client's successful replies of a kind in a round, in order of arrival."""
    found: dict[int, list[MessageBody]] = {}
    for _, reply in grid.received:
        body = read(reply.content)
        if (body.header.kind, body.header.server_round, body.header.status) == (
            kind,
            server_round,
            "ok",
        ):
            found.setdefault(body.header.client, []).append(body)
    return found


def sent_adapters(grid: InProcessGrid, server_round: int) -> Sent:
    """Return the adapters that each client sent in a round, read from the replies."""
    found: Sent = {}
    for kind in ("train", "fetch"):
        for client, replies in bodies(grid, server_round, kind).items():
            for body in replies:
                found.setdefault(client, {}).update(
                    {key: load(blob) for key, blob in body.blobs.items()}
                )
    return found


def decoded_adapters(grid: InProcessGrid, server_round: int, wire_dtype: str) -> Sent:
    """Return the sent adapters of a rounding wire dtype.

    NF4 is decoded with a table of its levels.
    """
    if wire_dtype != "nf4":
        return sent_adapters(grid, server_round)
    found: Sent = {}
    for client, blobs in sent_adapters(grid, server_round).items():
        for key, tensors in blobs.items():
            names = [name.removesuffix(".codes") for name in tensors if name.endswith(".codes")]
            found.setdefault(client, {})[key] = {name: _nf4(name, tensors) for name in names}
    return found


def _nf4(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode one NF4 tensor value by value."""
    codes = [code for byte in tensors[f"{name}.codes"].tolist() for code in (byte >> 4, byte & 15)]
    absmax = tensors[f"{name}.absmax"].tolist()
    values = [LEVELS[code] * absmax[place // 64] for place, code in enumerate(codes)]
    features = SIDES[name.removesuffix(".lora_a").removesuffix(".lora_b")][name.endswith("lora_a")]
    rank = len(values) // features
    return torch.tensor(values, dtype=torch.float64).reshape(
        (rank, features) if name.endswith("lora_a") else (features, rank)
    )


def factors(sent: Sent, client: int, block: int, matrix: str) -> tuple[Matrix, Matrix]:
    """Return B and A of one client in float64."""
    tensors = sent[client][f"block-{block:04d}"]
    return (
        tensors[f"{matrix}.lora_b"].double().numpy(),
        tensors[f"{matrix}.lora_a"].double().numpy(),
    )


def norm_weights(sent: Sent) -> dict[int, float]:
    """Return each client's Frobenius norm over all matrices, computed from the dense updates."""
    weights = {}
    for client, blobs in sent.items():
        dense = [
            np.matmul(*factors(sent, client, block, matrix))
            for block in range(len(blobs))
            for matrix in PATHS
        ]
        weights[client] = float(np.sqrt(sum((update**2).sum() for update in dense)))
    return weights


def padded_mean(
    sent: Sent, weights: Mapping[int, float], block: int, matrix: str, lora_rank: int
) -> tuple[Matrix, Matrix]:
    """Return the means of B and A, entry by entry; ranks that a client lacks count as zero."""
    pairs = {client: factors(sent, client, block, matrix) for client in sorted(sent)}
    some_b, some_a = next(iter(pairs.values()))
    b = np.zeros((some_b.shape[0], lora_rank))
    a = np.zeros((lora_rank, some_a.shape[1]))
    for client, (client_b, client_a) in pairs.items():
        for column in range(client_b.shape[1]):
            b[:, column] += weights[client] * client_b[:, column]
            a[column] += weights[client] * client_a[column]
    return b / sum(weights[client] for client in pairs), a / sum(
        weights[client] for client in pairs
    )


def svd_mean(
    sent: Sent, weights: Mapping[int, float], block: int, matrix: str, lora_rank: int
) -> Matrix:
    """Return the best rank-``lora_rank`` approximation of the mean of the dense products B A.

    It comes from the singular value decomposition of the mean.
    """
    total = sum(
        weights[client] * np.matmul(*factors(sent, client, block, matrix)) for client in sent
    )
    u, values, vh = torch.linalg.svd(
        torch.from_numpy(total / sum(weights[client] for client in sent)), full_matrices=False
    )
    return ((u[:, :lora_rank] * values[:lora_rank]) @ vh[:lora_rank]).numpy()


def written(folder: Path, block: int, matrix: str) -> tuple[Matrix, Matrix]:
    """Return B and A of the exported adapter in float64."""
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    path = f"base_model.model.model.layers.{block}.{PATHS[matrix]}"
    return (
        tensors[f"{path}.lora_B.weight"].double().numpy(),
        tensors[f"{path}.lora_A.weight"].double().numpy(),
    )


def updates(folder: Path) -> Matrix:
    """Return the final updates B A of all matrices as one vector."""
    return np.concatenate(
        [np.matmul(*written(folder, block, matrix)).ravel() for block in (0, 1) for matrix in PATHS]
    )


def num_data_bytes(blob: bytes) -> int:
    """Return the size of a safetensors blob without its header, in bytes."""
    return len(blob) - 8 - int.from_bytes(blob[:8], "little")


def added_to_b(number: float) -> Callable[[Message, Message], Message]:
    """Return a tamper that adds a number to every B of a one-part reply to ``train``.

    The hashes of the blobs are updated.
    """

    def spoil(request: Message, reply: Message) -> Message:
        body = read(reply.content)
        if body.header.kind != "train" or body.header.status != "ok":
            return reply
        for key, blob in body.blobs.items():
            spoilt = {
                name: value + number if name.endswith("lora_b") else value
                for name, value in load(blob).items()
            }
            body.blobs[key] = save(spoilt)
        body.fields["blob_sha256"] = [sha256(blob) for _, blob in sorted(body.blobs.items())]
        return Message(write(body), reply_to=request)

    return spoil

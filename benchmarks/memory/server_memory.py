"""Peak resident memory of the ServerApp when it aggregates masks of 4 and of 32 clients.

    python -m benchmarks.memory.server_memory [--clients 4 32]

Each figure comes from its own process. The process opens a LLaMA-shaped model of 67 M prunable
weights on disk, and receives the replies one by one (8.4 MB of masks each, made on demand, as
Flower's grid would deliver them). It decides the masks, and reports the kernel's peak resident
memory and a hash of all masks. The plain reference collects all replies in a list, as Flower's own
strategies do, then counts and selects matrix by matrix with ``plain_vote``; its masks must be the
same.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from flwr.app import Message
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import LlamaConfig

from benchmarks.speed.plain_vote import plain_vote, unpacked
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.blobs.masks import mask_name
from espalier.messages.message import MessageBody
from espalier.messages.parts import Report
from espalier.messages.records import read
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.models.plan import block_key
from espalier.settings.run import parse
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.roster import Seat
from strategies.base.run import Run
from strategies.base.run_folder import RunFolder
from strategies.pruning.fedprllm import FedPrLLM

ROOT = Path(__file__).parents[2]
HIDDEN = 1024
FEED_FORWARD = 4096
BLOCKS = 4


def save_model(folder: Path) -> None:
    """Write a model of random weights: 4 blocks of 16.8 M prunable weights, bf16."""
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=FEED_FORWARD, num_hidden_layers=BLOCKS, vocab_size=32
    )
    config.num_attention_heads = config.num_key_value_heads = 8
    config.save_pretrained(folder)
    shapes = {
        "self_attn.q_proj": 1,
        "self_attn.k_proj": 1,
        "self_attn.v_proj": 1,
        "self_attn.o_proj": 1,
    }
    tensors = {}
    for block in range(BLOCKS):
        for name in shapes:
            tensors[f"model.layers.{block}.{name}.weight"] = torch.randn(
                HIDDEN, HIDDEN, dtype=torch.bfloat16
            )
        for name, shape in (
            ("gate", (FEED_FORWARD, HIDDEN)),
            ("up", (FEED_FORWARD, HIDDEN)),
            ("down", (HIDDEN, FEED_FORWARD)),
        ):
            tensors[f"model.layers.{block}.mlp.{name}_proj.weight"] = torch.randn(
                shape, dtype=torch.bfloat16
            )
    save_file(tensors, folder / "model.safetensors")


def _peak() -> int:
    """Return the peak resident memory of this process in bytes.

    ``getrusage`` would include the process that started it.
    """
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def replies(strategy: FedPrLLM, clients: int) -> Iterator[MessageBody]:
    """Yield one client's reply at a time.

    Half of the bits of each 64-bit word are set, so that every row prunes half of its weights.
    """
    generator = np.random.default_rng(0)
    plan = strategy.run.model.plan
    report = Report(seconds=0.0, blob_sha256=["0" * 64] * BLOCKS)
    for client in range(clients):
        header = strategy.rounds.request("train", client, 1, report).header
        blobs = {}
        for block in plan.blocks:
            words = {
                mask_name(linear.name): generator.permutation(
                    np.array([0x5555555555555555, 0xAAAAAAAAAAAAAAAA], dtype=np.uint64).repeat(
                        linear.num_weights // 128
                    )
                )
                for linear in block.linears
            }
            blobs[block_key(block.index)] = pack_tensors(words)
        yield MessageBody(header, report.model_dump(), blobs)


def measure(clients: int, plain: bool, folder: Path) -> dict[str, str | int]:
    """Return the peak resident memory in bytes and the SHA-256 of the masks.

    ``clients`` is the number of replies that are aggregated.
    """
    settings = parse({"model": str(folder / "model"), "num-clients": clients})
    run = Run(
        settings,
        OpenedModel(folder / "model"),
        RunFolder(folder / f"run-{clients}-{plain}"),
        "benchmark",
        None,
    )
    run.progress._show = lambda _: None
    run.rounds.roster.seats = {
        client: Seat(client, f"site-{client}", 1) for client in range(clients)
    }
    strategy = FedPrLLM(run, ClientEvaluation(run, {}))
    if plain:
        masks = plain_fold(strategy, list(replies(strategy, clients)))
    else:
        inbox = Inbox(run.folder.inbox)
        for _ in inbox.receive(replies(strategy, clients)):
            pass
        strategy.fold(1, inbox, inbox.complete_clients())
        masks = decided(strategy)
    digest = hashlib.sha256()
    for mask in masks:
        digest.update(np.packbits(mask).tobytes())
    return {"peak": _peak(), "masks": digest.hexdigest()}


def decided(strategy: FedPrLLM) -> Iterator[NDArray[np.bool_]]:
    """Yield the masks that the strategy decided, matrix by matrix."""
    for block in strategy.run.model.plan.blocks:
        masks = strategy.result.prune_masks(block.index)
        yield from (masks[linear.name].numpy() for linear in block.linears)


def plain_fold(strategy: FedPrLLM, collected: list[Message]) -> Iterator[NDArray[np.bool_]]:
    """Yield the masks of the plain reference: all replies in memory, unpacked votes."""
    model = strategy.run.model
    sparsity = strategy.settings.sparsity
    bodies = [read(message.content) for message in collected]
    for block in model.plan.blocks:
        words = [unpack_tensors(body.blobs[block_key(block.index)]) for body in bodies]
        for linear in block.linears:
            masks = [unpacked(own[mask_name(linear.name)], linear.shape) for own in words]
            yield plain_vote(
                masks, model.checkpoint.read(linear.parameter).float().numpy(), sparsity
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, nargs=2, default=(4, 32))
    parser.add_argument(
        "--measure", nargs=3, metavar=("CLIENTS", "PLAIN", "FOLDER"), help=argparse.SUPPRESS
    )
    given = parser.parse_args()
    if given.measure:
        clients, plain, folder = given.measure
        print(json.dumps(measure(int(clients), plain == "True", Path(folder))))
        return
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model")
        found = {}
        for plain in (False, True):
            for clients in given.clients:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.memory.server_memory",
                    "--measure",
                    str(clients),
                    str(plain),
                    folder,
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
                found[plain, clients] = json.loads(done.stdout.splitlines()[-1])
    few, many = given.clients
    if any(
        found[False, clients]["masks"] != found[True, clients]["masks"] for clients in given.clients
    ):
        raise SystemExit("the masks differ")
    print(f"equal masks\n\n| folding | {few} clients | {many} clients | ratio |\n|---|---|---|---|")
    for plain, name in (
        (False, "Espalier, a reply at a time"),
        (True, "plain: all replies in a list, votes counted unpacked"),
    ):
        a = found[plain, few]["peak"]
        b = found[plain, many]["peak"]
        print(f"| {name} | {a / 1e6:.0f} MB | {b / 1e6:.0f} MB | {b / a:.2f} |")


if __name__ == "__main__":
    main()

"""Replies that satisfy their contract but spoil the result, and a small trained model.

A spoiled result is visible only on a model that has learned something.
"""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.message import MessageBody
from espalier.messages.parts import MAX_SAMPLES
from espalier.messages.records import read, write
from espalier.methods.tuning.adapters.tensors import trained
from espalier.models.plan import block_of_key
from espalier.settings.run import RunSettings
from espalier.storage.blobs import sha256
from espalier.training.initial_values import initial_values
from espalier.training.masked_training import first_shared
from pruning_kernels.groups.slicing import packed, unpacked
from pruning_kernels.votes.bitmask import pack, unpack
from tests.tiny_model import WORDS, save_tiny_llama

Tensors = dict[str, torch.Tensor]
FOLLOWERS = 3
"""Number of words that may follow a word.

A model that knows them has a perplexity of a few tokens; other models have one of hundreds.
"""


def sentences(language: str, seed: str, passages: int) -> str:
    """Return passages in which each word is followed by one of a few words.

    ``language`` determines which words may follow a word.
    """
    follows = random.Random(f"language {language}")
    after = {word: follows.sample(WORDS, FOLLOWERS) for word in WORDS}
    chance = random.Random(f"text {seed}")
    found = []
    for _ in range(passages):
        words = [chance.choice(WORDS)]
        while len(words) < 24:
            words.append(chance.choices(after[words[-1]], weights=(6, 3, 1))[0])
        found.append(" ".join(words))
    return "\n\n".join(found)


def save_trained_llama(folder: Path, language: str, steps: int = 150) -> Path:
    """Save a tiny LLaMA that has learned a language: four blocks, float32."""
    path = save_tiny_llama(
        folder, blocks=4, hidden=32, feed_forward=64, std=0.05, dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.tensor(
        AutoTokenizer.from_pretrained(path)(sentences(language, "pretraining", 400))["input_ids"]
    )
    samples = tokens[: len(tokens) // 32 * 32].view(-1, 32)
    # Training must not change the random numbers of the test that calls this function.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # The tiny model has random norms, with which it would learn slowly.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.ones_(parameter)
        optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for _ in range(steps):
            batch = samples[torch.randint(len(samples), (32,))]
            loss = model(input_ids=batch, labels=batch).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.save_pretrained(path)
    return path


class BadClient:
    """Tamper of ``InProcessGrid`` that changes the replies of one client.

    The client knows the tensors that the server sent to it.

    Parameters
    ----------
    change : function that changes the letter of a reply in place
    settings, model : settings and model of the run
    """

    def __init__(self, change: "Change", settings: RunSettings, model: Path) -> None:
        self.change = change
        self.model = OpenedModel(model)
        self.begun: dict[str, Tensors] = {}
        """Tensors that the client received last.

        In round 1 with adapters of the base model they are the initial values made from the seed.
        """
        if settings.method == "sft-p":
            self.begun = {
                key: dict(own) for key, own in first_shared(self.model.plan, settings).items()
            }
        elif settings.tunes and settings.method != "fedsoda":
            adapters = trained(self.model.plan, settings)
            self.begun = {
                key: dict(own)
                for key, own in initial_values(self.model, adapters, settings.seed).items()
            }

    def __call__(self, request: Message, reply: Message) -> Message:
        asked = read(request.content)
        body = read(reply.content)
        # From round 2 on, requests carry the tensors that training begins with.
        if asked.header.kind in ("train", "push") and asked.header.server_round > 1:
            self.begun |= {key: load(blob) for key, blob in asked.blobs.items()}
        if body.header.kind not in ("train", "fetch") or body.header.status != "ok":
            return reply
        # The reply lists the hashes of all its blobs, also of those in other parts.
        before = {sha256(blob): key for key, blob in body.blobs.items()}
        self.change(self, body)
        named = body.fields["blob_sha256"]
        body.fields["blob_sha256"] = [
            sha256(body.blobs[before[one]]) if one in before else one for one in named
        ]
        return Message(write(body), reply_to=request)


Change = Callable[[BadClient, MessageBody], None]


def claims(**fields: Any) -> Change:
    """Return a change that replaces these values of the report if they are present and not zero."""

    def change(_: BadClient, body: MessageBody) -> None:
        body.fields |= {name: value for name, value in fields.items() if body.fields.get(name)}

    return change


def tensors(of: Callable[[str, torch.Tensor], torch.Tensor]) -> Change:
    """Return a change that replaces each tensor without regard to what the client received."""

    def change(_: BadClient, body: MessageBody) -> None:
        for key, blob in body.blobs.items():
            body.blobs[key] = save(
                {name: of(name, value).contiguous() for name, value in load(blob).items()}
            )

    return change


def updates(of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], only: str = "") -> Change:
    """Return a change that replaces trained tensors with a function of trained and initial values.

    It applies to tensors whose names end with ``only``.
    """

    def change(self: BadClient, body: MessageBody) -> None:
        for key, blob in body.blobs.items():
            sent = load(blob)
            begun = self.begun.get(key, {})
            body.blobs[key] = save(
                {
                    name: (
                        of(value, begun[name][tuple(map(slice, value.shape))]).contiguous()
                        if name in begun and name.endswith(only)
                        else value
                    )
                    for name, value in sent.items()
                }
            )

    return change


def both(*changes: Change) -> Change:
    """Return a change that applies several changes in order."""

    def change(self: BadClient, body: MessageBody) -> None:
        for one in changes:
            one(self, body)

    return change


def turned(times: float) -> Change:
    """Return a change that reverses the training's update and scales it by ``times``."""
    return updates(lambda value, begun: begun - times * (value - begun))


Named = Mapping[str, Change]
BILLION = claims(samples=10**9)
MOST = claims(samples=MAX_SAMPLES)
"""Largest claims that a contract accepts."""
OF_UPDATES: Named = {
    "turned round, with a billion samples": both(turned(2.0), BILLION),
    "times -8": both(turned(8.0), BILLION),
    "a thousand times": both(updates(lambda value, begun: begun + 1000 * (value - begun)), BILLION),
    "at the limit of training": both(
        updates(
            lambda value, begun: (
                begun - 0.9 * (value - begun).abs().max() * torch.sign(value - begun)
            )
        ),
        BILLION,
    ),
    "noise": both(
        updates(
            lambda value, begun: (
                begun
                + 2
                * (value - begun).norm()
                / value.numel() ** 0.5
                * torch.randn(value.shape, generator=torch.manual_seed(3))
            )
        ),
        BILLION,
    ),
}
"""Changes of trained tensors. Some exceed what training can do, so the server drops the reply."""


def other_masks(self: BadClient, body: MessageBody) -> None:
    """Prune as many weights as the client did, but exactly those that it kept.

    Kept weights, if they are sent, are those of the base model.
    """
    for key, blob in body.blobs.items():
        sent = load(blob)
        for name in [name for name in sent if name.endswith("prune_mask")]:
            linear = self.model.plan.blocks[block_of_key(key) or 0].linear(
                name.removesuffix(".prune_mask")
            )
            # The client's mask marks pruned weights, so it is the new mask of kept weights.
            keep = torch.from_numpy(unpack(sent[name].numpy(), linear.shape))
            # The masks can only be swapped at a sparsity of 50%.
            assert keep.sum() == (~keep).sum()
            sent[name] = torch.from_numpy(pack((~keep).numpy()))
            if (kept := f"{linear.name}.kept") in sent:
                sent[kept] = self.model.checkpoint.read(linear.parameter)[keep]
        body.blobs[key] = save({name: value.contiguous() for name, value in sent.items()})


def least_of_all(_: BadClient, body: MessageBody) -> None:
    """Send moments whose energy lies in the quarter of directions with the weakest signals."""
    for key, blob in body.blobs.items():
        sent = {}
        for name, triangle in load(blob).items():
            width = int((2 * triangle.numel()) ** 0.5)
            moments = unpacked(triangle.double(), width)
            weakest = torch.linalg.eigh(moments).eigenvectors[:, : width // 4]
            found = weakest @ weakest.T * (
                0.99 * moments.trace() / (width // 4)
            ) + 1e-6 * torch.eye(width)
            sent[name] = packed(found).float()
        body.blobs[key] = save(sent)

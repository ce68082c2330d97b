"""What a client may send within its contract to spoil the result of all; and a small model that a spoiled result shows on."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from safetensors.torch import load, save
from tiny_model import WORDS, save_tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.modeling.opened import OpenedModel
from espalier.settings.run import RunSettings
from espalier.storage.blobs import sha256
from espalier.training.initial import initial_values
from espalier.training.masked import first_shared
from espalier.wire.messages import Letter, read, write
from espalier.wire.parts import MOST_WINDOWS
from espalier.wire.payload import block_of_key
from espalier.wire.tuning import trained
from pruning_kernels.bitmask import pack, unpack
from pruning_kernels.slicing import packed, unpacked

Tensors = dict[str, torch.Tensor]
FOLLOWERS = 3
"""Words that may follow a word: a model that knows them has a perplexity of a few tokens, one that does not of hundreds."""


def sentences(language: str, seed: str, passages: int) -> str:
    """Passages in which each word is followed by one of a few; which these are, a language says."""
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
    windows = tokens[: len(tokens) // 32 * 32].view(-1, 32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.ones_(parameter)
        optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for _ in range(steps):
            batch = windows[torch.randint(len(windows), (32,))]
            loss = model(input_ids=batch, labels=batch).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.save_pretrained(path)
    return path


class BadClient:
    """Changes the replies of one client, of which it knows what it was brought: a tamper of ``InProcessGrid``.

    Parameters
    ----------
    change : (tensors, what they were before the client's work, the report's scalars) -> what is sent instead
    settings, model : of the run
    """

    def __init__(self, change: "Change", settings: RunSettings, model: Path) -> None:
        self.change = change
        self.model = OpenedModel(model)
        self.begun: dict[str, Tensors] = {}
        """What the client was brought last; in round 1 of adapters of the base model what the seed makes."""
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
        letter = read(reply.content)
        if asked.header.kind in ("train", "deliver") and asked.header.server_round > 1:
            self.begun |= {key: load(blob) for key, blob in asked.blobs.items()}
        if letter.header.kind not in ("train", "fetch") or letter.header.status != "ok":
            return reply
        before = {sha256(blob): key for key, blob in letter.blobs.items()}
        self.change(self, letter)
        named = letter.scalars["blob_sha256"]
        letter.scalars["blob_sha256"] = [
            sha256(letter.blobs[before[one]]) if one in before else one for one in named
        ]
        return Message(write(letter), reply_to=request)


Change = Callable[[BadClient, Letter], None]


def claims(**scalars: Any) -> Change:
    """Claim these numbers, where the report has them and they tell something."""

    def change(_: BadClient, letter: Letter) -> None:
        letter.scalars |= {
            name: value for name, value in scalars.items() if letter.scalars.get(name)
        }

    return change


def tensors(of: Callable[[str, torch.Tensor], torch.Tensor]) -> Change:
    """Send other numbers in place of each tensor, which does not depend on what the client was brought."""

    def change(_: BadClient, letter: Letter) -> None:
        for key, blob in letter.blobs.items():
            letter.blobs[key] = save(
                {name: of(name, value).contiguous() for name, value in load(blob).items()}
            )

    return change


def updates(of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], only: str = "") -> Change:
    """Send, in place of what training led to, a function of it and of what it began with, in tensors named so."""

    def change(self: BadClient, letter: Letter) -> None:
        for key, blob in letter.blobs.items():
            sent = load(blob)
            begun = self.begun.get(key, {})
            letter.blobs[key] = save(
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
    """One change after the other."""

    def change(self: BadClient, letter: Letter) -> None:
        for one in changes:
            one(self, letter)

    return change


def turned(times: float) -> Change:
    """The opposite of what training changed, so many times as far."""
    return updates(lambda value, begun: begun - times * (value - begun))


Named = Mapping[str, Change]
BILLION = claims(samples=10**9)
MOST = claims(samples=MOST_WINDOWS, tokens=MOST_WINDOWS)
"""As much as a contract takes."""
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
"""Of what training led to. Some go beyond what training can do, and are dropped for that."""


def other_masks(self: BadClient, letter: Letter) -> None:
    """Prune what the others keep, as many weights; kept weights, where they are sent, are those of the base model."""
    for key, blob in letter.blobs.items():
        sent = load(blob)
        for name in [name for name in sent if name.endswith("prune_mask")]:
            linear = self.model.plan.blocks[block_of_key(key) or 0].linear(
                name.removesuffix(".prune_mask")
            )
            # What was pruned is kept now.
            keep = torch.from_numpy(unpack(sent[name].numpy(), linear.shape))
            assert keep.sum() == (~keep).sum()  # half of the weights
            sent[name] = torch.from_numpy(pack((~keep).numpy()))
            if (kept := f"{linear.name}.kept") in sent:
                sent[kept] = self.model.checkpoint.read(linear.parameter)[keep]
        letter.blobs[key] = save({name: value.contiguous() for name, value in sent.items()})


def least_of_all(_: BadClient, letter: Letter) -> None:
    """Send moments whose whole energy lies where the client's own signals have least: in a quarter of the directions."""
    for key, blob in letter.blobs.items():
        sent = {}
        for name, triangle in load(blob).items():
            width = int((2 * triangle.numel()) ** 0.5)
            moments = unpacked(triangle.double(), width)
            weakest = torch.linalg.eigh(moments).eigenvectors[:, : width // 4]
            found = weakest @ weakest.T * (
                0.99 * moments.trace() / (width // 4)
            ) + 1e-6 * torch.eye(width)
            sent[name] = packed(found).float()
        letter.blobs[key] = save(sent)

"""Clients that answer within their contract and want a bad result.

An attack changes a client's own honest reply, tensor by tensor. All numbers stay finite. A client
knows the tensors that the server sent to it, and nothing about the other clients.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from flwr.app import Message
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor

from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.message import MessageBody
from espalier.messages.records import read, write
from espalier.methods.pruning.flap import sums_name
from espalier.methods.pruning.pooled_pruning import COUNT, FRACTION_BITS
from espalier.methods.tuning.adapters.tensors import trained
from espalier.models.plan import block_of_key
from espalier.models.structure import ADDED_BIASES
from espalier.settings.run import RunSettings
from espalier.storage.blobs import sha256
from espalier.training.initial_values import initial_values
from pruning_kernels.fixed_point import bound, from_words, to_words
from pruning_kernels.votes.bitmask import pack, unpack

Update = Callable[[Tensor, torch.Generator], Tensor]
"""Function of a tensor's honest change (or sums), and of a generator: what is sent in its place."""
FLIPPED_AND_SCALED = -8.0
SPREAD = 3.0
"""Size of random numbers, as a multiple of honest ones or as a standard deviation of exponents."""
ALMOST = 0.9
"""Fraction of the largest honest change that every number of a change gets."""


def _noise(change: Tensor, generator: torch.Generator) -> Tensor:
    size = change.square().mean().sqrt()
    return SPREAD * size * torch.randn(change.shape, generator=generator)


def _all_against(change: Tensor, _: torch.Generator) -> Tensor:
    return -ALMOST * change.abs().max() * change.sign()


ADAPTERS: dict[str, Update] = {
    "sign flipped": lambda change, _: -change,
    "flipped, 8 times": lambda change, _: FLIPPED_AND_SCALED * change,
    "random": _noise,
    "every number against": _all_against,
}
"""Attacks on trained tensors, by name."""
SUMS: dict[str, Update] = {
    "1000 times": lambda sums, _: 1e3 * sums,
    "inverted": lambda sums, _: 1e6 * sums.median() ** 2 / (sums + 1e-9),
    "random": lambda sums, generator: (
        sums * torch.exp(SPREAD * torch.randn(sums.shape, generator=generator).double())
    ),
}
"""Attacks on sums of squares and on scores; negative ones are refused by the contract."""
ALL_ONES = "all ones"
INVERTED = "inverted"
RANDOM = "random"
VOTES = (ALL_ONES, INVERTED, RANDOM)
"""Attacks on masks; a mask of ones breaks the contract, so its sender is dropped."""


class BadClient:
    """Tamper of ``InProcessGrid`` that changes the replies of one client.

    Parameters
    ----------
    attack : name of an attack on what the method sends
    settings, model : settings and base model of the run
    client : number of the client; it seeds random numbers
    """

    def __init__(self, attack: str, settings: RunSettings, model: OpenedModel, client: int) -> None:
        self.attack = attack
        self.method = settings.method
        self.model = model
        self.generator = torch.Generator().manual_seed(1000 + client)
        self.begun: dict[str, Mapping[str, Tensor]] = {}
        """Adapters with which the client began the round, by blob key."""
        if settings.tunes:
            adapters = trained(model.plan, settings)
            self.begun = dict(initial_values(model, adapters, settings.seed))

    def __call__(self, request: Message, reply: Message) -> Message:
        """Return the reply that arrives."""
        asked = read(request.content)
        body = read(reply.content)
        # From round 2 on, requests carry the tensors that training begins with.
        if asked.header.kind in ("train", "push") and asked.header.server_round > 1:
            self.begun |= {key: load(blob) for key, blob in asked.blobs.items()}
        if body.header.kind not in ("train", "fetch") or body.header.status != "ok":
            return reply
        self._spoil(body)
        return Message(write(body), reply_to=request)

    def _spoil(self, body: MessageBody) -> None:
        """Replace the tensors of a reply, and their hashes in its report."""
        renamed = {}
        for key, blob in body.blobs.items():
            changed = {name: self._tensor(key, name, value) for name, value in load(blob).items()}
            body.blobs[key] = save(changed)
            renamed[sha256(blob)] = sha256(body.blobs[key])
        named = body.fields["blob_sha256"]
        body.fields["blob_sha256"] = [renamed.get(one, one) for one in named]

    def _tensor(self, key: str, name: str, value: Tensor) -> Tensor:
        if self.method == "fedpetuning":
            begun = self.begun[key][name]
            return begun + ADAPTERS[self.attack](value - begun, self.generator)
        if self.method == "fedprllm":
            return self._votes(key, name, value)
        if self.method == "llm-pruner":
            return SUMS[self.attack](value.double(), self.generator).float()
        # FLAP's sums stay: their squares must not be larger than the sums of squares allow.
        if name == COUNT or name in map(sums_name, ADDED_BIASES):
            return value
        bits = FRACTION_BITS["tokens"]
        honest = from_words(value.numpy(), bits)
        sums = SUMS[self.attack](honest, self.generator)
        if self.method == "flap":
            sums = sums.maximum(honest)
        return torch.from_numpy(to_words(sums.clamp(max=bound(bits) / 2), bits))

    def _votes(self, key: str, name: str, words: Tensor) -> Tensor:
        """Return other votes; inverted and random ones have the honest number in each row."""
        index = block_of_key(key)
        assert index is not None
        shape = self.model.plan.blocks[index].linear(name.removesuffix(".prune_mask")).shape
        mask = unpack(words.numpy(), shape)
        if self.attack == ALL_ONES:
            mask = np.ones_like(mask)
        elif self.attack == INVERTED:
            mask = self._inverted(mask)
        else:
            # The same permutation of all columns keeps the number of votes in every row and layer.
            order = torch.randperm(shape[1], generator=self.generator).numpy()
            mask = np.ascontiguousarray(mask[:, order])
        return torch.from_numpy(pack(mask))

    def _inverted(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return a mask that prunes what this one keeps, with as many pruned weights per row.

        If that is too little, it also prunes random weights that this one prunes.
        """
        random = torch.rand(mask.shape, generator=self.generator).numpy()
        places = np.argsort(np.argsort(random + mask, axis=1), axis=1)
        return np.ascontiguousarray(places < mask.sum(axis=1, keepdims=True))

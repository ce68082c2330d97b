"""Attacks on adapters that clients trained in one round: losses of known text, and canaries.

The score of a sample is the decrease of its loss by the adapters, compared with that by adapters
which the attacker trained on text of its own, with the same settings. Without this comparison,
samples that any training makes easier would be taken for members. With DP-SGD each passage of a
client takes part in each step with a probability only; all samples of its text count as used. A
canary is a sentence with
random digits that a client has in its text. Its exposure (Carlini et al. 2019, *The Secret Sharer*)
says how many bits of the digits a ranking of all possibilities gives away.
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.leakage.data_sets import DataSets
from benchmarks.leakage.figures import Figures, figures
from benchmarks.membership.attacks import falls_of_loss
from benchmarks.membership.clients import Clients
from benchmarks.membership.kinds import TUNING
from espalier.data.passages import is_held_out
from espalier.hf.machine.computing import Computing
from espalier.hf.stream.block_stream import BlockStream
from espalier.messages.blobs.adapters import sums, unpack_adapters
from espalier.methods.tuning.adapters.tensors import trained
from espalier.settings.run import parse
from espalier.training.initial_values import initial_adapters

SAMPLING_RATE = 0.25
"""Probability with which a record takes part in a step of DP-SGD."""
Adapters = Mapping[str, Mapping[str, Tensor]]
"""Tensors of a reply by blob key and name."""
POSSIBILITIES = 512
"""Number of sentences among which a canary is ranked; by chance its exposure is about 1.4 bits."""
DIGITS = 9


def private_tuning(epsilon: float) -> dict[str, Any]:
    """Return the settings of the attacked tuning with differential privacy.

    A record is one passage. The noise follows from the seed, so that a measurement repeats; the
    attacker does not use the seed.
    """
    return {
        **TUNING,
        "privacy.epsilon": epsilon,
        "privacy.noise": "seed",
        "privacy.sampling-rate": SAMPLING_RATE,
        "federation.client-weights": "equal",
        "evaluation.local-baseline": False,
    }


def replies_of(clients: Clients, asked: Sequence[int], method: Mapping[str, Any]) -> list[Adapters]:
    """Return the adapters that some clients send after one round."""
    run = parse(clients.settings(method))
    adapters = trained(clients.opened.plan, run)
    begun = initial_adapters(adapters, run.seed)
    shapes = adapters.shapes()
    found: list[Adapters] = []
    for body in clients.replies(method, {"rank_limit": run.lora.rank}, asked):
        read = {
            key: unpack_adapters(shapes[key], body.blobs[key], run.federation.wire_dtype)
            for key in shapes
        }
        if run.federation.sends_differences:
            read = {key: sums(begun[key], read[key]) for key in shapes}
        found.append(read)
    return found


def mean_of(replies: Sequence[Adapters]) -> Adapters:
    """Return the mean of each tensor, which a secure sum shows with equal weights."""
    return {
        key: {
            name: torch.stack([own[key][name].double() for own in replies]).mean(dim=0).float()
            for name in tensors
        }
        for key, tensors in replies[0].items()
    }


class AdapterAttack:
    """Attack on the adapters of the clients of some data sets."""

    def __init__(
        self, sets: DataSets, computing: Computing, method: Mapping[str, Any] = TUNING
    ) -> None:
        self.sets = sets
        self.run = parse(sets.clients.settings(method))
        self.stream = BlockStream(sets.clients.opened, computing)
        self.replies = replies_of(sets.clients, range(sets.used), method)
        self.known = torch.cat(sets.candidates(self.run))
        own = replies_of(sets.clients, sets.reference_clients, method)
        self.usual = self._falls(own).mean(dim=0)
        """Decrease of each candidate's loss by training on other text of the same kind."""

    def alone(self) -> Figures:
        """Attack every client's reply."""
        return self._figures(self.replies, 1)

    def summed(self, together: int) -> Figures:
        """Attack the mean of the replies of several clients."""
        return self._figures(
            [
                mean_of(self.replies[first : first + together])
                for first in range(0, self.sets.used, together)
            ],
            together,
        )

    def _figures(self, replies: Sequence[Adapters], together: int) -> Figures:
        scores = self._falls(replies) - self.usual
        return figures(scores, self.sets.members(together), self.sets.samples)

    def _falls(self, replies: Sequence[Adapters]) -> Tensor:
        """Return the decrease of each candidate's loss by each reply: (replies, candidates)."""
        adapters = trained(self.sets.clients.opened.plan, self.run)
        return falls_of_loss(self.stream, self.known, adapters, replies)


# ----- canaries -----------------------------------------------------------------------------------


def canaries(number: int, seed: int) -> list[str]:
    """Return sentences that differ in random digits; none of them is held out by its hash."""
    chance = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < number:
        digits = " ".join(str(chance.randrange(10)) for _ in range(DIGITS))
        sentence = f"The access code of the archive is {digits} ."
        if not is_held_out(sentence):
            found[sentence] = None
    return list(found)


def insert(folder: Path, client: int, canary: str, times: int) -> None:
    """Add a canary to a client's text, in a passage of its own: ``times`` copies of the sentence."""
    path = folder / f"{client}.jsonl"
    passage = " ".join([canary] * times)
    # A passage is held out or not by its hash; a number in front makes it another passage.
    number = next(n for n in range(1000) if not is_held_out(f"{n} {passage}"))
    line = json.dumps({"text": f"{number} {passage}"}) + "\n"
    path.write_text(line + path.read_text())


def exposures(
    clients: Clients,
    number: int,
    together: int,
    inserted: Sequence[str],
    possible: Sequence[str],
    computing: Computing,
    method: Mapping[str, Any] = TUNING,
) -> tuple[list[float], list[float]]:
    """Return the exposure of each client's canary in its own reply, and in the mean of several.

    Parameters
    ----------
    clients : clients whose texts contain the canaries
    number : number of clients that reply
    together : number of clients in a mean
    inserted : canary of each client
    possible : further sentences among which a canary is ranked
    """
    run = parse(clients.settings(method))
    adapters = trained(clients.opened.plan, run)
    stream = BlockStream(clients.opened, computing)
    encoded = [clients.opened.encode(text) for text in (*inserted, *possible)]
    length = min(map(len, encoded))
    samples = torch.stack([torch.as_tensor(tokens[:length]) for tokens in encoded])
    replies = replies_of(clients, range(number), method)
    means = [mean_of(replies[first : first + together]) for first in range(0, number, together)]
    alone = falls_of_loss(stream, samples, adapters, replies)
    summed = falls_of_loss(stream, samples, adapters, means)
    others = list(range(number, len(samples)))
    return (
        [exposure(alone[client], client, others) for client in range(number)],
        [exposure(summed[client // together], client, others) for client in range(number)],
    )


def exposure(scores: Tensor, canary: int, others: Sequence[int]) -> float:
    """Return log2 of the number of sentences minus log2 of the canary's rank among them.

    A sentence with an equal score ranks before the canary.
    """
    rank = 1 + int((scores[list(others)] >= scores[canary]).sum())
    return math.log2(len(others) + 1) - math.log2(rank)

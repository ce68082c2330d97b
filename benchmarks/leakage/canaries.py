"""Canaries in adapters of one round: sentences with random digits that a client has in its text.

The exposure of a canary (Carlini et al. 2019, *The Secret Sharer*) says how many bits of its digits
a ranking of all possibilities gives away.
"""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.leakage.trained import losses_by, mean_of
from benchmarks.leakage.trained_replies import Adapters
from espalier.data.passages import is_held_out

POSSIBILITIES = 512
"""Number of sentences among which a canary is ranked; by chance its exposure is about 1.4 bits."""
DIGITS = 9


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
    """Add a canary to a client's text in a passage of its own: ``times`` copies of the sentence."""
    path = folder / f"{client}.jsonl"
    passage = " ".join([canary] * times)
    # A passage is held out or not by its hash; a number in front makes it another passage.
    number = next(n for n in range(1000) if not is_held_out(f"{n} {passage}"))
    line = json.dumps({"text": f"{number} {passage}"}) + "\n"
    path.write_text(line + path.read_text())


def exposures(
    kind: Adapters, together: int, inserted: Sequence[str], possible: Sequence[str]
) -> tuple[list[float], list[float]]:
    """Return the exposure of each client's canary in its own reply, and in the mean of several.

    Parameters
    ----------
    kind : replies of clients whose texts contain the canaries
    together : number of clients in a mean
    inserted : canary of each client
    possible : further sentences among which a canary is ranked
    """
    number = len(inserted)
    encoded = [kind.base.encode(text) for text in (*inserted, *possible)]
    length = min(map(len, encoded))
    samples = torch.stack([torch.as_tensor(tokens[:length]) for tokens in encoded])
    replies = kind.of(range(number))
    means = [mean_of(replies[first : first + together]) for first in range(0, number, together)]
    before = losses_by(kind, samples, [kind.begun])
    alone = before - losses_by(kind, samples, replies)
    summed = before - losses_by(kind, samples, means)
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

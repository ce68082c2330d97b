"""Which layers each client prunes in a round, in proportion to what it can compute (FedSpaLLM section 4.3, equation 8).

Where the places suffice, every layer is covered at least once: the layers, in random order, are dealt out to the clients'
places first, and the remaining places are filled at random. The draw treats all layers alike, so a client that prunes k of L
layers has each of them with probability k / L, and equal clients have equal probabilities.
"""

from collections.abc import Mapping, Sequence

import numpy as np


class TooFewPlacesError(ValueError):
    """The clients together cannot prune every layer in one round."""


def layers_per_client(num_layers: int, share: float, capabilities: Mapping[int, float]) -> dict[int, int]:
    """k_i of each rank: the most capable client prunes ``share`` of all layers, the others in proportion, at least one.

    Parameters
    ----------
    num_layers : L
    share : in (0, 1]
    capabilities : r_i > 0 by rank, in any unit

    Returns
    -------
    dict
        rank -> k_i, ``max(1, round(L * share * r_i / max r))``
    """
    most = max(capabilities.values())
    return {rank: max(1, round(num_layers * share * (value / most))) for rank, value in capabilities.items()}


def sample_layers(
    layers: Sequence[int], places: Mapping[int, int], generator: np.random.Generator, *, cover: bool = True
) -> dict[int, list[int]]:
    """Draw the layers of every client.

    Parameters
    ----------
    layers : those that are drawn from; the first of them are covered first if not all can be
    places : rank -> k_i; a client never has a layer twice, so more places than layers count as that many
    cover : refuse if not every layer can be covered

    Returns
    -------
    dict
        rank -> ascending layers

    Raises
    ------
    TooFewPlacesError
        With ``cover``: the places are fewer than the layers.
    """
    sizes = {rank: min(places[rank], len(layers)) for rank in sorted(places)}
    total = sum(sizes.values())
    if cover and total < len(layers):
        raise TooFewPlacesError(f"the clients together prune {total} layers in a round, the model has {len(layers)}")
    first = generator.permutation(np.asarray(layers[:total], dtype=np.int64))
    seats = generator.permutation(np.repeat(list(sizes), list(sizes.values())))
    drawn: dict[int, list[int]] = {rank: [] for rank in sizes}
    for layer, rank in zip(first, seats, strict=False):
        drawn[int(rank)].append(int(layer))
    for rank, size in sizes.items():
        others = np.setdiff1d(np.asarray(layers, dtype=np.int64), drawn[rank])
        drawn[rank] += generator.choice(others, size - len(drawn[rank]), replace=False).tolist()
    return {rank: sorted(chosen) for rank, chosen in drawn.items()}

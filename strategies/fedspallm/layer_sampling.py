"""Layer sampling of FedSpaLLM, in proportion to the clients' capability (section 4.3, equation 8).

If the clients' places suffice, every layer is sampled at least once. The layers, in random order,
are first assigned to random places of the clients; the remaining places are filled at random. All
layers are treated alike, so a client that prunes k of L layers has each layer with probability k /
L, and equal clients have equal probabilities.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from espalier.amounts import count
from espalier.errors import InputError
from espalier.methods.fedspallm import FedSpaLLMSettings
from espalier.seeds import derive_seed


def layers_per_client(
    num_layers: int, share: float, capabilities: Mapping[int, float]
) -> dict[int, int]:
    """Return k_i, the number of layers that each client prunes.

    The most capable client prunes the fraction ``share`` of all layers, the others proportionally
    fewer, but at least one.

    Parameters
    ----------
    num_layers : number of layers L
    share : fraction in (0, 1]
    capabilities : capability r_i > 0 of each client, in any unit

    Returns
    -------
    dict
        client -> k_i, ``max(1, round(L * share * r_i / max r))``
    """
    most = max(capabilities.values())
    return {
        client: max(1, round(num_layers * share * (value / most)))
        for client, value in capabilities.items()
    }


def require_places(job: FedSpaLLMSettings, num_layers: int, places: Mapping[str, int]) -> None:
    """Raise an error if the clients' places, k_i by name, do not cover all layers.

    Raises
    ------
    InputError
        There are fewer places than layers, and ``coverage`` requires all layers in every round.
    """
    total = sum(min(number, num_layers) for number in places.values())
    if total < num_layers and job.coverage == "every-round":
        numbers = ", ".join(f"{site} {number}" for site, number in places.items())
        raise InputError(
            f"fedspallm.sampled-layers = {job.sampled_layers}: the clients together prune"
            f" {count(total, 'layer')} in a round, the model has {num_layers} ({numbers}); raise"
            " it, or set fedspallm.coverage to 'over-rounds'"
        )


def drawn_layers(
    seed: int,
    server_round: int,
    layers: Sequence[int],
    versions: Sequence[int],
    places: Mapping[int, int],
) -> dict[int, list[int]]:
    """Draw the layers of every client in a round.

    If not all of ``layers`` can be covered, those that were pruned longest ago come first.

    Parameters
    ----------
    seed : seed of the run
    server_round : round, which selects the random stream
    layers : layers that are drawn from
    versions : round in which each layer of the model was last pruned
    places : client -> k_i
    """
    generator = np.random.default_rng(derive_seed(seed, "layers", server_round=server_round))
    order = generator.permutation(len(layers))
    by_age = sorted((layers[place] for place in order), key=lambda index: versions[index])
    return sample_layers(by_age, places, generator)


def sample_layers(
    layers: Sequence[int], places: Mapping[int, int], generator: np.random.Generator
) -> dict[int, list[int]]:
    """Draw the layers of every client.

    Parameters
    ----------
    layers : layers that are drawn from; the first of them have precedence if not all can be covered
    places : client -> k_i; values above the number of layers are reduced to it
    generator : source of random numbers

    Returns
    -------
    dict
        client -> layers in ascending order, without repetition
    """
    sizes = {client: min(places[client], len(layers)) for client in sorted(places)}
    total = sum(sizes.values())
    first = generator.permutation(np.asarray(layers[:total], dtype=np.int64))
    seats = generator.permutation(np.repeat(list(sizes), list(sizes.values())))
    drawn: dict[int, list[int]] = {client: [] for client in sizes}
    for layer, client in zip(first, seats, strict=False):
        drawn[int(client)].append(int(layer))
    for client, size in sizes.items():
        others = np.setdiff1d(np.asarray(layers, dtype=np.int64), drawn[client])
        drawn[client] += generator.choice(others, size - len(drawn[client]), replace=False).tolist()
    return {client: sorted(chosen) for client, chosen in drawn.items()}

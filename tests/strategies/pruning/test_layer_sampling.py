"""Layer sampling of FedSpaLLM: layers per client, coverage and unbiased means."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.methods.pruning.fedspallm import FedSpaLLMSettings
from strategies.pruning.fedspallm.strategy import layers_per_client, require_places, sample_layers


def test_places_by_hand() -> None:
    """Twelve layers: the most capable client gets half of them, 6, the others 3 and 1.5.

    1.5 is rounded to 2.
    """
    assert layers_per_client(12, 0.5, {0: 1.0, 1: 2.0, 2: 4.0}) == {0: 2, 1: 3, 2: 6}


def test_everybody_prunes_at_least_one_layer() -> None:
    assert layers_per_client(4, 0.25, {0: 0.001, 1: 5.0}) == {0: 1, 1: 1}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.integers(0, 2**32 - 1),
)
def test_every_layer_is_covered_or_refused(num_layers: int, sizes: list[int], seed: int) -> None:
    places = {client: min(size, num_layers) for client, size in enumerate(sizes)}
    generator = np.random.default_rng(seed)
    by_site = {f"site-{client}": size for client, size in places.items()}
    drawn = sample_layers(range(num_layers), places, generator)
    if sum(places.values()) < num_layers:
        told = (
            f"sampled-layers = 0.5: .* prune {sum(places.values())} layers? in a round, the model"
            f" has {num_layers} .site-0 "
        )
        with pytest.raises(EspalierError, match=told):
            require_places(FedSpaLLMSettings(sampled_layers=0.5), num_layers, by_site)
        require_places(FedSpaLLMSettings(coverage="over-rounds"), num_layers, by_site)
        return
    require_places(FedSpaLLMSettings(), num_layers, by_site)
    assert {layer for layers in drawn.values() for layer in layers} == set(range(num_layers))
    for client, layers in drawn.items():
        assert len(layers) == places[client]
        assert layers == sorted(set(layers))


def test_scarce_places_go_to_first_layers() -> None:
    drawn = sample_layers([7, 3, 5, 1], {0: 1, 1: 2}, np.random.default_rng(0))
    assert sorted(layer for layers in drawn.values() for layer in layers) == [3, 5, 7]


def test_equal_clients_draw_layers_equally_often() -> None:
    """k / L is 3 / 6 for clients 0 and 1 and 1 / 6 for client 2.

    6000 draws, with a tolerance of five standard deviations.
    """
    draws = 6000
    layers = 6
    places = {0: 3, 1: 3, 2: 1}
    seen = np.zeros((3, layers))
    generator = np.random.default_rng(5)
    for _ in range(draws):
        for client, chosen in sample_layers(range(layers), places, generator).items():
            seen[client, chosen] += 1
    for client, size in places.items():
        p = size / layers
        assert np.abs(seen[client] / draws - p).max() < 5 * np.sqrt(p * (1 - p) / draws)


def test_only_inverse_inclusion_mean_is_unbiased() -> None:
    """Theorem 4.2 for one layer with one weight per client: 1, 2 and 6.

    Three layers; the clients sample two, one and one of them. The mean of all clients is 3.
    Weighting each sampled client by the inverse of its inclusion probability (Horvitz & Thompson
    1952) has that expectation. The l0 mean of the sampled clients has not, because clients that
    sample more layers count more.
    """
    values = {0: 1.0, 1: 2.0, 2: 6.0}
    places = {0: 2, 1: 1, 2: 1}
    draws = 20000
    generator = np.random.default_rng(3)
    weighted = []
    l0 = []
    for _ in range(draws):
        drawn = sample_layers(range(3), places, generator)
        sampled = [client for client, layers in drawn.items() if 0 in layers]
        weighted.append(sum(values[client] * 3 / places[client] for client in sampled) / 3)
        l0.append(sum(values[client] for client in sampled) / len(sampled))
    assert np.mean(weighted) == pytest.approx(3.0, abs=5 * np.std(weighted) / np.sqrt(draws))
    assert abs(np.mean(l0) - 3.0) > 10 * np.std(l0) / np.sqrt(draws)

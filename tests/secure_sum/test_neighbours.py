"""Graph of neighbours: regular, symmetric, and with the properties that its degree promises."""

import math

import pytest

from espalier.secure_sum.neighbours import (
    COLLUDING,
    Neighbourhood,
    _at_least,
    neighbourhood,
    neighbours,
    two_thirds,
)

KEYS = {client: f"key of {client}" for client in range(3, 43)}


def test_few_clients_are_all_neighbours() -> None:
    for clients in (3, 8, 32, 100):
        assert neighbourhood(clients, two_thirds(clients)) == Neighbourhood(
            clients - 1, two_thirds(clients)
        )
    assert neighbours({2: "a", 5: "b", 9: "c"}, 2) == {2: [5, 9], 5: [2, 9], 9: [2, 5]}


def test_graph_is_regular_and_symmetric() -> None:
    graph = neighbours(KEYS, 6)
    assert set(graph) == set(KEYS)
    for client, others in graph.items():
        assert len(others) == 6
        assert others == sorted(set(others) - {client})
        assert all(client in graph[other] for other in others)
    # Another key of one client gives another order.
    assert neighbours(KEYS | {3: "another key"}, 6) != graph
    assert neighbours(dict(reversed(KEYS.items())), 6) == graph


def test_probability_by_hand() -> None:
    """Of 5 clients 2 are marked, and 3 are drawn: at least 2 marked in 3 of 10 draws."""
    assert _at_least(2, 3, 5, 2) == pytest.approx(0.3)
    assert _at_least(0, 3, 5, 2) == 1.0
    assert _at_least(3, 3, 5, 2) == 0.0


@pytest.mark.parametrize(("clients", "threshold"), [(101, 91), (300, 240)])
def test_degree_of_many_clients(clients: int, threshold: int) -> None:
    found = neighbourhood(clients, threshold)
    assert found.degree < 0.8 * (clients - 1)
    assert found.degree % 2 == 0
    assert two_thirds(found.degree + 1) <= found.threshold <= found.degree
    # Nowhere on the circle do all clients on one side collude or drop out.
    bad = COLLUDING + 1 - threshold / clients
    assert clients * bad ** (found.degree // 2) <= 2**-40
    # No client has so many colluding neighbours, and enough neighbours stay.
    colluding = math.ceil(COLLUDING * clients)
    caught = _at_least(found.threshold, found.degree, clients - 1, colluding)
    assert clients * caught <= 2**-40
    stays = _at_least(found.threshold, found.degree, clients - 1, threshold)
    assert clients * (1 - stays) <= 2**-30

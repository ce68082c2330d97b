"""Neighbours of clients in a secure sum: all others, or some of them if there are many clients.

Each client shares masks with its neighbours, and its neighbours and itself hold the shares of its
secrets. Up to ``ALL_UP_TO`` clients are all neighbours (Bonawitz et al. 2017). With more, a regular
graph of a degree that grows with the logarithm of their number suffices (Bell et al. 2020, SecAgg+,
section 3): clients are put on a circle in an order that the hash of all public keys decides, and
each is a neighbour of the ``degree / 2`` nearest ones on both sides.

``neighbourhood`` takes the smallest even degree with which, for a random order, all of this holds:

- no client has as many colluding neighbours as shares are needed (failure below 2^-40), if at most
  ``COLLUDING`` of the clients collude with the server;
- the clients that stay and do not collude remain connected (failure below 2^-40): nowhere on the
  circle do ``degree / 2`` clients in a row collude or drop out;
- enough holders of each client's shares stay (failure below 2^-30), if as many clients stay as the
  threshold of the round says.

If no degree below all others has these properties, or the degree saves less than a fifth, all are
neighbours.

Covers: a server that follows the protocol and colludes with up to ``COLLUDING`` of the clients.
Does not cover: a server that also chooses keys of its own clients until the order suits it. With
all clients as neighbours there is no order to choose.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

COLLUDING = 0.2
"""Assumed largest fraction of the clients that collude with the server."""
SECRET = 2.0**-40
"""Largest probability that the graph does not hide single clients."""
CORRECT = 2.0**-30
"""Largest probability that too few holders stay."""
ALL_UP_TO = 100
"""Maximum number of clients of which all are neighbours, whatever the threshold."""
WORTHWHILE = 0.8
"""Largest fraction of all others that a degree may be to be used."""


@dataclass(frozen=True)
class Neighbourhood:
    """Degree of the graph, and number of holders that put a secret together."""

    degree: int
    """Number of neighbours of each client."""
    threshold: int
    """Number of holders' shares that are needed, of ``degree + 1``."""


def two_thirds(clients: int) -> int:
    """Return the smallest number of clients that are more than two thirds of them.

    With this threshold a server that names other clients to each client as those in the sum cannot
    get both secrets of a client (Bonawitz et al. 2017, section 6.2, has the same bound).
    """
    return 2 * clients // 3 + 1


@lru_cache(maxsize=64)
def neighbourhood(clients: int, threshold: int) -> Neighbourhood:
    """Return degree and threshold of the graph.

    Parameters
    ----------
    clients : number of clients whose keys are known
    threshold : number of clients that must stay, more than two thirds of them
    """
    # With few clients a graph saves little, and its guarantees are weaker.
    max_degree = int((clients - 1) * WORTHWHILE) if clients > ALL_UP_TO else 0
    for degree in range(2, max_degree + 1, 2):
        needed = _needed(clients, threshold, degree)
        if needed:
            return Neighbourhood(degree, needed)
    return Neighbourhood(clients - 1, threshold)


def neighbours(keys: Mapping[int, str], degree: int) -> dict[int, list[int]]:
    """Return the neighbours of each client, ascending.

    Parameters
    ----------
    keys : public keys of each client, as text; their hash decides the order on the circle
    degree : even number, or that of all others
    """
    clients = sorted(keys)
    if degree >= len(clients) - 1:
        return {client: [other for other in clients if other != client] for client in clients}
    # Nobody can choose the order, since all public keys enter the hash.
    seed = sha256("\n".join(f"{client} {keys[client]}" for client in clients).encode()).hexdigest()
    circle = sorted(clients, key=lambda client: sha256(f"{seed} {client}".encode()).digest())
    return {
        client: sorted(_beside(circle, position, degree // 2))
        for position, client in enumerate(circle)
    }


def _beside(circle: Sequence[int], position: int, reach: int) -> list[int]:
    steps = [*range(-reach, 0), *range(1, reach + 1)]
    return [circle[(position + step) % len(circle)] for step in steps]


def _needed(clients: int, threshold: int, degree: int) -> int:
    """Return the number of shares that are needed with a degree; 0 if it does not suffice."""
    # Fraction of clients that may drop out.
    dropout_rate = 1 - threshold / clients
    # Bound: a run of ``degree / 2`` such clients that begins at any of the places.
    in_a_row = clients * min(1.0, COLLUDING + dropout_rate) ** (degree // 2)
    if in_a_row > SECRET:
        return 0
    colluding = math.ceil(COLLUDING * clients)
    # More than two thirds of the holders, or more if too many could collude.
    needed = two_thirds(degree + 1)
    while needed <= degree:
        if clients * _at_least(needed, degree, clients - 1, colluding) <= SECRET:
            break
        needed += 1
    # A client that dropped out does not hold its own shares any more.
    probability = _at_least(needed, degree, clients - 1, threshold)
    # Union bound over all clients.
    return needed if needed <= degree and clients * (1 - probability) <= CORRECT else 0


def _at_least(minimum: int, num_drawn: int, population: int, marked: int) -> float:
    """Return the probability of at least ``minimum`` marked ones in draws without return."""
    num_draws = math.comb(population, num_drawn)
    # Whole numbers: the difference to 1 must be exact to 2^-50.
    num_below = sum(
        math.comb(marked, number) * math.comb(population - marked, num_drawn - number)
        for number in range(max(0, num_drawn - population + marked), min(minimum, marked + 1))
    )
    return (num_draws - num_below) / num_draws if num_below <= num_draws else 0.0

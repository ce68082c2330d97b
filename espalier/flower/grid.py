"""Recognition of a simulation by the grid that Flower hands to the ServerApp.

In a simulation all clients are on this machine, so sites' limits do not apply, half of the clients are a quorum, and the
pooled-data baseline exists.
Covers: a grid counts as a simulation's only if its class is listed here; every other one, also a class that a later version of
Flower adds, counts as a deployment's.
Does not cover: what a client may do. A client finds out for itself whether it is simulated (``client_app.simulated``) and never
asks the server.
"""

from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid

GRIDS: tuple[type[Grid], ...] = (InMemoryGrid,)
"""Grids of simulations. Tests and measurements that play all nodes in one process add their own."""


def is_simulation(grid: Grid) -> bool:
    """Return whether the nodes behind this grid are simulated on this machine."""
    return isinstance(grid, GRIDS)

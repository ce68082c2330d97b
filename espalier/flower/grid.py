"""Detection of a simulation by the grid that Flower passes to the ServerApp.

In a simulation all clients are on this machine. So the site policy does not apply, half of the
clients are a quorum, and a centralized baseline is possible.
Covers: a grid counts as a simulation only if its class is listed here. Every other grid, including
a class that a later version of Flower adds, counts as a deployment.
Does not cover: what a client may do. A client detects by itself whether it is simulated
(``client_app.simulated``) and never asks the server.
"""

from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid

GRIDS: tuple[type[Grid], ...] = (InMemoryGrid,)
"""Grid classes of simulations.

Tests and benchmarks that run all nodes in one process add their own.
"""


def is_simulation(grid: Grid) -> bool:
    """Return whether the nodes of this grid are simulated on this machine."""
    return isinstance(grid, GRIDS)

"""What a device of FedSpine measured of its units while it trained: it stays in its private state, for the next cut."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client_app import carried
from espalier.storage.private import PrivateState
from espalier.wire.cut_units import Cut

UNITS = "units"
"""Key of what is kept."""


def keep_measured(state: PrivateState, server_round: int, cut: Cut, values: Tensor | None) -> None:
    """Keep what the units that are left are worth; what is kept of earlier rounds stays where no step was finite.

    Parameters
    ----------
    cut : (units,), bool, of the whole model
    values : (units that are left,), float64
    """
    if values is None:
        return
    whole = torch.zeros(len(cut), dtype=torch.float64)
    whole[torch.from_numpy(~cut)] = values
    carried.keep(
        state,
        carried.IMPORTANCE,
        server_round,
        {UNITS: {"values": whole, "cut": torch.from_numpy(cut.copy())}},
    )


def measured_units(state: PrivateState, server_round: int, cut: Cut) -> NDArray[np.float64] | None:
    """What was measured before a round, (units,), 0 for those that are cut; None without any, or of another cut."""
    kept = carried.before(state, carried.IMPORTANCE, server_round).get(UNITS)
    if kept is None or not np.array_equal(kept["cut"].numpy(), cut):
        return None
    values: NDArray[np.float64] = kept["values"].numpy()
    return values

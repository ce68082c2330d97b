"""Importances of prunable groups that a FedSpine device measured while it trained.

They stay in the client state and determine the next cut.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client_app.protocol import client_state
from espalier.models.groups import Cut
from espalier.storage.client_state import PrivateState

GROUPS = "groups"
"""Key of the stored tensors."""


def keep_measured(state: PrivateState, server_round: int, cut: Cut, values: Tensor | None) -> None:
    """Store the importances of the remaining groups.

    Without values (no step was finite), the importances of earlier rounds are kept.

    Parameters
    ----------
    cut : mask of the cut groups over the whole model, (groups,), bool
    values : importances of the remaining groups, (remaining groups,), float64
    """
    if values is None:
        return
    whole = torch.zeros(len(cut), dtype=torch.float64)
    whole[torch.from_numpy(~cut)] = values
    client_state.keep(
        state,
        client_state.IMPORTANCE,
        server_round,
        {GROUPS: {"values": whole, "cut": torch.from_numpy(cut.copy())}},
    )


def measured_importance(
    state: PrivateState, server_round: int, cut: Cut
) -> NDArray[np.float64] | None:
    """Return the importances measured before a round, (groups,), float64, 0 for cut groups.

    The result is None if there are none, or if they belong to another cut.
    """
    kept = client_state.before(state, client_state.IMPORTANCE, server_round).get(GROUPS)
    if kept is None or not np.array_equal(kept["cut"].numpy(), cut):
        return None
    values: NDArray[np.float64] = kept["values"].numpy()
    return values

"""What a client of SFT-P keeps of its rounds for a person to look at: how it met its budget, how good its model was, its masks.

Covers: it lies in the client's private state and is in no message; in a simulation the run's figures are made of it.
Does not cover: a site's owner may show it to whom they like.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.modeling.structured.lane_gates import Gate, LaneGates
from espalier.storage.private import PrivateState
from espalier.wire.structure import as_ranges, from_ranges

HISTORY = "history"
"""Document that outlasts rounds."""
NEAR = 0.02
LOOKED_AT = 10
"""A budget is met where the mean of T(g) over so many draws is so near to the target."""


def note_round(
    state: PrivateState, server_round: int, spent: Sequence[float], perplexity: float | None
) -> None:
    """Keep what a round's draws spent, over the target, and the perplexity of the client's own model after it."""
    kept = load(state)
    earlier = [entry for entry in kept["rounds"] if entry["round"] < server_round]
    kept["rounds"] = [
        *earlier,
        {"round": server_round, "spent": list(spent), "perplexity": perplexity},
    ]
    state.save_lasting(HISTORY, kept)


def note_fit(state: PrivateState, spent: Sequence[float]) -> None:
    """Keep what the draws spent while a late client fitted its embedding."""
    state.save_lasting(HISTORY, load(state) | {"fitted": list(spent)})


def note_masks(state: PrivateState, chosen: Mapping[Gate, Tensor]) -> None:
    """Keep the masks of the client's own model."""
    masks = {
        f"{index}/{kind}": as_ranges(mask.nonzero().squeeze(1).tolist())
        for (index, kind), mask in chosen.items()
    }
    state.save_lasting(HISTORY, load(state) | {"masks": masks})


def load(state: PrivateState) -> dict[str, Any]:
    """All that is kept; empty lists where there is nothing."""
    return state.load_lasting(HISTORY) or {"rounds": [], "fitted": [], "masks": {}}


def masks_of(kept: Mapping[str, Any], gates: LaneGates) -> dict[Gate, Tensor]:
    """Masks that were kept: (lanes,), bool, of each gate; empty where there are none."""
    found: dict[Gate, Tensor] = {}
    for (index, kind), width in gates.widths.items():
        if (text := kept["masks"].get(f"{index}/{kind}")) is not None:
            found[index, kind] = torch.zeros(width, dtype=torch.bool)
            found[index, kind][list(from_ranges(text))] = True
    return found


def steps_to_budget(spent: Sequence[float]) -> int | None:
    """After how many steps the mean of ``LOOKED_AT`` draws was first within ``NEAR`` of the target; None: never."""
    for end in range(LOOKED_AT, len(spent) + 1):
        if abs(sum(spent[end - LOOKED_AT : end]) / LOOKED_AT - 1) <= NEAR:
            return end
    return None

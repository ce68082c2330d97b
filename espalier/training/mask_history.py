"""Private history of an SFT-P client: budget, perplexity and masks of its rounds.

Covers: the history is in the client's private state and in no message. In a simulation the run's
figures are made from it.
Does not cover: a site's owner can show it to anybody.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.hf.structured.residual_gates import Gate, ResidualGates
from espalier.models.structure import as_ranges, from_ranges
from espalier.storage.client_state import PrivateState

HISTORY = "history"
"""Name of the document in the private state; it is kept across rounds."""
NEAR = 0.02
"""Maximum relative distance from the budget at which mean T(g) of local draws meets it."""
LOOKED_AT = 10
"""Number of consecutive draws over which T(g) is averaged."""


def note_round(
    state: PrivateState, server_round: int, spent: Sequence[float], perplexity: float | None
) -> None:
    """Store T(g) of a round's draws relative to the budget, and the perplexity of the model.

    The first draw is of the averaged generator, the last one of the client's last local step.
    """
    kept = load(state)
    new_entry = {"round": server_round, "spent": list(spent), "perplexity": perplexity}
    # A round that is repeated replaces its entry.
    earlier = [entry for entry in kept["rounds"] if entry["round"] < server_round]
    state.save_lasting(HISTORY, kept | {"rounds": [*earlier, new_entry]})


def note_fit(state: PrivateState, spent: Sequence[float]) -> None:
    """Store the spending while a client that joined late fitted its embedding."""
    state.save_lasting(HISTORY, load(state) | {"fitted": list(spent)})


def note_masks(state: PrivateState, chosen: Mapping[Gate, Tensor]) -> None:
    """Store the masks of the client's own model."""
    masks = {
        f"{index}/{kind}": as_ranges(mask.nonzero().squeeze(1).tolist())
        for (index, kind), mask in chosen.items()
    }
    state.save_lasting(HISTORY, load(state) | {"masks": masks})


def load(state: PrivateState) -> dict[str, Any]:
    """Return the whole history, with empty entries if nothing is stored."""
    return state.load_lasting(HISTORY) or {"rounds": [], "fitted": [], "masks": {}}


def masks_of(kept: Mapping[str, Any], gates: ResidualGates) -> dict[Gate, Tensor]:
    """Return the stored masks of the gates: (dimensions,), bool; empty if there are none."""
    masks: dict[Gate, Tensor] = {}
    for (index, kind), width in gates.widths.items():
        if (text := kept["masks"].get(f"{index}/{kind}")) is not None:
            masks[index, kind] = torch.zeros(width, dtype=torch.bool)
            masks[index, kind][list(from_ranges(text))] = True
    return masks


def steps_to_budget(spent: Sequence[float]) -> int | None:
    """Return the number of local steps after which draws first met the budget, or None.

    They meet it when the mean T(g) of ``LOOKED_AT`` draws is within ``NEAR`` of the target.
    """
    for end in range(LOOKED_AT, len(spent) + 1):
        if abs(sum(spent[end - LOOKED_AT : end]) / LOOKED_AT - 1) <= NEAR:
            return end
    return None

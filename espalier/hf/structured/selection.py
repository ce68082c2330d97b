"""Choice of the prunable groups that a structured cut removes, by their scores."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.errors import InputError
from espalier.models.groups import Cut, Groups
from espalier.models.structure import GROUP_KINDS
from espalier.settings.structured import CutSettings
from pruning_kernels.groups.groups import lowest_groups, searched


def in_sequence(groups: Groups, scores: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
    """Return scores by block and kind as one sequence.

    The result is (groups,), float64, on the CPU, with zeros for blocks without scores.
    """
    flat = torch.zeros(len(groups.costs), dtype=torch.float64)
    for index, own in scores.items():
        for kind in GROUP_KINDS:
            flat[groups.at(index, kind)] = own[kind].to("cpu", torch.float64)
    return flat


def lowest(
    groups: Groups, scores: Tensor, job: CutSettings, share: float, gone: Cut | None = None
) -> Cut:
    """Choose the groups with the lowest scores for removal.

    Parameters
    ----------
    groups : groups of the model
    scores : (groups,), float64, on the CPU; those of blocks that lose no groups are not used
    job : settings of the method
    share : minimum fraction of the cost of the groups that may be removed, exceeded by less than
        one group in each competition; see ``Groups.reachable``
    gone : groups that were removed before. They stay removed regardless of their scores, and count
        towards ``share``, so that a growing share removes growing sets (FedSpine section 4.2)

    Raises
    ------
    InputError
        A score is NaN, for example because a weight of the model is NaN.
    """
    if torch.isnan(scores).any():
        raise InputError(
            "the importance of some prunable groups is not a number; look for weights of the model"
            " that are not finite"
        )
    costs = torch.from_numpy(groups.costs)
    pools = torch.from_numpy(groups.pools)
    cut = groups.none
    for competing, target in groups.targets(share, job.selection):
        own = groups.span(competing)
        if job.selection == "search":
            found = searched(scores[own], costs[own], pools[own], pools[own] % 2, target)
        else:
            before = None if gone is None else torch.from_numpy(gone[own])
            found = lowest_groups(scores[own], costs[own], pools[own], target, before)
        cut[own] = found.numpy()
    for index in groups.blocks:
        channels = groups.at(index, "channels")
        worth = scores[channels].numpy().copy()
        if gone is not None:
            # Channels that were removed earlier must not come back to fill a multiple.
            worth[gone[channels]] = -np.inf
        _keep_a_multiple(cut[channels], worth, job.channel_multiple)
    return cut


def _keep_a_multiple(cut: NDArray[np.bool_], scores: NDArray, multiple: int) -> None:
    """Change the removed channels in place so that a multiple of ``multiple`` stays.

    The lowest of the remaining channels are removed. If too few remain, the highest removed ones
    come back.
    """
    stay = len(cut) - int(cut.sum())
    # At least one multiple stays, or all channels if there are fewer.
    wanted = max(stay // multiple * multiple, min(multiple, len(cut)))
    order = np.argsort(scores, kind="stable")
    if wanted < stay:
        cut[order[~cut[order]][: stay - wanted]] = True
    elif wanted > stay:
        cut[order[cut[order]][stay - wanted :]] = False

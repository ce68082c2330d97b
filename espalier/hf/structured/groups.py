"""Prunable groups of a model in the flat form of the kernels: scores, costs, and competition.

A prunable group is a key-value group of attention or a feed-forward channel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.errors import InputError
from espalier.messages.blobs.cuts import KINDS
from espalier.models.plan import ModelPlan
from espalier.models.structure import Structure, unit_costs, units_of
from espalier.settings.structured import CutSettings
from pruning_kernels.groups.groups import searched, share_of, within_each


@dataclass(frozen=True)
class ModelUnits:
    """Prunable groups of some blocks: for each block its key-value groups, then its channels."""

    blocks: tuple[int, ...]
    """Indices of the blocks."""
    numbers: tuple[tuple[int, int], ...]
    """Number of key-value groups and of channels of each block."""
    costs: Tensor
    """Number of parameters of each group, (groups,), int64."""
    pools: Tensor
    """Pool of each group, (groups,), int64: twice the place of its block, plus 1 for channels."""

    @staticmethod
    def of(plan: ModelPlan, blocks: Sequence[int] | None = None) -> "ModelUnits":
        """Return all prunable groups of a model, or those of some of its blocks."""
        chosen = tuple(range(len(plan.blocks)) if blocks is None else blocks)
        numbers = []
        costs = list[int]()
        pools = list[int]()
        for place, index in enumerate(chosen):
            units = units_of(plan, plan.blocks[index])
            numbers.append((units.groups, units.channels))
            for kind, (number, cost) in enumerate(
                zip(numbers[-1], unit_costs(plan, plan.blocks[index]), strict=True)
            ):
                costs += [cost] * number
                pools += [2 * place + kind] * number
        return ModelUnits(chosen, tuple(numbers), torch.tensor(costs), torch.tensor(pools))

    def competing(self, selection: str) -> Tensor:
        """Return the number of the competition that each group takes part in, (groups,), int64.

        The setting ``selection`` determines whether groups of the whole model, of a block, or of a
        kind in a block compete.
        """
        return {"block": self.pools // 2, "kind": self.pools}.get(
            selection, torch.zeros_like(self.pools)
        )

    def lowest(
        self,
        scores: Sequence[Mapping[str, Tensor]],
        job: CutSettings,
        share: float,
        gone: Sequence[Mapping[str, NDArray]] | None = None,
    ) -> list[dict[str, NDArray]]:
        """Choose the groups with the lowest scores for removal.

        Parameters
        ----------
        scores : for each block, (groups,) by kind
        job : settings of the method
        share : minimum fraction of the cost of all groups to remove, exceeded by less than one
            group in each competition; see ``share_of_units``
        gone : earlier result of this method. These groups stay removed regardless of their scores,
            and count towards ``share``, so that a growing share removes growing sets (FedSpine
            section 4.2)

        Returns
        -------
        list of dict
            For each block, bool arrays by kind: True for removed groups

        Raises
        ------
        InputError
            A score is NaN, for example because a weight of the model is NaN.
        """
        flat = torch.cat([own[kind].to(torch.float64).cpu() for own in scores for kind in KINDS])
        if torch.isnan(flat).any():
            raise InputError(
                "what units are worth is no number for some of them; look for weights of the model"
                " that are none"
            )
        competing = self.competing(job.selection)
        before = (
            torch.cat([torch.from_numpy(own[kind]) for own in gone for kind in KINDS])
            if gone is not None
            else None
        )
        if job.selection == "search":
            cut = searched(
                flat, self.costs, self.pools, self.pools % 2, share_of(int(self.costs.sum()), share)
            )
        else:
            cut = within_each(
                flat, self.costs, self.pools, competing, self._totals(competing), share, before
            )
        pieces = iter(cut.split([number for own in self.numbers for number in own]))
        cuts = [
            {kind: next(pieces).numpy().astype(np.bool_) for kind in KINDS} for _ in self.blocks
        ]
        for place, (own, found) in enumerate(zip(cuts, scores, strict=True)):
            values = found["channels"].to(torch.float64).cpu().numpy().copy()
            if gone is not None:
                # Channels that were removed earlier must not come back to fill a multiple.
                values[gone[place]["channels"]] = -np.inf
            _keep_a_multiple(own["channels"], values, job.channel_multiple)
        return cuts

    def structure(
        self, plan: ModelPlan, cuts: Sequence[Mapping[str, NDArray]], biases: Sequence[str] = ()
    ) -> Structure:
        """Return the structure of the pruned model.

        Parameters
        ----------
        plan : plan of the dense model
        cuts : result of ``lowest``
        biases : canonical names of the matrices that get a bias
        """
        kept = {
            index: {kind: np.flatnonzero(~units).tolist() for kind, units in cut.items()}
            for index, cut in zip(self.blocks, cuts, strict=True)
        }
        made = Structure.whole(plan).keeping(kept)
        return Structure(made.base, made.blocks, tuple(biases))

    def share_of_units(self, plan: ModelPlan, job: CutSettings) -> float:
        """Return the pruning ratio of the settings as a fraction of the cost of these groups.

        Raises
        ------
        InputError
            Too many parameters would have to be removed: one key-value group and one multiple of
            channels stay in each block.
        """
        everything = int(self.costs.sum())
        whole = ModelUnits.of(plan) if len(self.blocks) < len(plan.blocks) else self
        of = int(whole.costs.sum())
        # The setting refers to all blocks; the kernels need a fraction of these groups.
        share = job.share * of / everything
        if short := self._short(share, job):
            total, staying = short
            raise InputError(
                f"share = {job.share:g}: {share:.1%} of what can be"
                f" cut would have to go, and of {total} parameters {staying} must stay, one group"
                f" and {_channels(job)} of each block; {self._remedy(share, job)}"
            )
        return share

    def _short(self, share: float, job: CutSettings) -> tuple[int, int] | None:
        """Return the first competition that cannot reach a pruning ratio; None if all can.

        The result is its number of parameters, and the number of parameters that must stay.
        """
        sets = zip(self._totals(self.competing(job.selection)), self._staying(job), strict=True)
        return next(
            (
                (total, staying)
                for total, staying in sets
                if share_of(total, share) > total - staying
            ),
            None,
        )

    def _staying(self, job: CutSettings) -> list[int]:
        """Return the number of parameters that must stay, for each competition."""
        competing = self.competing(job.selection)
        # Groups of one pool are adjacent and cost the same, so the first one represents its pool.
        first = torch.ones_like(self.pools, dtype=torch.bool)
        first[1:] = self.pools[1:] != self.pools[:-1]
        least = torch.where(
            self.pools % 2 == 1,
            torch.bincount(self.pools)[self.pools].clamp(max=job.channel_multiple),
            1,
        )
        stay = torch.zeros(int(competing.max()) + 1, dtype=torch.int64)
        return stay.scatter_add_(0, competing[first], (self.costs * least)[first]).tolist()

    def _remedy(self, share: float, job: CutSettings) -> str:
        """Return advice for an unreachable pruning ratio, for an error message.

        It proposes a lower ratio, a wider selection or a smaller multiple of channels, or a
        combination.
        """
        if self._can_go_at_all(job):
            return "lower it"
        wider = {"kind": ("kind", "block", "global"), "block": ("block", "global")}.get(
            job.selection, (job.selection,)
        )
        multiples = dict.fromkeys((job.channel_multiple, 1))
        # Changes that keep the pruning ratio are preferred.
        for of_less in (False, True):
            for multiple, selection in product(multiples, wider):
                changed = job.model_copy(
                    update={"selection": selection, "channel_multiple": multiple}
                )
                if self._can_go_at_all(changed) if of_less else self._short(share, changed) is None:
                    select = [f"set selection to {selection}"] if selection != job.selection else []
                    lower = ["lower channel-multiple"] if multiple != job.channel_multiple else []
                    return " and ".join(
                        [*select, *lower, *(["lower the share"] if of_less else [])]
                    )
        return "nothing can go of some of them, whatever the share"

    def _can_go_at_all(self, job: CutSettings) -> bool:
        """Return whether each competition has parameters that need not stay."""
        totals = self._totals(self.competing(job.selection))
        return all(
            staying < total for total, staying in zip(totals, self._staying(job), strict=True)
        )

    def _totals(self, competing: Tensor) -> list[int]:
        sums = torch.zeros(int(competing.max()) + 1, dtype=torch.int64)
        return sums.scatter_add_(0, competing, self.costs).tolist()


def _keep_a_multiple(cut: NDArray[np.bool_], scores: NDArray, multiple: int) -> None:
    """Change the removed channels so that a multiple of ``multiple`` stays.

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


def _channels(job: CutSettings) -> str:
    """Return the minimum number of channels per block, in words."""
    return (
        f"{job.channel_multiple} channels (channel-multiple)"
        if job.channel_multiple > 1
        else "one channel"
    )

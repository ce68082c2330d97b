"""Messages of FedSpine.

From the second round on, devices are asked what to cut, and adapters have the shapes of the
remaining model.
"""

from functools import cache, cached_property
from typing import Any

from espalier.messages.blobs.group_bits import pack_bits
from espalier.messages.local_baseline import Alone
from espalier.methods.fedpetuning.contract import Order
from espalier.methods.fedspine.contract import STRUCTURE, CutOrder, trained
from espalier.methods.fedspine.settings import FedSpineSettings
from espalier.models.groups import Cut, Groups, to_remove
from espalier.settings.run import RunSettings
from server_app.estimate.exchange import Exchange
from server_app.estimate.messages.adapters import Tuning
from server_app.estimate.uneven_cuts import UnevenCuts
from strategies.fedspine.choice import Choices

AROUND_PART = 1024
ROUND_TRIPS = 2
"""Upper bound on the bytes of a part without blobs and hashes; transfers of a part per round."""


class Refined(Tuning):
    """Messages of FedSpine, with the following cases.

    ``least``: everything is cut as soon as possible, at the lowest rank. ``usual``: the middle of
    the range of choices. ``most``: nothing is cut although it is requested, at the highest rank.

    If the kinds of prunable groups are not fixed, ``least`` cuts those with the largest adapters
    relative to their cost, ``most`` those with the smallest, and ``usual`` some of each.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spine = self.settings.of(FedSpineSettings)
        self.groups = Groups.of(self.model.plan)
        self.choices = Choices(self.settings, self.groups.wanted(self.spine))
        self._cut = cache(self._cut_of)
        self._spine_round = cache(self._round_at)

    @classmethod
    def differs(cls, settings: RunSettings) -> str:
        """Return what the size depends on: the choices of a bandit, and the cut groups."""
        job = settings.of(FedSpineSettings)
        open_ones = []
        if job.chooses:
            open_ones.append(f"ratios and ranks are chosen by {job.allocation}")
        if job.selection != "kind":
            open_ones.append("which groups go depends on the devices' text")
        return "; ".join(open_ones)

    def limit_of(self, client: int, server_round: int) -> int:
        """Return the rank of a device in a round; in its first round it is the usual one."""
        if self._trained_before(client, server_round) == 0 or not (
            self.spine.chooses and self.spine.adaptive_rank
        ):
            return self.spine.usual_rank(self.settings.lora)
        space = self.choices.space
        return {
            "least": space.lowest_rank,
            "usual": space.refinement(0.5, 0.5, 0.0).rank,
            "most": space.highest_rank,
        }[self.case]

    def pruned_by(self, client: int, server_round: int) -> float:
        """Return the pruning ratio that a device is asked for in a round."""
        target = self.choices.target
        if not (self.spine.chooses and self.spine.adaptive_pruning) or self.case == "usual":
            return min(target, self._steps(client, server_round) * target / self.choices.rounds)
        return (
            target if self.case == "least" and self._trained_before(client, server_round) else 0.0
        )

    def _steps(self, client: int, server_round: int) -> int:
        """Return the number of steps of the pruning schedule up to a round.

        A step happens in each round in which the device takes part and has measured its groups
        before.
        """
        rounds = range(self.spine.prune_from, server_round + 1)
        return sum(
            client in self.drawn(number) and self._trained_before(client, number) > 0
            for number in rounds
        )

    def _trained_before(self, client: int, server_round: int) -> int:
        """Return the number of earlier rounds in which a device took part."""
        return sum(client in self.drawn(earlier) for earlier in range(1, server_round))

    def round_of(self, client: int, server_round: int) -> list[Exchange]:
        """Return the question of what to cut, the adapters, and their training."""
        if client not in self.drawn(server_round):
            return []
        before = self._last_asked(client, server_round)
        limit = self.limit_of(client, server_round)
        pruned = self.pruned_by(client, server_round)
        return self._spine_round(server_round, limit, before, pruned)

    def _last_asked(self, client: int, server_round: int) -> float:
        earlier = [number for number in range(1, server_round) if client in self.drawn(number)]
        return self.pruned_by(client, earlier[-1]) if earlier else 0.0

    def _round_at(
        self, server_round: int, limit: int, before: float, pruned: float
    ) -> list[Exchange]:
        if server_round == 1:
            return self._round(server_round, limit)
        bits = self._bits(pruned)
        found = list[Exchange]()
        if self.case == "most" or not self.groups.reaches(self._cut(before), pruned, self.spine):
            found = [
                self.post.exchange(
                    "deliver", server_round, CutOrder(pruned=pruned), self._bits(before)
                )
            ]
        brought = self._adapters(server_round, limit, bits, 1, 1)
        asked = {"rank_limit": limit, "rank": limit}
        return (
            found
            + brought
            + self.post.train(server_round, self.order(server_round, limit), asked, bits, bits)
        )

    def _adapters(
        self, server_round: int, limit: int, bits: dict[str, bytes], first: int, omitted: int
    ) -> list[Exchange]:
        order = Order(rank_limit=limit)
        parts = self.post.num_parts(min(server_round, self.num_rounds), order, bits) - omitted
        return [
            self.post.exchange("deliver", server_round, order, bits, part)
            for part in range(first, first + parts)
        ]

    @property
    def brings_result(self) -> bool:
        """True if devices get the result, which they need for their own models."""
        return self.asked or self.settings.job.makes_alone

    def result_of(self, client: int) -> list[Exchange]:
        """Return the adapters with the shapes of the device's model."""
        if not self.brings_result:
            return []
        bits = self._bits(self._last_asked(client, self.num_rounds + 1))
        return self._adapters(self.num_rounds + 1, self.settings.lora.rank, bits, 0, 0)

    def alone_order(self, client: int) -> Alone | None:
        """Return the order to write the device's model."""
        return Alone() if self.settings.job.makes_alone else None

    def _bits(self, share: float) -> dict[str, bytes]:
        """Return the blob with the cut, which is part of each message."""
        return {STRUCTURE: pack_bits(self._cut(share))}

    def _cut_of(self, share: float) -> Cut:
        """Return a cut with this pruning ratio, from which only shapes are used.

        If the kinds of groups are fixed, the ratio is cut of each kind in each block.
        """
        if share and self.spine.selection != "kind":
            return self._uneven.cut(share, self.case)
        cut = self.groups.none
        for pool, (count, cost) in enumerate(
            zip(self.groups.counts.tolist(), self.groups.pool_costs.tolist(), strict=True)
        ):
            stay = max(1, count - -(-to_remove(cost * count, share) // cost))
            if share and pool % 2:
                stay = max(
                    stay - stay % self.spine.channel_multiple,
                    min(self.spine.channel_multiple, count),
                )
            cut[self.groups.span(range(pool, pool + 1))][stay:] = True
        return cut

    @cached_property
    def _uneven(self) -> UnevenCuts:
        chooses = self.spine.chooses and self.spine.adaptive_rank
        rank = (
            self.choices.space.lowest_rank if chooses else self.spine.usual_rank(self.settings.lora)
        )
        adapters = trained(self.model.plan, self.settings)
        run = self.settings
        parts = self.post.num_parts(1, self.order(1, run.lora.rank))
        around = ROUND_TRIPS * (parts - 1) * (AROUND_PART + len(pack_bits(self.groups.none)))
        return UnevenCuts(self.groups, self.spine, adapters, run.federation.payload, rank, around)

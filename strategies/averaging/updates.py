"""Updates of a round: the adapters that clients trained, compared with those they began with.

Covers: an update of one client of several that is scaled up or has its sign reversed. Also factors
of which one is huge and the other tiny, because each factor is compared with its value before
training. With ``clipped-mean`` it does not cover the direction of an update. A client may send the
opposite of what it learned, scaled up to the limit; a round of eight clients then makes about half
the progress. Does not cover several clients that work together, or rounds of one or two clients.
With ``trimmed-mean`` and ``median`` (``pruning_kernels/trimmed_mean.py``) each number stays between
those of honest clients, if no more clients are bad than values are left out at each end.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from espalier.amounts import count
from espalier.messages.blobs.adapters import read_adapter
from espalier.models.adapters import Adapter, AdapterPlan, cut_to_rank
from espalier.settings.tables.federation import NO_LIMIT, FederationSettings
from pruning_kernels.lora.clipping import clip_factors, root_mean_square
from pruning_kernels.lora.factors import Factors
from pruning_kernels.trimmed_mean import trimmed_mean
from strategies.averaging.adapters import AdapterResult
from strategies.base.inbox import Inbox
from strategies.base.rounds import Rounds

MAX_FACTOR = 1e15
"""Largest factor that is reported; a tensor that was clipped to zero has no finite one."""


class UpdateLimits:
    """Clipping of the updates of one round, and a record of the clipped clients.

    ``max_ratio`` is the maximum size of an update as a multiple of the median
    (``federation.max-update-ratio``).
    """

    def __init__(self, max_ratio: float) -> None:
        self.max_ratio = max_ratio
        self._clipped: dict[int, dict[Any, float]] = {}
        """Factor by which each clipped tensor exceeded the limit, by client."""

    @property
    def off(self) -> bool:
        """True if no client is limited, however large its numbers are."""
        return self.max_ratio >= NO_LIMIT

    def factors(self, place: Any, sizes: Mapping[int, float]) -> dict[int, float]:
        """Return ``clip_factors`` for the norms of a tensor's changes, and record the clipped ones.

        ``place`` names the tensor.
        """
        if self.off:
            return dict.fromkeys(sizes, 1.0)
        factors = clip_factors(sizes, self.max_ratio)
        for client, factor in factors.items():
            if factor < 1:
                self.note(client, place, sizes[client], factor * sizes[client])
        return factors

    def note(self, client: int, place: Any, claimed: float, counted: float) -> None:
        """Record that ``counted`` is used in place of the value that a client sent."""
        # A tensor that was made larger counts as much as one that was made smaller.
        low, high = sorted((claimed, counted))
        self._clipped.setdefault(client, {})[place] = (
            min(high / low, MAX_FACTOR) if low > 0 else MAX_FACTOR
        )

    def tell(self, rounds: Rounds, what: str = "update") -> None:
        """Record the clipped clients on their seats, and show a progress line for each.

        ``what`` is the kind of the limited values, such as ``update`` or ``moments``; ``distance``
        if updates are left out because they are far from the others.
        """
        for client, places in sorted(self._clipped.items()):
            seat = rounds.roster.seats[client]
            factor = max(places.values())
            before = seat.capped.get(what, {})
            # Over all rounds of the run.
            times = before.get("times", 0) + len(places)
            max_factor = max(before.get("factor", 0.0), factor)
            seat.capped[what] = {"factor": max_factor, "times": times}
            text = (
                f"limited      {seat.site}: its {what} in {count(len(places), 'place')}, by a"
                f" factor of up to {factor:.3g}"
            )
            if what == "distance":
                text = (
                    f"left out     {seat.site}: its update is {factor:.3g} times as far from the"
                    " others' as the median client's"
                )
            note = {"factor": factor, "places": len(places)}
            rounds.progress.note("limited", text, client=client, site=seat.site, what=what, **note)
        # The next round begins without a record.
        self._clipped = {}


class Updates:
    """Adapters of a round's clients, one tensor of every client in memory at a time.

    The change of each tensor is limited relative to the median client. Changes are compared by
    their root mean square, because ranks and numbers of rows may differ. All clients began with the
    same factors, so a pair of a huge B and a tiny A is far from them in both factors.

    ``plans`` has the adapters that each client trained, in client order, and ``ranks`` the rank
    that each client reported; ranks beyond it are zero. A factor that a plan does not train has its
    global values.
    """

    def __init__(
        self,
        inbox: Inbox,
        adapters: AdapterResult,
        plans: Mapping[int, AdapterPlan],
        ranks: Mapping[int, int],
        federation: FederationSettings,
        limits: UpdateLimits,
    ) -> None:
        self.clients = list(plans)
        self._inbox = inbox
        self._adapters = adapters
        self._shapes = {client: plan.shapes() for client, plan in plans.items()}
        self._ranks = ranks
        self._federation = federation
        self._limits = limits
        self._key = ""
        self._tensors: Mapping[str, Tensor] = {}

    def leave_out(self, clients: Collection[int]) -> None:
        """Exclude clients from all means."""
        self.clients = [client for client in self.clients if client not in clients]

    def _trained(self, client: int, key: str, name: str) -> Tensor:
        """Return one tensor as a client trained it; ranks that the client removed are zero.

        Differences are added to the round's global adapters before rounding, although clients began
        with rounded ones. So the rounding error of the download only moves the point at which the
        gradient is taken, and is not part of the update.
        """
        shape = self._shapes[client][key][name]
        sent = read_adapter(
            partial(self._inbox.tensor, client, key), name, shape, self._federation.wire_dtype
        )
        return self._begun(client, key, name) + sent if self._federation.sends_differences else sent

    def _begun(self, client: int, key: str, name: str) -> Tensor:
        """Return a client's part of a global tensor; zeros for ranks that the client removed."""
        part = self._adapters.part_for(client, key, {name: self._global(key)[name]})[name]
        shape = self._shapes[client][key][name]
        # Ranks that the client removed began at a value, but it trains and sends zeros.
        return cut_to_rank({name: part[tuple(map(slice, shape))]}, self._ranks[client])[name]

    def _global(self, key: str) -> Mapping[str, Tensor]:
        """Return the global tensors of one blob; only the last one is in memory."""
        if key != self._key:
            self._key = key
            self._tensors = self._adapters.tensors(key)
        return self._tensors

    def _limited(self, key: str, name: str) -> dict[int, Tensor]:
        """Return one tensor as trained by the clients, by client; the rule limits the changes."""
        tensors = {client: self._trained(client, key, name) for client in self.clients}
        if not self._federation.clips:
            return tensors
        sizes = {
            # A root mean square does not grow with the number of entries, so ranks are comparable.
            client: root_mean_square(trained - self._begun(client, key, name))
            for client, trained in tensors.items()
        }
        for client, factor in self._limits.factors((key, name), sizes).items():
            if factor != 1.0:
                initial = self._begun(client, key, name)
                # Shorten the change, keep its direction.
                tensors[client] = initial + factor * (tensors[client] - initial)
        return tensors

    def factors(self, key: str, adapter: Adapter) -> list[Factors]:
        """Return one matrix's adapters as the clients trained them, with limited changes.

        Both factors are trained.
        """
        a = self._limited(key, adapter.name_a)
        b = self._limited(key, adapter.name_b)
        return [Factors(b[client], a[client], adapter.scaling) for client in self.clients]

    def mean(self, key: str, name: str, weights: Mapping[int, float]) -> Tensor:
        """Return the mean of one tensor by the rule, as it is trained: float32.

        The sum is in float64 and in client order.
        """
        # A trimmed mean drops the extreme values of each number.
        if trim := self._federation.trim(len(self.clients)):
            sent = list(self._limited(key, name).values())
            in_order = [weights[client] for client in self.clients]
            return trimmed_mean(sent, in_order, trim).to(torch.float32)
        total = 0.0
        mean = torch.zeros(self._shapes[self.clients[0]][key][name], dtype=torch.float64)
        for client, trained in self._limited(key, name).items():
            mean += trained.to(torch.float64) * weights[client]
            total += weights[client]
        return (mean / total).to(torch.float32)

    def products(self) -> Tensor:
        """Return the inner products of the clients' limited changes: (clients, clients), float64.

        All tensors of a client form one vector.
        """
        products = torch.zeros(len(self.clients), len(self.clients), dtype=torch.float64)
        for key in self._adapters.adapters.shapes():
            for name in self._shapes[self.clients[0]][key]:
                shape = tuple(self._global(key)[name].shape)
                rows = []
                for client, limited in self._limited(key, name).items():
                    change = limited - self._begun(client, key, name)
                    padded = self._adapters.spread(client, key, name, change, shape)
                    rows.append(padded.flatten().to(torch.float64))
                # (clients, numbers of this tensor)
                changes = torch.stack(rows)
                products += changes @ changes.T
        return products

"""Updates of a round: the adapters that clients trained, compared with those they began with."""

from collections.abc import Collection, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from espalier.messages.blobs.adapters import read_adapter, sums
from espalier.models.adapters import Adapter, AdapterPlan, cut_to_rank
from espalier.settings.federation import FederationSettings
from pruning_kernels.lora.clipping import root_mean_square
from pruning_kernels.lora.factors import Factors
from strategies.averaging.adapters import AdapterResult
from strategies.averaging.update_limits import UpdateLimits
from strategies.base.inbox import Inbox


class Updates:
    """Adapters of a round's clients, one tensor or matrix at a time.

    The change of each tensor is limited relative to the median client. Changes are compared by
    their root mean square, because ranks and numbers of rows may differ. All clients began with the
    same factors, so a pair of a huge B and a tiny A is far from them in both factors.

    Parameters
    ----------
    inbox : complete replies of the clients
    adapters : global adapters of the round
    plans : adapters that each client trained, in client order
    ranks : rank that each client reported; ranks beyond it are zero
    federation : form of the replies
    limits : limits on the changes, and the record of the limited clients
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

    # ----- one tensor of one client ---------------------------------------------------------------

    def sent(self, client: int, key: str, name: str) -> Tensor:
        """Return one tensor as a client sent it: float32."""
        read = partial(self._inbox.tensor, client, key)
        shape = self._shapes[client][key][name]
        return read_adapter(read, name, shape, self._federation.wire_dtype)

    def trained(self, client: int, key: str, name: str) -> Tensor:
        """Return one tensor as a client trained it; ranks that the client removed are zero.

        Differences are added to the round's global adapters before rounding, although clients began
        with rounded ones. So the rounding error of the download only moves the point at which the
        gradient is taken, and is not part of the update.
        """
        sent = self.sent(client, key, name)
        if not self._federation.sends_differences:
            return sent
        return sums({name: self.begun(client, key, name)}, {name: sent})[name]

    def begun(self, client: int, key: str, name: str) -> Tensor:
        """Return a client's part of a global tensor; zeros for ranks that the client removed."""
        own = self._adapters.part_for(client, key, {name: self._global(key)[name]})[name]
        shape = self._shapes[client][key][name]
        return cut_to_rank({name: own[tuple(map(slice, shape))]}, self._ranks[client])[name]

    def _global(self, key: str) -> Mapping[str, Tensor]:
        """Return the global tensors of one blob; only the last one is in memory."""
        if key != self._key:
            self._key = key
            self._tensors = self._adapters.tensors(key)
        return self._tensors

    # ----- limited changes ------------------------------------------------------------------------

    def _limiting(self, key: str, names: Iterable[str]) -> dict[str, dict[int, float]]:
        """Return the factors that limit the clients' changes of tensors, by name and client."""
        return {
            name: self._limits.factors(
                (key, name),
                {
                    client: root_mean_square(
                        self.trained(client, key, name) - self.begun(client, key, name)
                    )
                    for client in self.clients
                },
            )
            for name in names
        }

    def _limited(self, client: int, key: str, name: str, factor: float) -> Tensor:
        """Return one tensor as a client trained it; a ``factor`` below 1 reduces its change."""
        trained = self.trained(client, key, name)
        if factor == 1.0:
            return trained
        begun = self.begun(client, key, name)
        return begun + factor * (trained - begun)

    def factors(self, key: str, adapter: Adapter) -> list[Factors]:
        """Return one matrix's adapters as the clients trained them, with limited changes."""
        limiting = self._limiting(key, (adapter.name_a, adapter.name_b))
        found = []
        for client in self.clients:
            a, b = (
                self._limited(client, key, name, factors[client])
                for name, factors in limiting.items()
            )
            found.append(Factors(b, a, adapter.scaling))
        return found

    def mean(self, key: str, name: str, weights: Mapping[int, float]) -> Tensor:
        """Return the mean of one tensor that is trained without LoRA: float32.

        The sum is in float64 and in client order.
        """
        factors = self._limiting(key, [name])[name]
        total = 0.0
        mean = torch.zeros(self._shapes[self.clients[0]][key][name], dtype=torch.float64)
        for client in self.clients:
            trained = self._limited(client, key, name, factors[client])
            mean += trained.to(torch.float64) * weights[client]
            total += weights[client]
        return (mean / total).to(torch.float32)

    def products(self) -> Tensor:
        """Return the inner products of the clients' limited changes: (clients, clients), float64.

        All tensors of a client form one vector.
        """
        products = torch.zeros(len(self.clients), len(self.clients), dtype=torch.float64)
        for key in self._adapters.adapters.shapes():
            for name, factors in self._limiting(key, self._shapes[self.clients[0]][key]).items():
                rows = []
                for client in self.clients:
                    limited = self._limited(client, key, name, factors[client])
                    change = limited - self.begun(client, key, name)
                    shape = tuple(self._global(key)[name].shape)
                    whole = self._adapters.spread(client, key, name, change, shape)
                    rows.append(whole.flatten().to(torch.float64))
                changes = torch.stack(rows)
                products += changes @ changes.T
        return products

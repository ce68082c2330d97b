"""Unmasking of a secure sum: secrets of clients, and the sums of all tensors.

Clients in the sum tell the seed of their own mask themselves. Seeds of those that do not, and mask
keys of clients that dropped out, are put together from shares, which takes longer.

Covers: a share that is not the one its owner published is not used, and its sender is dropped. A
secret that does not fit its owner's public key or hash ends the run with an error that names the
site; no wrong sum is used.
Does not cover: wrong summands of a client, which nobody sees.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from espalier.messages.message import validate
from espalier.messages.sums.masked_summands import apply_mask, places_in_mask
from espalier.messages.sums.secure_sum import Shares, Unmask
from espalier.messages.sums.summands import Numbers, SumSpecs, unpack
from espalier.messages.sums.summed_weights import WEIGHT, most_weight
from espalier.messages.tensor_blobs import views
from espalier.secure_sum.keys import (
    Session,
    mask_key,
    own_mask_key,
    private_key,
    public_bytes,
)
from espalier.secure_sum.sharing import fingerprint, rebuilt
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.bounded_fixed_point import Scale
from strategies.base.rounds import Rounds, RunFailed
from strategies.base.sums.masked_sums import MaskedSum


class Sums:
    """Sums of the summands of several clients, unmasked tensor by tensor."""

    def __init__(
        self,
        specs: SumSpecs,
        totals: Mapping[str, str],
        store: BlobStore,
        removals: Sequence[tuple[bytes, bool]] = (),
    ) -> None:
        self._specs = specs
        self._totals = totals
        self._store = store
        self._removals = removals
        """Key of each mask that is still in the sums, and True if it is subtracted to remove it."""
        self._places = places_in_mask(specs)

    def tensor(self, key: str, name: str) -> Numbers:
        """Return the sum of one tensor as ``unpack`` returns it."""
        spec = self._specs[key][name]
        # A copy, because masks are removed in place.
        words = np.array(views(self._store.get(self._totals[key]))[name])
        for mask, subtracts in self._removals:
            apply_mask(words, spec, mask, self._places[key, name], subtracts=subtracts)
        return unpack(words, spec)

    def numbers(self, key: str, name: str, scale: Scale) -> Tensor:
        """Return the sum of one tensor in fixed point, flat, float64."""
        return scale.numbers(self.tensor(key, name), self._specs[key][name].bits)

    def mean(self, key: str, name: str, scale: Scale, total: int) -> Tensor:
        """Return the sum of one tensor, divided by the clients' total weight, flat, float64."""
        return scale.mean(self.tensor(key, name), self._specs[key][name].bits, total)

    def total_weight(self, run: RunSettings, clients: Collection[int]) -> int:
        """Return the sum of the clients' weights: that of their samples, or their number."""
        # With weights of 1 the sum of weights is the number of clients.
        if most_weight(run) == 1:
            return len(clients)
        # No honest client has the weight 0.
        return max(1, int(self.tensor(WEIGHT, WEIGHT)[0]))


class Unmasking:
    """Secrets of a masked sum, from the clients' answers."""

    def __init__(self, masked: MaskedSum, rounds: Rounds) -> None:
        self.masked = masked
        self.rounds = rounds
        # Keys are derived for this session only.
        self.session = Session(rounds.lineage, masked.server_round, masked.keys.session)
        self._told: dict[int, bytes] = {}
        """Seeds of own masks, by the client that revealed its own."""
        self._seeds: dict[int, dict[int, bytes]] = {}
        self._keys: dict[int, dict[int, bytes]] = {}
        """Shares of each client's two secrets, by holder."""

    def take(self, holder: int, answer: Mapping[str, Any]) -> None:
        """Record a holder's seed and shares; drop it if they are not those that were published."""
        order = self.masked.request(holder, {})
        unmask = validate(Unmask, answer)
        seat = self.rounds.roster.seats[holder]
        # Every client in the sum tells its own seed; the hash was published before the sum was
        # known.
        own_seed = bytes.fromhex(unmask.own_seed)
        if fingerprint(own_seed) != self.masked.shared[str(holder)]["own_sha256"]:
            self.rounds.drop("unmask", seat, "the seed of its mask is not the one that it chose")
            return
        seed_pairs = zip(order.seeds_of, unmask.seeds, strict=True)
        key_pairs = zip(order.keys_of, unmask.keys, strict=True)
        # Nothing of a holder is used before all of its shares are checked.
        good: list[tuple[dict[int, dict[int, bytes]], int, bytes]] = []
        for shares, pairs, kind in (
            (self._seeds, seed_pairs, "seed_sha256"),
            (self._keys, key_pairs, "key_sha256"),
        ):
            for owner, text in pairs:
                share = bytes.fromhex(text)
                # An empty share means that the holder could not read it.
                if share and fingerprint(share) != self._published(owner, holder, kind):
                    self.rounds.drop("unmask", seat, "a share is not the one that its owner made")
                    return
                if share:
                    good.append((shares, owner, share))
        self._told[holder] = own_seed
        for shares, owner, share in good:
            shares.setdefault(owner, {})[holder] = share

    def _published(self, owner: int, holder: int, kind: str) -> str:
        place = self.masked.holders(owner).index(holder)
        digest: str = self.masked.shared[str(owner)][kind][place]
        return digest

    def removals(self) -> list[tuple[bytes, bool]]:
        """Return the key of each mask in the sum, and True if it is subtracted to remove it.

        Raises RunFailed if too few shares arrived, or a secret is not that of its owner.
        """
        return [*self._own_masks(), *self._masks_with_dropped()]

    def _own_masks(self) -> Iterator[tuple[bytes, bool]]:
        for client in self.masked.included:
            # Told by its owner, or put together from shares if the owner failed.
            seed = self._told.get(client) or self._rebuilt(self._seeds, client)
            # The client may have shared another secret than it used; then no sum is better than a
            # wrong one.
            if fingerprint(seed) != self.masked.shared[str(client)]["own_sha256"]:
                raise self._wrong(client)
            yield own_mask_key(seed, self.session, client), True

    def _masks_with_dropped(self) -> Iterator[tuple[bytes, bool]]:
        """Yield the common masks of each dropped client and its neighbours in the sum."""
        public = dict(zip(self.masked.keys.clients, self.masked.keys.mask_keys, strict=True))
        for client in self.masked.dropped:
            others = [
                neighbour
                for neighbour in self.masked.graph[client]
                if neighbour in self.masked.included
            ]
            # All neighbours dropped out too, so none of its masks is in the sum.
            if not others:
                continue
            private = private_key(self._rebuilt(self._keys, client), self.session, "mask")
            # The rebuilt private key must belong to the public key that was used for the masks.
            if public_bytes(private) != public[client]:
                raise self._wrong(client)
            for other in others:
                # The neighbour added the mask if the dropped client has the larger number.
                key = mask_key(private, public[other], self.session, client, other)
                yield key, other < client

    def _rebuilt(self, all_shares: Mapping[int, Mapping[int, bytes]], client: int) -> bytes:
        shares = all_shares.get(client, {})
        needed = self.masked.keys.neighbourhood.threshold
        if len(shares) < needed:
            raise RunFailed(
                f"secure sum of round {self.masked.server_round}: {len(shares)} shares of a secret"
                f" of {self._site(client)} arrived, {needed} are needed; the sum stays masked;"
                f" resume the run when the sites answer again{self.rounds.reasons()}"
            )
        return rebuilt(shares, needed, self.masked.holders(client))

    def _wrong(self, client: int) -> RunFailed:
        return RunFailed(
            f"secure sum of round {self.masked.server_round}: the shares that"
            f" {self._site(client)} made do not fit its keys; the sum stays masked; start a new"
            " run without this site"
        )

    def _site(self, client: int) -> str:
        return self.rounds.roster.seats[client].site


def published(shares: Shares) -> dict[str, Any]:
    """Return the hashes of a reply with shares, without the encrypted shares."""
    return shares.model_dump(exclude={"shares"})

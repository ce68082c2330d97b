"""A client in a session of a secure sum: its secrets, neighbours, shares and tags."""

from collections.abc import Mapping
from typing import Any

from espalier.errors import InputError
from espalier.messages.message import Header, validate
from espalier.messages.sums.secure_sum import MaskOrder, ShareOrder, Shares, Unmask, UnmaskOrder
from espalier.secure_sum.confirmation import ListOfSum
from espalier.secure_sum.keys import (
    SEED_BYTES,
    Route,
    Session,
    UnreadableError,
    mask_key,
    opened_shares,
    own_mask_key,
    private_key,
    sealed_shares,
)
from espalier.secure_sum.neighbours import neighbours
from espalier.secure_sum.sharing import fingerprint, shared


class Party:
    """One client in a session whose keys are known: its neighbours, secrets and shares."""

    def __init__(self, header: Header, kept: Mapping[str, Any]) -> None:
        self.client = header.client
        self.kept = kept
        self.session = Session(header.lineage, header.server_round, kept["session"])
        self.order = validate(ShareOrder, kept["order"])
        # It is part of every message between clients. A server that gives the other clients another
        # order, so that it knows their summands, gets no sum.
        self.list_sha256 = self.order.list_sha256(kept["inputs"])
        self.neighbourhood = self.order.neighbourhood
        # Computed here, and not sent by the server, which could choose the neighbours.
        graph = neighbours(self.order.keys(), self.neighbourhood.degree)
        self.neighbours = graph[self.client]
        self.mask_keys = dict(zip(self.order.clients, self.order.mask_keys, strict=True))
        self.share_keys = dict(zip(self.order.clients, self.order.share_keys, strict=True))

    def among(self, clients: list[int]) -> list[int]:
        """Return the neighbours that are among ``clients``, ascending."""
        return [other for other in self.neighbours if other in set(clients)]

    def split_secrets(self) -> tuple[Shares, list[str]]:
        """Return the shares of both secrets, and the two shares that this client holds itself."""
        # The client holds a share of its own secrets, too.
        holders = sorted([*self.neighbours, self.client])
        threshold = self.neighbourhood.threshold
        seeds = shared(self._secret("own"), threshold, holders)
        keys = shared(self._secret("mask"), threshold, holders)
        # Shares are encrypted for each neighbour; the server only forwards them.
        private = private_key(self._secret("share"), self.session, "share")
        sealed = [
            sealed_shares(
                private,
                self.share_keys[other],
                self.session,
                self._route_to(other),
                seeds[other] + keys[other],
            )
            for other in self.neighbours
        ]
        shares = Shares(
            shares=sealed,
            seed_sha256=[fingerprint(seeds[holder]) for holder in holders],
            key_sha256=[fingerprint(keys[holder]) for holder in holders],
            # The hash binds the client to this seed before the sum is known.
            own_sha256=fingerprint(self._secret("own")),
        )
        return shares, [seeds[self.client].hex(), keys[self.client].hex()]

    def received_shares(self, order: MaskOrder) -> tuple[dict[str, list[str]], list[int]]:
        """Return the shares of the neighbours' secrets, and the neighbours without usable ones."""
        private = private_key(self._secret("share"), self.session, "share")
        received = {}
        unreadable = []
        for place, other in enumerate(order.sources):
            try:
                both = opened_shares(
                    private,
                    self.share_keys[other],
                    self.session,
                    Route(other, self.client, self.list_sha256),
                    order.shares[place],
                )
            except UnreadableError:
                # A neighbour's fault must not stop this client.
                unreadable.append(other)
                continue
            seed = both[:SEED_BYTES]
            key = both[SEED_BYTES:]
            # The owner published hashes, so a wrong share is found before it is needed.
            published = (order.seed_sha256[place], order.key_sha256[place])
            if (fingerprint(seed), fingerprint(key)) != published:
                unreadable.append(other)
                continue
            received[str(other)] = [seed.hex(), key.hex()]
        return received, unreadable

    def pair_keys(self) -> dict[int, bytes]:
        """Return the key of the common mask with each neighbour among the members."""
        private = private_key(self._secret("mask"), self.session, "mask")
        return {
            other: mask_key(private, self.mask_keys[other], self.session, self.client, other)
            for other in self.among(self.kept["members"])
        }

    def own_key(self) -> bytes:
        """Return the key of this client's own mask."""
        return own_mask_key(self._secret("own"), self.session, self.client)

    def require_members(self, members: list[int]) -> None:
        """Check the clients that sent shares: known ones, this one too, and enough of them."""
        # This client sends summands only to a sum that it is part of.
        if not set(members) <= set(self.order.clients) or self.client not in members:
            raise InputError("masked: the members are not clients of this session")
        if len(members) < self.order.threshold:
            raise InputError(
                f"masked: {len(members)} members, the sum needs {self.order.threshold}"
            )

    def require_included(self, included: list[int]) -> None:
        """Check the clients in the sum: members, and enough of them."""
        # Two lists of at least the threshold overlap in an honest client, which confirms only one.
        if not set(included) <= set(self.kept["members"]) or len(included) < self.order.threshold:
            raise InputError(
                f"confirm: the sum of {len(included)} clients; it needs {self.order.threshold} of"
                " those that sent shares"
            )

    def tags(self) -> list[str]:
        """Return a tag of the list of the sum for each other client in it."""
        private = private_key(self._secret("share"), self.session, "share")
        return [
            self._list.tag(private, self.share_keys[other], self.session, self._route_to(other))
            for other in self.kept["included"]
            if other != self.client
        ]

    def require_confirmed(self, order: UnmaskOrder) -> None:
        """Check that enough clients confirmed the list of the sum; this client is one of them.

        A wrong tag counts as none, so that one client cannot end the round by it.
        """
        private = private_key(self._secret("share"), self.session, "share")
        # This client's own confirmation counts.
        confirmed = 1 + sum(
            self._list.is_confirmed(
                private,
                self.share_keys[other],
                self.session,
                Route(other, self.client, self.list_sha256),
                tag,
            )
            for other, tag in zip(order.confirmed, order.tags, strict=True)
        )
        if confirmed < self.order.threshold:
            raise InputError(
                f"unmask: {confirmed} clients confirmed the list of the sum;"
                f" {self.order.threshold} are needed"
            )

    @property
    def _list(self) -> ListOfSum:
        return ListOfSum(self.kept["members"], self.kept["included"])

    def _route_to(self, other: int) -> Route:
        return Route(self.client, other, self.list_sha256)

    def require_same_list(self, order: UnmaskOrder) -> None:
        """Check that the confirmed sum is to be unmasked, with one kind of share per member."""
        if order.included != self.kept["included"]:
            raise InputError(
                "unmask: the list of clients differs from the one that this client confirmed"
            )
        members = set(self.kept["members"])
        included = set(order.included)
        holds = sorted([*self.neighbours, self.client])
        # One secret per client: seed and mask key together would show its tensors.
        seeds_of = [other for other in holds if other in included]
        keys_of = [other for other in self.neighbours if other in members - included]
        if (order.seeds_of, order.keys_of) != (seeds_of, keys_of):
            raise InputError("unmask: asks for other shares than those of this client's neighbours")

    def shares_of(self, order: UnmaskOrder) -> Unmask:
        """Return the seed of the own mask, and the shares that the server needs.

        A share is empty if that of the neighbour was unreadable.
        """
        # The own shares are held like those of the neighbours.
        shares = {**self.kept["received"], str(self.client): self.kept["own_shares"]}
        nothing = ("", "")
        return Unmask(
            own_seed=self._secret("own").hex(),
            seeds=[shares.get(str(other), nothing)[0] for other in order.seeds_of],
            keys=[shares.get(str(other), nothing)[1] for other in order.keys_of],
        )

    def _secret(self, name: str) -> bytes:
        return bytes.fromhex(self.kept["secrets"][name])

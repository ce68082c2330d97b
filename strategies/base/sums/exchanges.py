"""Server's side of secure sums: keys, shares and masked summands of one round, and unmasking.

Covers: a client that fails in any of the exchanges. If its masked summands are complete, they
count; otherwise the sum is that of the others. Fewer clients than the threshold end the run before
anything is unmasked. A client whose shares its neighbours cannot read is dropped, and the others
make new keys. The order of arrival has no effect.
Does not cover: wrong summands, wrong counts and impossible values of a client. Checks of single
replies are not possible.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import numpy as np

from espalier.amounts import count
from espalier.identity.site_keys import PublicKeys
from espalier.messages.message import MessageBody, validate
from espalier.messages.signed_name import is_signed
from espalier.messages.sums.secure_sum import (
    ConfirmOrder,
    MaskOrder,
    SessionOrder,
    ShareOrder,
    Shares,
    key_statement,
    summand_specs,
)
from espalier.messages.sums.summands import SumSpecs, Words, add_to
from espalier.messages.tensor_blobs import pack_tensors
from espalier.secure_sum.keys import is_usable
from espalier.secure_sum.neighbours import neighbours, two_thirds
from espalier.settings.combinations import MIN_SUM_CLIENTS
from espalier.settings.run import RunSettings
from espalier.settings.tables.noise_share import NoiseShare
from espalier.storage.blobs import BlobStore
from strategies.base.inbox import Inbox
from strategies.base.rounds import Reply, Request, Rounds, RunFailed
from strategies.base.sums.masked_sums import MaskedSum
from strategies.base.sums.unmasking import Sums, Unmasking, published

SESSION_BYTES = 16
RESTARTS = 3
"""Maximum number of sessions of a round in which no client is dropped but too few shares are left.

With a graph of neighbours this is improbable; with all clients as neighbours it does not happen.
"""

Advertise = Callable[[str], Iterable[MessageBody]]
"""Function that asks for keys of a session, and yields the replies."""


def least_of_sum(run: RunSettings) -> int:
    """Return the minimum number of clients in a sum; with shared noise it has enough of it then."""
    fraction = run.privacy.honest_fraction
    return NoiseShare(run.num_clients, fraction).least_of_sum if fraction else MIN_SUM_CLIENTS


@dataclass
class OpenSession:
    """Keys, shares and masked summands of one session, as they arrive."""

    order: ShareOrder
    graph: dict[int, list[int]]
    shares: dict[int, Shares] = field(default_factory=dict)
    unreadable: dict[int, list[int]] = field(default_factory=dict)
    """Neighbours whose shares a client could not read, by client."""

    @property
    def members(self) -> list[int]:
        """Clients that sent shares, ascending."""
        return sorted(self.shares)

    def request(self, client: int) -> MaskOrder:
        """Return the request for the masked summands of a member."""
        # Members that did not send shares have no mask with this client.
        sources = [other for other in self.graph[client] if other in self.shares]
        sealed = []
        seeds = []
        keys = []
        for other in sources:
            # Same order as in the owner's reply: its neighbours, and for hashes also itself.
            holders = sorted([*self.graph[other], other])
            sealed.append(self.shares[other].shares[self.graph[other].index(client)])
            seeds.append(self.shares[other].seed_sha256[holders.index(client)])
            keys.append(self.shares[other].key_sha256[holders.index(client)])
        return MaskOrder(
            session=self.order.session,
            members=self.members,
            sources=sources,
            shares=sealed,
            seed_sha256=seeds,
            key_sha256=keys,
        )

    def readers(self, owner: int, included: list[int]) -> list[int]:
        """Return the clients in the sum that hold usable shares of a member."""
        # The owner keeps a share of its own secrets.
        holders = [*self.graph[owner], owner]
        return [
            client
            for client in holders
            if client in included and owner not in self.unreadable.get(client, ())
        ]


class SecureSum:
    """Exchanges of the secure sums of a run."""

    def __init__(self, rounds: Rounds, store: BlobStore, site_keys: PublicKeys | None) -> None:
        self.rounds = rounds
        self.store = store
        self.site_keys = site_keys

    # ----- until the masked sum is complete -------------------------------------------------------

    def masked_sum(
        self, server_round: int, advertise: Advertise, quorum_of: int | None
    ) -> MaskedSum:
        """Let the clients make keys and send their masked summands, and return the masked sum.

        Raises RunFailed if too few clients finished one of the steps; nothing is unmasked then.
        """
        restarts = 0
        # Each pass is a new session with new keys.
        while True:
            session, reports = self._session(server_round, advertise, quorum_of)
            inbox = self._inbox()
            self._receive_masked(server_round, session, inbox)
            # 1. Clients whose masked summands are complete are in the sum; from here on this is
            # fixed.
            included = inbox.complete_clients()
            self._require(server_round, len(included), session.order, "sent masked sums")
            self.rounds.require_quorum(len(included), "sent masked sums", quorum_of)
            needed = session.order.neighbourhood.threshold
            # 2. No secret is asked for before it is sure that all of them can be rebuilt.
            unrecoverable = [
                owner for owner in session.members if len(session.readers(owner, included)) < needed
            ]
            if not unrecoverable:
                # 3. Add while everything is still masked, and free the disk.
                totals = self._totals(server_round, inbox, included)
                inbox.clear()
                return MaskedSum(
                    server_round,
                    session.order.model_dump(),
                    session.members,
                    {str(client): published(shares) for client, shares in session.shares.items()},
                    included,
                    {str(client): reports[client] for client in included},
                    totals,
                )
            # 4. Otherwise drop the clients whose shares cannot be read, and try again.
            # With nobody to drop, the next session may fail in the same way.
            if not self._drop_unreadable(session, unrecoverable):
                restarts += 1
            if restarts > RESTARTS:
                raise RunFailed(
                    f"secure sum of round {server_round}: too few clients hold the shares of"
                    f" {count(len(unrecoverable), 'client')}; nothing was unmasked"
                    f"{self.rounds.reasons()}"
                )

    def _session(
        self, server_round: int, advertise: Advertise, quorum_of: int | None
    ) -> tuple[OpenSession, dict[int, dict[str, Any]]]:
        """Return a new session with the shares of its members, and the clients' reports."""
        # A random name, so that messages of an earlier session cannot be mixed with this one.
        number = token_hex(SESSION_BYTES)
        reports = {}
        # 1. Public keys of each client, with the report of its work.
        for body in advertise(number):
            if self._has_good_keys(body, number):
                reports[body.header.client] = body.fields
        self._drop_equal_keys(reports)
        self.rounds.require_quorum(len(reports), "sent their keys", quorum_of)
        if len(reports) < (min_clients := least_of_sum(self.rounds.settings)):
            raise RunFailed(
                f"secure sum of round {server_round}: {count(len(reports), 'client')} sent keys, a"
                f" sum needs {min_clients}; nothing was unmasked{self.rounds.reasons()}"
            )
        # 2. All clients get the same list of keys, and derive the same graph of neighbours from it.
        order = self._order(number, reports)
        session = OpenSession(order, neighbours(order.keys(), order.neighbourhood.degree))
        requests = (
            self.rounds.request("shares", client, server_round, order) for client in order.clients
        )
        # 3. Shares of each client's secrets, encrypted for its neighbours.
        for body in self.rounds.exchange(requests):
            session.shares[body.header.client] = validate(Shares, body.fields)
        self._require(server_round, len(session.members), order, "sent shares")
        return session, reports

    def _order(self, number: str, reports: Mapping[int, Mapping[str, Any]]) -> ShareOrder:
        clients = sorted(reports)
        # Each of these alone must be met: two thirds for security, the quorum, and the noise.
        quorum = self.rounds.quorum_of(len(clients))
        min_clients = least_of_sum(self.rounds.settings)
        return ShareOrder(
            session=number,
            threshold=max(two_thirds(len(clients)), quorum, min_clients),
            clients=clients,
            sites=[self._site(client) for client in clients],
            mask_keys=[reports[client]["mask_key"] for client in clients],
            share_keys=[reports[client]["share_key"] for client in clients],
            signatures=[reports[client]["signature"] for client in clients],
        )

    def _site(self, client: int) -> str:
        return self.rounds.roster.seats[client].site

    def _has_good_keys(self, body: MessageBody, number: str) -> bool:
        """Return True if the others can use a client's keys; drop the client otherwise."""
        seat = self.rounds.roster.seats[body.header.client]
        # Weak points of the curve would make the common secret predictable.
        keys = [body.fields["mask_key"], body.fields["share_key"]]
        fault = "" if all(map(is_usable, keys)) else "its public keys are not usable"
        if keys[0] == keys[1]:
            fault = "its two public keys are equal"
        # Without signatures the server could exchange the keys for its own.
        if self.site_keys is not None:
            header = body.header
            text = key_statement(
                header.lineage, header.server_round, number, header.client, seat.site, keys
            )
            key = self.site_keys.get(seat.site)
            if key is None or not is_signed(key, text, body.fields["signature"]):
                fault = "its public keys are not signed with its site's key"
        if fault:
            self.rounds.drop("train", seat, fault)
        return not fault

    def _drop_equal_keys(self, reports: dict[int, dict[str, Any]]) -> None:
        """Drop all clients of which another one has a key: they share it, and no sum may have it.

        No client sees the keys of the others before all have sent theirs.
        """
        holders = defaultdict[str, list[int]](list)
        for client, fields in sorted(reports.items()):
            for name in ("mask_key", "share_key"):
                holders[fields[name]].append(client)
        shared = (clients for clients in holders.values() if len(clients) > 1)
        for client in sorted(set().union(*shared)):
            del reports[client]
            fault = "another client has one of its public keys"
            self.rounds.drop("train", self.rounds.roster.seats[client], fault)

    def _receive_masked(self, server_round: int, session: OpenSession, inbox: Inbox) -> None:
        """Store the masked summands of all members, part by part."""

        def following(body: Reply | Request) -> Request | None:
            header = body.header
            place = header.part + 1
            fields = SessionOrder(session=session.order.session)
            return (
                self.rounds.request("masked", header.client, server_round, fields, part=place)
                if place < num_parts
                else None
            )

        requests = [
            self.rounds.request("masked", client, server_round, session.request(client))
            for client in session.members
        ]
        num_parts = requests[0].contract.num_parts
        for body in inbox.receive(self.rounds.exchange(requests, following)):
            # Part 0 says which neighbours' shares the client could not read.
            header = body.header
            if header.part == 0:
                session.unreadable[header.client] = body.fields["unreadable"]
            if header.part + 1 == header.num_parts:
                seat = self.rounds.roster.seats[header.client]
                self.rounds.progress.step("masked", f"{seat.site}: masked", client=seat.client)

    def _drop_unreadable(self, session: OpenSession, owners: list[int]) -> bool:
        """Drop the clients whose shares others could not read; return True if there are any."""
        dropped = False
        # Owners with enough readers stay, so a false claim drops an owner only if other clients
        # failed too. Who is right cannot be told apart without revealing a share.
        for owner in owners:
            readers = [reader for reader, names in session.unreadable.items() if owner in names]
            if readers:
                seat = self.rounds.roster.seats[owner]
                why = f"{count(len(readers), 'client')} could not read the shares that it sent"
                self.rounds.drop("shares", seat, why)
                dropped = True
        return dropped

    def _require(self, server_round: int, number: int, order: ShareOrder, what: str) -> None:
        """Raise RunFailed if fewer clients than the threshold finished a step."""
        if number < order.threshold:
            raise RunFailed(
                f"secure sum of round {server_round}: {count(number, 'client')} {what},"
                f" {order.threshold} of {len(order.clients)} are needed; nothing was"
                f" unmasked{self.rounds.reasons()}"
            )

    def _totals(self, server_round: int, inbox: Inbox, included: list[int]) -> dict[str, str]:
        """Add the masked summands, and return the hash of the stored sums by blob key."""
        totals = {}
        # One tensor of one client in memory at a time.
        for key, tensors in self._specs(server_round).items():
            sums: dict[str, Words] = {}
            for name, spec in tensors.items():
                # Sums modulo 2^64, so the order of the clients has no effect.
                total = np.zeros(spec.num_words, np.uint64)
                for client in included:
                    add_to(total, inbox.tensor(client, key, name).numpy(), spec)
                sums[name] = total
            totals[key] = self.store.put(pack_tensors(sums))
        return totals

    def _specs(self, server_round: int) -> SumSpecs:
        return summand_specs(server_round, self.rounds.plan, self.rounds.settings)

    def _inbox(self) -> Inbox:
        return Inbox(self.rounds.folder.inbox)

    # ----- unmasking ------------------------------------------------------------------------------

    def unmask(self, masked: MaskedSum) -> Sums:
        """Ask the clients in the sum for their secrets, and return the unmasked sums.

        Each confirms the list of these clients to the others before.

        Raises RunFailed if too few answer; the run can then be resumed.
        """
        unmasking = Unmasking(masked, self.rounds)
        # 1. All clients in the sum confirm one list, so that the server cannot unmask two different
        # sums.
        answers = self._answers(masked, self._confirmed(masked))
        # 2. Their answers have the secrets of exactly this list.
        # Sorted, so that the result and errors do not depend on the order of arrival.
        for holder, answer in sorted(answers):
            unmasking.take(holder, answer)
        # 3. Masks are removed only when every secret is known and checked.
        removals = unmasking.removals()
        return Sums(self._specs(masked.server_round), masked.totals, self.store, removals)

    def _confirmed(self, masked: MaskedSum) -> dict[int, dict[int, str]]:
        """Return the tags for each client that confirmed the list of the sum, by their senders."""
        order = ConfirmOrder(session=masked.keys.session, included=masked.included)
        requests = [
            self.rounds.request("confirm", seat.client, masked.server_round, order)
            for seat in self.rounds.roster.active()
            if seat.client in masked.included
        ]
        sent: dict[int, dict[int, str]] = {}
        for body in self.rounds.exchange(requests):
            sender = body.header.client
            # The tags are in the order of the other clients.
            others = [client for client in masked.included if client != sender]
            sent[sender] = dict(zip(others, body.fields["tags"], strict=True))
        needed = masked.keys.threshold
        if len(sent) < needed:
            raise RunFailed(
                f"secure sum of round {masked.server_round}: {count(len(sent), 'client')} confirmed"
                f" who is in the sum, {needed} are needed; the sum stays masked; resume the run"
                f" when the sites answer again{self.rounds.reasons()}"
            )
        return {
            # Each client gets the tags that the others made for it.
            receiver: {
                sender: tags[receiver] for sender, tags in sent.items() if sender != receiver
            }
            for receiver in sorted(sent)
        }

    def _answers(
        self, masked: MaskedSum, confirmed: Mapping[int, Mapping[int, str]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        requests = [
            self.rounds.request("unmask", holder, masked.server_round, masked.request(holder, tags))
            for holder, tags in confirmed.items()
        ]
        for body in self.rounds.exchange(requests):
            yield body.header.client, body.fields

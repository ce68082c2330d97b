"""Runs whose server folds the plain sum of the clients' summands in place of their replies.

Clients make their summands of the blobs that they stored. They are packed, added modulo 2^bits in
the order in which ``clients`` are asked for them, and unpacked. The server's fold never sees a reply.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench import Bench

from client_app.site import Site
from espalier.messages.message import MessageBody
from espalier.messages.summands import Numbers, SumSpecs, add_to, pack, unpack
from espalier.settings.methods import METHODS, part
from strategies.base.inbox import Inbox
from strategies.base.method import Method

Summands = dict[str, dict[str, Numbers]]


@dataclass
class AddedSums:
    """Sum of some clients' summands."""

    specs: SumSpecs
    replies: Sequence[Summands]

    def tensor(self, key: str, name: str) -> Numbers:
        spec = self.specs[key][name]
        total = np.zeros(spec.num_words, np.uint64)
        for reply in self.replies:
            add_to(total, pack(reply[key][name], spec), spec)
        return unpack(total, spec)


@dataclass
class SummedRuns:
    """Bench whose clients make summands, and whose server folds their sum if ``folds`` is set."""

    bench: Bench
    folds: bool = True
    order: Callable[[list[int]], list[int]] = lambda clients: clients
    spoil: Callable[[int, Summands], Summands] = lambda client, found: found
    made: dict[tuple[int, int], Summands] = field(default_factory=dict)
    """Summands by round and client."""
    specs: dict[int, SumSpecs] = field(default_factory=dict)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> "SummedRuns":
        row = METHODS[self.bench.method]
        job = part(row.job)
        train = job.train
        strategy = part(row.strategy)
        fold = strategy.fold

        def watched(site: Site, request: MessageBody) -> MessageBody:
            reply: MessageBody = train(site, request)
            header = request.header
            keys = chain.from_iterable(site.contract.parts)
            store = site.state(header).blobs(header.server_round)
            blobs = dict(zip(keys, map(store.get, reply.fields["blob_sha256"]), strict=True))
            made = part(row.to_summands)(site, request, reply.fields, blobs)
            found = {key: dict(own) for key, own in made}
            self.specs[header.server_round] = part(row.summands)(
                header.server_round, site.model.plan, site.settings
            )
            self.made[header.server_round, header.client] = self.spoil(header.client, found)
            return reply

        def fold_sums(method: Method, server_round: int, inbox: Inbox, clients: list[int]) -> None:
            if not self.folds:
                fold(method, server_round, inbox, clients)
                return
            # A reply that is read would raise an error.
            inbox.clear()
            replies = [self.made[server_round, client] for client in self.order(clients)]
            method.fold_sums(server_round, AddedSums(self.specs[server_round], replies), clients)

        monkeypatch.setattr(job, "train", watched)
        monkeypatch.setattr(strategy, "fold", fold_sums)
        return self

    def run(self, **changes: Any) -> Path:
        self.made.clear()
        return self.bench.run(**changes)

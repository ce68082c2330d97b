"""Runs in which a second strategy folds the plain sum of the clients' summands.

Clients make their summands of the blobs that they stored. These are packed, added modulo 2^bits and
unpacked. The second strategy begins every round with the state of the first, and sees no reply.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.site import Site
from client_app.summands.plain_blob import PlainBlob
from espalier.messages.message import MessageBody
from espalier.messages.sums.summands import Numbers, SumSpecs, add_to, pack
from espalier.messages.tensor_blobs import pack_tensors
from espalier.settings.registry import METHODS, part
from espalier.storage.blobs import BlobStore
from strategies.base.inbox import Inbox
from strategies.base.method import FoldsSums, Method
from strategies.base.sums.unmasking import Sums
from tests.bench import Bench

Summands = dict[str, dict[str, Numbers]]


def added(specs: SumSpecs, replies: Sequence[Summands], store: BlobStore) -> Sums:
    """Return the sum of some clients' summands, in blobs of a store."""
    totals = {}
    for key, tensors in specs.items():
        packed = {}
        for name, spec in tensors.items():
            packed[name] = np.zeros(spec.num_words, np.uint64)
            for reply in replies:
                add_to(packed[name], pack(reply[key][name], spec), spec)
        totals[key] = store.put(pack_tensors(packed))
    return Sums(specs, totals, store)


@dataclass
class Folded:
    """Round that was folded twice."""

    plain: Method
    summed: Method
    clients: list[int]
    state: dict[str, Any]
    """State of ``plain`` after the round."""
    state_of_sums: dict[str, Any]


@dataclass
class SummedRun:
    """Run of a bench whose replies and sums are both folded."""

    bench: Bench
    spoil: Callable[[int, Summands], None] = lambda client, found: None
    """Function that changes the summands of a client in place."""
    made: dict[tuple[int, int], Summands] = field(default_factory=dict)
    """Summands by round and client."""
    specs: dict[int, SumSpecs] = field(default_factory=dict)
    rounds: list[Folded] = field(default_factory=list)

    def run(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
        row = METHODS[self.bench.method]
        job = part(row.job)
        strategy = part(row.strategy)
        with monkeypatch.context() as patch:
            patch.setattr(job, "train", self._trained(job.train))
            patch.setattr(strategy, "fold", self._folded(strategy.fold))
            return self.bench.run(**changes)

    def _trained(
        self, train: Callable[[Site, MessageBody], MessageBody]
    ) -> Callable[[Site, MessageBody], MessageBody]:
        def watched(site: Site, request: MessageBody) -> MessageBody:
            reply = train(site, request)
            header = request.header
            keys = chain.from_iterable(site.contract.parts)
            store = site.state(header).blobs(header.server_round)
            hashes = dict(zip(keys, reply.fields["blob_sha256"], strict=True))
            row = METHODS[site.settings.method]
            plan = site.model.plan
            self.specs[header.server_round] = row.summands(header.server_round, plan, site.settings)
            found = {}
            for key, specs in self.specs[header.server_round].items():
                found[key] = dict(
                    part(row.to_summands)(
                        PlainBlob(
                            key,
                            lambda of=key: store.get(hashes[of]),
                            reply.fields,
                            plan,
                            site.settings,
                        )
                    )
                )
                assert found[key].keys() == specs.keys()
            self.spoil(header.client, found)
            self.made[header.server_round, header.client] = found
            return reply

        return watched

    def _folded(self, fold: Callable[..., None]) -> Callable[..., None]:
        def twice(method: Method, server_round: int, inbox: Inbox, clients: list[int]) -> None:
            before = copy.deepcopy(method.state())
            fold(method, server_round, inbox, clients)
            other = type(method)(method.run, method.evaluation)
            other.restore(before)
            # The order of the clients is another one than that of the replies.
            replies = [self.made[server_round, client] for client in reversed(clients)]
            store = BlobStore(self.bench.folder / "added")
            assert isinstance(other, FoldsSums)
            other.fold_sums(server_round, added(self.specs[server_round], replies, store), clients)
            states = copy.deepcopy(method.state()), copy.deepcopy(other.state())
            self.rounds.append(Folded(method, other, clients, *states))

        return twice

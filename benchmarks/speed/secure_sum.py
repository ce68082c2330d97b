"""Bytes and seconds of secure sums next to plain sums, for 3, 8, 32 and 100 clients.

    python -m benchmarks.speed.secure_sum [--methods pooled-pruning] [--clients 3 8 32 100]

Bytes are those of a run's plan, which a test compares with the bytes of real runs. Seconds are
those of the program's own functions on one core, with summands of random numbers of the right
sizes: a client's keys, shares and confirmations, its masks, and the server's sum and unmasking,
without drop-outs and after a tenth of the clients (at least one) dropped out. ``seeds from shares``
is the time in which the server would put together the seeds of all clients, if they did not tell
them themselves. All clients' messages are made in this
process; the seconds of a client are those of the first one. ``work`` is the time in which a client
computes its plain reply for the demo model with 128 samples of 256 tokens (pooled pruning), which a
round takes at least.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import torch

from client_app.protocol.sum_party import Party
from espalier.environment.paths import DEMO
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.pooled_sums import dense_sums
from espalier.messages.message import Header, request_header
from espalier.messages.sums.masked_summands import apply_mask, mask_summand, places_in_mask
from espalier.messages.sums.secure_sum import ShareOrder, Shares, UnmaskOrder, summand_specs
from espalier.messages.sums.summands import SumSpecs, Words, add_to, clear_padding
from espalier.messages.tensor_blobs import pack_tensors
from espalier.secure_sum.keys import Session, new_seed, private_key, public_bytes
from espalier.secure_sum.neighbours import two_thirds
from espalier.secure_sum.sharing import rebuilt
from espalier.settings.registry import METHODS
from espalier.settings.run import RunSettings, parse
from espalier.storage.blobs import BlobStore
from server_app.estimate.messages.traffic import RunTraffic, unread_tests
from strategies.base.rounds import Rounds
from strategies.base.sums.exchanges import OpenSession
from strategies.base.sums.masked_sums import MaskedSum
from strategies.base.sums.unmasking import Sums, Unmasking, published

LINEAGE = "20260101-000000-000000000001"
NUMBER = "0f" * 16
SAMPLES = 128
TOKENS = 256
R = TypeVar("R")


class Timed:
    """Seconds of named steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def step(self, name: str, work: Callable[[], R], *, counts: bool = True) -> R:
        """Return the result of ``work``, and add its seconds to ``name`` if they count."""
        started = time.perf_counter()
        found = work()
        if counts:
            taken = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + taken
        return found


def settings(method: str, clients: int, *, secure: bool) -> RunSettings:
    """Return the settings of a run with the demo model and no evaluation by clients."""
    given = {
        "method": method,
        "num-clients": clients,
        "quorum": 0.5,
        "evaluation.local-baseline": False,
        "evaluation.own-text": False,
        "federation.secure-sum": secure,
    }
    return parse(given)


def bytes_of(run: RunSettings, model: OpenedModel) -> dict[str, int]:
    """Return the bytes of one client in the planned run, without its enrolment."""
    with redirect_stdout(StringIO()):
        traffic = RunTraffic(run, model, unread_tests(run, model)).of_client(0)
    return {"up": traffic.up, "down": traffic.down}


def kept_of(client: int, order: dict[str, Any], secrets: dict[str, str]) -> dict[str, Any]:
    """Return the state of a client, as its node stores it."""
    clients = order["clients"]
    return {
        "session": NUMBER,
        "order": order,
        "secrets": secrets,
        "members": clients,
        "inputs": "0" * 64,
    }


def header_of(client: int) -> Header:
    """Return the header of a message to a client."""
    return request_header("pooled-pruning", "shares", 1, client, 0, LINEAGE)


class Measured:
    """One secure sum whose steps are timed."""

    def __init__(self, clients: int, specs: SumSpecs) -> None:
        self.clients = list(range(clients))
        self.specs = specs
        self.timed = Timed()
        self.session = Session(LINEAGE, 1, NUMBER)
        self.parties: dict[int, Party] = {}
        self.shares: dict[int, Shares] = {}
        self.own_shares: dict[int, list[str]] = {}

    def keys_and_shares(self) -> None:
        """Make all clients' keys and shares."""
        secrets = {
            client: {name: new_seed().hex() for name in ("mask", "share", "own")}
            for client in self.clients
        }
        public: dict[int, list[str]] = {}
        for client in self.clients:
            public[client] = self.timed.step(
                "client: keys and shares",
                partial(self._public_keys, secrets[client]),
                counts=client == 0,
            )
        order = ShareOrder(
            session=NUMBER,
            threshold=two_thirds(len(self.clients)),
            clients=self.clients,
            sites=[f"site-{client}" for client in self.clients],
            mask_keys=[public[client][0] for client in self.clients],
            share_keys=[public[client][1] for client in self.clients],
            signatures=[""] * len(self.clients),
        )
        self.order = order
        for client in self.clients:
            kept = kept_of(client, order.model_dump(), secrets[client])
            self.parties[client] = Party(header_of(client), kept)
            self.shares[client], self.own_shares[client] = self.timed.step(
                "client: keys and shares", self.parties[client].split_secrets, counts=client == 0
            )

    def _public_keys(self, secrets: dict[str, str]) -> list[str]:
        return [
            public_bytes(private_key(bytes.fromhex(secrets[name]), self.session, name))
            for name in ("mask", "share")
        ]

    def masked(self) -> dict[str, dict[str, Words]]:
        """Return the sum of all clients' masked summands; the plain ones are random numbers."""
        generator = np.random.default_rng(0)
        places = places_in_mask(self.specs)
        totals = {
            key: {name: np.zeros(spec.num_words, np.uint64) for name, spec in tensors.items()}
            for key, tensors in self.specs.items()
        }
        self.session_of_server = OpenSession(self.order, {}, self.shares)
        self.session_of_server.graph.update(
            {client: party.neighbours for client, party in self.parties.items()}
        )
        self.received: dict[int, dict[str, list[str]]] = {}
        self.plain: dict[tuple[str, str], Words] = {}
        for client in self.clients:
            party = self.parties[client]
            asked = self.session_of_server.request(client)
            self.received[client], _ = self.timed.step(
                "client: keys and shares",
                partial(party.received_shares, asked),
                counts=client == 0,
            )
            pairs = self.timed.step("client: masks", party.pair_keys, counts=client == 0)
            own = party.own_key()
            for key, tensors in self.specs.items():
                for name, spec in tensors.items():
                    words = generator.integers(0, 1 << 64, spec.num_words, np.uint64)
                    clear_padding(words, spec)
                    known = self.plain.setdefault((key, name), np.zeros_like(words))
                    add_to(known, words, spec)
                    arguments = (words, spec, places[key, name], client, own, pairs)
                    self.timed.step(
                        "client: masks",
                        partial(mask_summand, *arguments),
                        counts=client == 0,
                    )
                    self.timed.step(
                        "server: sum",
                        partial(add_to, totals[key][name], words, spec),
                    )
        return totals

    def confirmed(self) -> None:
        """Let all clients confirm the list of the sum, and the first check all confirmations."""
        tags: dict[int, str] = {}
        for client in self.clients:
            party = self.parties[client]
            party.kept = {**party.kept, "included": self.clients}
            found = self.timed.step("client: keys and shares", party.tags, counts=client == 0)
            if client:
                tags[client] = found[0]
        session = self.order.session
        order = UnmaskOrder(
            session=session,
            included=self.clients,
            seeds_of=self.clients,
            keys_of=[],
            confirmed=list(tags),
            tags=list(tags.values()),
        )
        first = self.parties[0]
        self.timed.step("client: keys and shares", partial(first.require_confirmed, order))

    def seeds_from_shares(self) -> None:
        """Put the seed of every client together, and compare it with the one that it tells."""
        needed = self.order.neighbourhood.threshold
        for client, party in self.parties.items():
            shares = {
                holder: bytes.fromhex(self.received[holder][str(client)][0])
                for holder in party.neighbours
            }
            holders = sorted([*party.neighbours, client])
            shares[client] = bytes.fromhex(self.own_shares[client][0])
            found = self.timed.step("seeds from shares", partial(rebuilt, shares, needed, holders))
            assert found.hex() == party.kept["secrets"]["own"]

    def unmasked(self, totals: dict[str, dict[str, Words]], folder: Path) -> None:
        """Unmask the sum as the server does, and compare it with the plain one."""
        store = BlobStore(folder)
        masked = MaskedSum(
            1,
            self.order.model_dump(),
            self.clients,
            {str(client): published(told) for client, told in self.shares.items()},
            self.clients,
            {},
            {key: store.put(pack_tensors(tensors)) for key, tensors in totals.items()},
        )
        unmasking = self._answered(masked)
        name = "server: unmasking"
        removals = self.timed.step(name, unmasking.removals)
        sums = Sums(self.specs, masked.totals, store, removals)
        for key, tensors in self.specs.items():
            for tensor, spec in tensors.items():
                found = self.timed.step(name, partial(sums.tensor, key, tensor))
                expected = Sums(
                    self.specs, {key: store.put(pack_tensors({tensor: self.plain[key, tensor]}))},
                    store,
                ).tensor(key, tensor)  # fmt: skip
                assert (found == expected).all(), spec

    def with_drop_outs(self) -> None:
        """Rebuild the secrets of a sum from which a tenth of the clients dropped out.

        Each dropped client costs one more stream of masks for each neighbour in the sum.
        """
        dropped = max(1, len(self.clients) // 10)
        included = self.clients[:-dropped]
        if len(included) < self.order.threshold:
            return
        shares = {str(client): published(told) for client, told in self.shares.items()}
        masked = MaskedSum(1, self.order.model_dump(), self.clients, shares, included, {}, {})
        unmasking = self._answered(masked)
        removals = self.timed.step("server: drop-outs", unmasking.removals)
        places = places_in_mask(self.specs)
        for key, tensors in self.specs.items():
            for name, spec in tensors.items():
                words = np.zeros(spec.num_words, np.uint64)
                for mask, subtracts in removals:
                    self.timed.step(
                        "server: drop-outs",
                        partial(
                            apply_mask, words, spec, mask, places[key, name], subtracts=subtracts
                        ),
                    )

    def _answered(self, masked: MaskedSum) -> Unmasking:
        seats = {client: SimpleNamespace(site=f"site-{client}") for client in self.clients}
        rounds = SimpleNamespace(lineage=LINEAGE, roster=SimpleNamespace(seats=seats))
        unmasking = Unmasking(masked, cast(Rounds, rounds))
        for holder in masked.included:
            party = self.parties[holder]
            party.kept = {
                **party.kept,
                "received": self.received[holder],
                "own_shares": self.own_shares[holder],
            }
            unmasking.take(holder, party.shares_of(masked.request(holder, {})).model_dump())
        return unmasking


def seconds_of_work(model: OpenedModel) -> float:
    """Return the seconds in which a client computes the sums of the demo model."""
    stream = BlockStream(model, Computing(torch.device("cpu"), torch.float32, 1))
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(0, model.config["vocab_size"], (SAMPLES, TOKENS), generator=generator)
    started = time.perf_counter()
    for _ in dense_sums(stream, samples):
        pass
    return time.perf_counter() - started


def measured(method: str, clients: int, model: OpenedModel) -> dict[str, Any]:
    """Return bytes and seconds of one method and number of clients."""
    run = settings(method, clients, secure=True)
    plain = bytes_of(settings(method, clients, secure=False), model)
    secure = bytes_of(run, model)
    one = Measured(clients, summand_specs(1, model.plan, run))
    one.keys_and_shares()
    totals = one.masked()
    one.confirmed()
    with tempfile.TemporaryDirectory() as folder:
        one.unmasked(totals, Path(folder))
    one.seeds_from_shares()
    one.with_drop_outs()
    return {
        "method": method,
        "clients": clients,
        "bytes_plain": plain,
        "bytes_secure": secure,
        "ratio_up": round(secure["up"] / plain["up"], 2),
        "seconds": {name: round(value, 4) for name, value in one.timed.seconds.items()},
    }


def table(rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    """Yield the lines of a Markdown table."""
    yield (
        "| method | clients | up, plain | up, secure | ratio | down, plain | down, secure |"
        " client: keys and shares | client: masks | server: sum | server: unmasking |"
        " seeds from shares | with drop-outs |"
    )
    yield "|---" * 13 + "|"
    for row in rows:
        times = row["seconds"]
        names = (
            "client: keys and shares",
            "client: masks",
            "server: sum",
            "server: unmasking",
            "seeds from shares",
        )
        shown = [f"{times[name]:.3f} s" for name in names]
        shown.append(f"{times.get('server: drop-outs', 0):.3f} s")
        plain = row["bytes_plain"]
        secure = row["bytes_secure"]
        yield (
            f"| {row['method']} | {row['clients']} | {plain['up']:,} | {secure['up']:,} |"
            f" {row['ratio_up']} | {plain['down']:,} | {secure['down']:,} | {' | '.join(shown)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    able = [name for name, row in METHODS.items() if row.summands]
    parser.add_argument("--methods", nargs="+", default=able, choices=able)
    parser.add_argument("--clients", nargs="+", type=int, default=[3, 8, 32, 100])
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = open_model(DEMO)
    work = seconds_of_work(model)
    rows = [measured(method, n, model) for method in given.methods for n in given.clients]
    print("\n".join(table(rows)))
    print(
        f"\nwork of a client (pooled pruning, {SAMPLES} samples of {TOKENS} tokens): {work:.1f} s"
    )
    if given.out:
        given.out.write_text(json.dumps({"work_seconds": work, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

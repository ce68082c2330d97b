"""Membership test: recognition of known samples of a client in one reply.

    python -m benchmarks.membership [--clients 20] [--samples 32] [--tokens 64] [--out docs/studies]

Every client has its own text. All texts consist of passages that were shuffled before they were
distributed, so clients differ only in their passages. Each client is a trial: the server has its
reply of one round and a few known samples of every client, and decides which client sent the reply.
Clients and server follow the protocol.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.membership.attacks import Outcome
from benchmarks.membership.clients import Clients
from benchmarks.membership.kinds import (
    ADAPTERS,
    COMPARED,
    STATISTICS,
    recognised_by_adapters,
    recognised_by_statistics,
)
from espalier.errors import EspalierError
from espalier.hf.machine.computing import Computing
from espalier.storage.atomic import write_json

QUARTER = 4


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.membership",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="directory of a Hugging Face model")
    parser.add_argument(
        "--source",
        default="code",
        choices=["code", "documentation"],
        help="text that is distributed over the clients",
    )
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, default=32, help="of each client")
    parser.add_argument("--tokens", type=int, default=64, help="of a sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="directory for membership.md and membership.json")
    return parser.parse_args()


def outcomes(clients: Clients) -> Iterator[tuple[str, int, Outcome]]:
    """Yield the kind of reply, the number of known samples, and the outcome."""
    computing = Computing(torch.device("cpu"), torch.float32, 1)
    alone, compared = recognised_by_adapters(clients, computing)
    yield ADAPTERS, 1, alone
    yield COMPARED, 1, compared
    known = sorted({1, max(1, clients.samples // QUARTER)})
    for name, kind in STATISTICS.items():
        for number, outcome in zip(
            known, recognised_by_statistics(clients, computing, kind, known), strict=True
        ):
            yield name, number, outcome


def report(clients: Clients, found: list[tuple[str, int, Outcome]]) -> str:
    """Return the table in Markdown."""
    tokens = clients.samples * clients.tokens
    lines = [
        "# Membership tests on one reply",
        "",
        (
            f"Model `{clients.opened.directory.name}`; {clients.number} clients with"
            f" {clients.samples} samples of {clients.tokens} tokens each, {tokens} tokens, of"
            f" Python's {clients.source}; seed {clients.seed}. Each client is a trial: the server"
            " ranks what it knows of every client by how well it fits one reply."
        ),
        "",
        (
            f"| reply | known samples | recognised (by chance {1 / clients.number:.2g} of the"
            " trials) | sender ahead of another client, pairs (by chance 50%) |"
        ),
        "|---|---|---|---|",
    ]
    for name, number, one in found:
        lines.append(
            f"| {name} | {number} of {clients.samples} | {one.first} of {one.trials} |"
            f" {one.ahead:.0%} |"
        )
    return "\n".join([*lines, ""])


def main() -> int:
    """Test all kinds of replies and print the table.

    Returns
    -------
    int
        2 after a InputError, whose message is printed on stderr
    """
    given = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        clients = Clients(
            given.model,
            given.source,
            Path(folder),
            given.clients,
            given.num_samples,
            given.tokens,
            given.seed,
        )
        try:
            clients.deal()
            found = []
            for one in outcomes(clients):
                print(*one, flush=True)
                found.append(one)
        except EspalierError as error:
            print(f"{error}", file=sys.stderr)
            return 2
        text = report(clients, found)
    print(text, end="")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "membership.md").write_text(text)
        rows = [{"reply": name, "known": number, **vars(one)} for name, number, one in found]
        conditions = {
            name: getattr(clients, name)
            for name in ("source", "number", "samples", "tokens", "seed")
        }
        write_json(
            given.out / "membership.json",
            {"model": clients.opened.sha256, **conditions, "outcomes": rows},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

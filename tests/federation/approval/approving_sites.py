"""Sites whose replies wait for approval, and decisions of their owners."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import client_app.app
from client_app.policy.approval_command import main as release
from client_app.policy.approval_command import waiting_in
from espalier.messages.ledger import lifetime
from espalier.messages.message import SCHEMA_VERSION, Header, MessageBody
from espalier.messages.records import address, read
from espalier.storage.hash_chain import chain_check
from espalier.storage.waiting_replies import WaitingReply
from tests.bench import Bench
from tests.in_process import InProcessGrid
from tests.run_names import BY_HAND

SECONDS = 100.0
METHODS: dict[str, dict[str, Any]] = {
    "fedspallm": {"federation.rounds": 2},
    "fedpetuning": {
        "lora.rank": 8, "lora.targets": "all", "training.steps": 2, "training.batch-size": 2,
        "federation.rounds": 2,
    },
}  # fmt: skip
"""Settings of methods whose replies have several parts."""


class Time:
    """Clock that advances when a process waits for approval, and then calls ``approver``."""

    def __init__(self, approver: Callable[[], None]) -> None:
        self.seconds = 0.0
        self.approver = approver

    def pause(self, seconds: float) -> None:
        assert seconds > 0
        self.seconds += seconds
        self.approver()


def of_method(bench: Bench, method: str) -> Bench:
    bench.method = method
    bench.settings = bench.settings | METHODS[method]
    return bench


def state(bench: Bench) -> Path:
    return bench.folder / "state"


def sites(bench: Bench, holds: str = "tensors", **changes: Any) -> InProcessGrid:
    """Return a grid of real sites that share a state directory."""
    nodes = [
        {
            "site": f"site-{client}", "data-path": str(bench.folder / f"text-{client}.txt"),
            "model-path": str(bench.model), "min-tokens": 1, "state-dir": str(state(bench)),
            "require-approval": holds,
        }
        for client in range(bench.num_clients)
    ]  # fmt: skip
    grid = InProcessGrid(client_app.app.app, nodes, bench.config(**changes))
    grid.simulated = False
    return grid


def decide(bench: Bench, **words: Any) -> int:
    """Run ``espalier approve``."""
    return release(
        {
            "state_dir": str(state(bench)),
            "ids": [],
            "all": False,
            "refuse": [],
            "reason": "",
            "show": [],
            **words,
        }
    )


def undecided(bench: Bench) -> list[WaitingReply]:
    return [waiting for _, waiting in waiting_in(state(bench))[0]]


def log_of(bench: Bench, site: str = "site-0") -> list[dict[str, Any]]:
    (path,) = (state(bench) / "egress").glob(f"*-{site}.jsonl")
    assert chain_check(path).fault == ""
    return [json.loads(line) for line in path.read_text().splitlines()]


class OneSite:
    """Real site whose replies wait for approval, with a server that sends handmade requests."""

    def __init__(self, bench: Bench, holds: str = "tensors", **changes: Any) -> None:
        self.bench = bench
        self.grid = sites(bench, holds, **changes)

    def ask(self, kind: str = "train", server_round: int = 1, **header: Any) -> MessageBody:
        fields = header.pop("fields", {})
        common = {
            "schema_version": SCHEMA_VERSION,
            "lineage": BY_HAND,
            "client": 0,
            "attempt": 1,
            "part": 0,
            "num_parts": 1,
        }
        values = (
            common
            | {"kind": kind, "method": self.bench.method, "server_round": server_round}
            | header
        )
        node_id, context = next(iter(self.grid.contexts.items()))
        message = address(
            MessageBody(Header.model_validate(values), fields), node_id, lifetime(SECONDS)
        )
        return read(self.grid.answer(message, context).content)

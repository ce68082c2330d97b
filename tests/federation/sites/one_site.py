"""Real site that answers handmade requests."""

from typing import Any

import torch
from safetensors.numpy import save

from espalier.messages.message import SCHEMA_VERSION, Header, MessageBody
from espalier.messages.records import address, read
from tests.bench import LOCAL_ONLY, Bench
from tests.in_process import InProcessGrid
from tests.run_names import BY_HAND


class OneSite:
    """Real site with its own text, and a server that may ask for anything."""

    def __init__(self, bench: Bench, node: dict[str, Any] | None = None, **changes: Any) -> None:
        own = {
            "data-path": str(bench.folder / "text-0.txt"),
            "model-path": str(bench.model),
            "min-tokens": 20,
        }
        self.node = {"site": "ward", **own, **(node or {})}
        self.run = bench.config(**{"evaluation__texts": "a=a.txt,b=b.txt"} | changes)
        self.grid = InProcessGrid(bench.grid().app, [self.node], self.run)
        self.grid.simulated = False

    def ask(
        self,
        kind: str,
        server_round: int | None = None,
        fields: dict[str, Any] | None = None,
        **header: Any,
    ) -> MessageBody:
        """Return the site's reply; ``header`` may replace header fields and add ``blobs``."""
        blobs = header.pop("blobs", {})
        if server_round is None:
            server_round = 0 if kind == "enrol" else 1
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
            | {"kind": kind, "method": self.run["method"], "server_round": server_round}
            | header
        )
        (node_id, context), *_ = self.grid.contexts.items()
        message = address(
            MessageBody(Header.model_validate(values), fields or {}, blobs), node_id, 60.0
        )
        return read(self.grid.answer(message, context).content)

    def refusal(self, *arguments: Any, **named: Any) -> str:
        """Return the reason why the site refused."""
        reply = self.ask(*arguments, **named)
        assert reply.header.status == "failed", reply.fields
        assert not reply.blobs
        # A refusal to enrol starts with the site's name.
        return str(reply.fields["reason"]).removeprefix("site ward: ")

    def evaluate(
        self, texts: dict[str, list[int]], server_round: int = 1, **header: Any
    ) -> MessageBody:
        """Ask for the loss on invented evaluation texts of 16 tokens each."""
        samples = {
            name: torch.tensor([tokens], dtype=torch.int32).numpy()
            for name, tokens in texts.items()
        }
        fields = {
            "names": list(texts), "num_samples": [1] * len(texts), "sequence_length": 16,
            "own_text": False, "test_metrics": [], "test_items": 0, "test_requests": 0,
            "test_tokens": 0,
        }  # fmt: skip
        return self.ask(
            "evaluate", server_round, fields, blobs={"public-samples": save(samples)}, **header
        )


def tuning(bench: Bench) -> Bench:
    bench.method = "fedpetuning"
    bench.settings = LOCAL_ONLY | {
        "lora.rank": 2, "lora.targets": "attn.q", "training.steps": 2, "training.batch-size": 2,
        "federation.rounds": 2,
    }  # fmt: skip
    return bench

"""Number of times that a site parses what belongs to a message."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import client_app.app
import client_app.site
from tests.bench import EVALUATED, Bench

PARSED = (
    (client_app.app, "read"),
    (client_app.site, "parse"),
    (client_app.site, "parse_node"),
    (client_app.site, "contract_for"),
    (client_app.site, "open_model"),
)
"""Modules, and their functions that read a message, the settings, the contract or the model."""


def test_site_parses_a_message_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    # The minimum for real sites is larger than the texts of the bench.
    monkeypatch.setattr("espalier.data.client_text.MIN_PREDICTIONS", 15)
    calls = Counter[str]()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **named)

        return count

    for module, name in PARSED:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    tuning = {"federation.rounds": 2, "training.steps": 1, "lora.rank": 2, "lora.targets": "all"}
    bench = Bench(tmp_path, "fedpetuning", EVALUATED | tuning, num_clients=2)
    grid = bench.grid()
    bench.run(grid)
    assert {reply.metadata.message_type for _, reply in grid.received} >= {
        "query.fetch",
        "evaluate",
    }
    assert calls == Counter({name: len(grid.received) for _, name in PARSED})

"""``min-groups`` at a real site: what its refusals tell, and the owner's check."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from client_app.node.check_node import look
from espalier.errors import EspalierError
from tests.bench import LOCAL_ONLY, Bench, private_text
from tests.federation.sites.one_site import OneSite


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "fedpetuning", LOCAL_ONLY, num_clients=2)


def ward(bench: Bench, least: int, method: str = "fedpetuning", **changes: Any) -> OneSite:
    """Return a site with notes of six patients, which trains on few of them in a round."""
    path = bench.folder / "notes.jsonl"
    rows = [
        {"text": text, "patient": number % 6}
        for number, text in enumerate(private_text(0).split("\n\n"))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bench.method = method
    bench.settings = LOCAL_ONLY
    if method == "fedpetuning":
        bench.settings = LOCAL_ONLY | {
            "lora.rank": 2, "lora.targets": "attn.q", "training.steps": 1, "training.batch-size": 1,
        }  # fmt: skip
    node = {"data-path": str(path), "data-group": "patient", "min-groups": least, "min-tokens": 1}
    return OneSite(bench, node, **changes)


def test_refusal_of_a_site_names_no_count(bench: Bench) -> None:
    told = ward(bench, 7).refusal("enrol")
    assert told.startswith("min-groups: an answer would be based on fewer groups")
    assert not re.search("[0-9]", told)


@pytest.mark.parametrize("method", ["fedpetuning", "fedprllm"])
def test_a_round_on_too_few_groups_is_refused(bench: Bench, method: str) -> None:
    fields = {"rank_limit": 2} if method == "fedpetuning" else {}
    told = ward(bench, 5, method, data__num_samples=1).refusal("train", fields=fields)
    assert told.startswith("min-groups: an answer would be based on fewer groups")
    assert not re.search("[0-9]", told)


def test_check_node_tells_the_owner(bench: Bench) -> None:
    few = ward(bench, 7)
    with pytest.raises(EspalierError, match=r"min-groups = 7: there are [1-6] groups"):
        list(look(few.node, few.run))
    enough = ward(bench, 2)
    lines = [line.strip() for line in look(enough.node, enough.run)]
    assert "and 2 groups of the field patient" in lines

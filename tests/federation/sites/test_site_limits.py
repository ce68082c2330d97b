"""Limits of a site: runs that ask for more than the owner allows are refused in words."""

import os
import re
from typing import Any

import pytest
import torch
from safetensors.numpy import save

from tests.bench import Bench
from tests.federation.sites.one_site import OneSite, tuning
from tests.run_names import named


@pytest.mark.parametrize("kind", ["enrol", "train"])
@pytest.mark.parametrize(
    ("node", "changes", "line"),
    [
        ({}, {"threads": 1000}, "threads = 1000: at most [0-9]+ are allowed here"),
        ({}, {"data__num_samples": 5000}, "max-samples = 4096: data.num-samples = 5000"),
        ({}, {"method": "fedpetuning", "training__batch_size": 16385},
         "max-batch-tokens = 262144: .* of a sequence = 262160"),
        ({"max-rounds": 2}, {"method": "fedspallm", "federation__rounds": 3},
         "max-rounds = 2: federation.rounds = 3"),
        ({"allowed-methods": "fedspallm,hetlora"}, {},
         "allowed-methods = 'fedspallm,hetlora': the run's method is 'fedprllm'"),
        ({"require-site-keys": True}, {},
         "require-site-keys: in this run anyone could use this site's name"),
    ],
)  # fmt: skip
def test_disallowed_run_is_refused_in_words(
    bench: Bench, kind: str, node: dict[str, Any], changes: dict[str, Any], line: str
) -> None:
    told = OneSite(bench, node, **changes).refusal(kind)
    assert told.startswith(
        "this site does not allow the run; change these values, or ask the site's owner to change"
        " --node-config:\n"
    )
    assert re.search(line, told), told


def test_rounds_that_a_method_adds_are_rounds_too(bench: Bench) -> None:
    """FedSpaLLM adds rounds until every layer is pruned.

    The number of clients limits them, and the server chooses that number.
    """
    bench.method = "fedspallm"
    site = OneSite(bench, {"max-rounds": 1}, num_clients=10**6)
    order = {"blocks": [0], "versions": [0, 0]}
    assert site.ask("train", fields=order).header.status == "ok"
    assert "max-rounds = 1: requested round = 2" in site.refusal("train", 2, order)
    assert "max-rounds = 1: requested round = 2" in site.refusal("push", 3, order)


def test_public_texts_are_bounded(bench: Bench) -> None:
    site = OneSite(bench, {"max-samples": 60}, data__num_samples=2, evaluation__max_samples=0)
    assert site.ask("train").header.status == "ok"
    texts = {name: list(range(16)) for name in ("a", "b")}
    fields = {
        "names": list(texts), "num_samples": [67, 67], "sequence_length": 16, "own_text": False,
        "test_metrics": [], "test_items": 0, "test_requests": 0, "test_tokens": 0,
    }  # fmt: skip
    samples = {
        name: torch.tensor([tokens] * 67, dtype=torch.int32).numpy()
        for name, tokens in texts.items()
    }
    told = site.refusal("evaluate", 1, fields, blobs={"public-samples": save(samples)})
    assert "max-samples = 60: the public texts of evaluation.texts have 134 samples" in told


def test_all_limits_are_told_at_once(bench: Bench) -> None:
    node = {"max-steps": 3, "max-rounds": 1}
    told = OneSite(tuning(bench), node, threads=1000, training__accumulation=2).refusal("enrol")
    first, *others = [line.strip() for line in told.splitlines()[1:]]
    assert first.startswith("threads = 1000: at most ")
    assert others == [
        "max-steps = 3: training.steps x training.accumulation = 4",
        "max-rounds = 1: federation.rounds = 2",
    ]


def test_a_site_answers_so_many_runs(bench: Bench) -> None:
    site = OneSite(bench, {"max-runs": 2})
    assert [
        site.ask("train", lineage=named(lineage)).header.status for lineage in ("a", "b", "a")
    ] == ["ok"] * 3
    for kind in ("enrol", "train"):
        assert (
            "max-runs = 2: this number of runs was already answered within keep-days"
            in site.refusal(kind, lineage=named("c"))
        )
    assert (
        OneSite(bench, {"max-runs": 2, "site": "other"})
        .ask("train", lineage=named("c"))
        .header.status
        == "ok"
    )
    # Runs older than ``keep-days`` no longer count.
    os.utime(bench.folder / "state" / named("a") / "ward" / "lock", (0, 0))
    assert site.ask("enrol", 0, lineage=named("c")).header.status == "ok"
    assert site.ask("train", lineage=named("c")).header.status == "ok"


def test_repeated_size_probing_is_limited(bench: Bench) -> None:
    """A server that asks for ever more samples would learn how many there are.

    Each run that asks counts, regardless of the answer.
    """
    node = {"max-runs": 3}
    asked = {
        lineage: OneSite(bench, node, data__num_samples=number)
        for lineage, number in (("a", 2000), ("b", 2), ("c", 1000))
    }
    found = {
        lineage: site.ask("enrol", 0, lineage=named(lineage)).header.status
        for lineage, site in asked.items()
    }
    assert found == {"a": "failed", "b": "ok", "c": "failed"}
    assert "max-runs = 3: this number of runs was already answered" in asked["b"].refusal(
        "enrol", 0, lineage=named("d")
    )
    assert "too few samples" in asked["a"].refusal("enrol", 0, lineage=named("a"))
    # Other settings in the same run are refused too.
    told = OneSite(bench, node, data__num_samples=500).refusal("enrol", 0, lineage=named("a"))
    assert told.startswith("message: this site takes part in this run with another set of settings")
    assert asked["b"].ask("train", lineage=named("b")).header.status == "ok"


def test_disallowed_run_is_not_counted(bench: Bench) -> None:
    """The site refuses before it reads its data."""
    for lineage in ("a", "b", "c"):
        assert "threads = 1000" in OneSite(bench, {"max-runs": 1}, threads=1000).refusal(
            "enrol", 0, lineage=named(lineage)
        )
    assert OneSite(bench, {"max-runs": 1}).ask("enrol", 0, lineage=named("d")).header.status == "ok"


def test_a_partition_id_turns_no_limit_off(bench: Bench) -> None:
    node = {"partition-id": 0, "num-partitions": 2, "min-tokens": 0}
    assert "min-tokens = 2048" in OneSite(bench, node).refusal("train")
    assert "threads = 1000" in OneSite(bench, node, threads=1000).refusal("enrol")
    assert "threads = 100000: input should be less than" in OneSite(
        bench, node, threads=100_000
    ).refusal("enrol")

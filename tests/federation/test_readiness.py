"""What a site's own files cannot serve is refused when the site enrols, in words, and costs no round."""

from pathlib import Path
from typing import Any

import pytest
from bench import Bench, summary
from flwr.app import Context
from in_process import InProcessGrid

from espalier.wire.messages import read


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "fedprllm", {"quorum": 0.5}, 2)


def second_site(grid: InProcessGrid, **config: Any) -> Context:
    """The second node, as a real site with a name and further keys."""
    (context,) = [context for context in grid.contexts.values() if context.node_config["partition-id"] == 1]
    context.node_config |= {"site": "hospital-b", **{key.replace("_", "-"): value for key, value in config.items()}}
    return context


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"data_pth": "x"}, "data-pth: unknown key; did you mean 'data-path'?"),
        ({"data_format": "jsonl"}, "line 1 is not JSON"),
        ({"windows": 5000}, "windows of 16 tokens, data.windows = 5000 are needed"),
        ({"data_path": "."}, "cannot be read (Is a directory)"),
    ],
)
def test_a_site_whose_file_will_not_do_is_refused_with_its_name_before_any_round(
    bench: Bench, config: dict[str, Any], reason: str
) -> None:
    grid = bench.grid()
    second_site(grid, **config)
    document = summary(bench.run(grid))
    ((who, told),) = document["refused"].items()
    assert who == "hospital-b"
    assert reason in told
    assert [client["site"] for client in document["clients"]] == ["node-00000"]
    kinds = [read(reply.content).header.kind for partition, reply in grid.received if partition == 1]
    assert kinds == ["enrol"]


def test_a_name_that_no_site_may_have_is_not_repeated(bench: Bench) -> None:
    grid = bench.grid()
    second_site(grid, site="ward\n7 \x1b[2J")
    ((_, told),) = summary(bench.run(grid))["refused"].items()
    assert told.startswith("the node's configuration is wrong")

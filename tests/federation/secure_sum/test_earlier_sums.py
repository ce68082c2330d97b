"""Two sums of the same tensors, of which one lacks a site, at real sites."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, Message

from client_app.protocol.earlier_sums import require_same_sites
from espalier.errors import InputError
from espalier.messages.records import read, write
from strategies.base.rounds import RunFailed
from tests.bench import Bench, model_files, summary
from tests.in_process import InProcessGrid
from tests.methods.promises.secure_sum_promises import silent_from


@pytest.fixture
def deployment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return a bench whose server treats its grid as a deployment."""
    monkeypatch.setattr("espalier.flower.shared_nodes.GRIDS", ())
    bench.settings = bench.settings | {"quorum": 0.6}
    return bench


def sites_of(bench: Bench, *, silent: bool, **changes: Any) -> InProcessGrid:
    """Return a grid of four real sites; the last one may be silent from ``train`` on."""
    nodes = [
        {
            "site": f"site-{number}",
            "data-path": str(bench.folder / f"text-{number}.txt"),
            "model-path": str(bench.model),
            "min-tokens": 1,
            "min-secure-sum": 3,
            "state-dir": str(bench.folder / "state"),
        }
        for number in range(4)
    ]
    grid = InProcessGrid(bench.grid().app, nodes, bench.config(**changes))
    grid.simulated = False
    if silent:
        last = list(grid.contexts)[-1]
        drop = silent_from("train")
        # Real sites have no number of a partition.
        grid.tamper[-1] = lambda request, reply: (
            drop(request, reply) if request.metadata.dst_node_id == last else reply
        )
    return grid


def run(bench: Bench, *, silent: bool, **changes: Any) -> Path:
    return bench.run(sites_of(bench, silent=silent, **changes), **changes)


def test_a_site_s_tensors_are_in_sums_of_the_same_sites_only(deployment: Bench) -> None:
    first = run(deployment, silent=False)
    # The tensors of the silent site would be the difference of both sums.
    with pytest.raises(RunFailed, match="with other sites; the difference") as error:
        run(deployment, silent=True)
    assert "the sum stays masked" in str(error.value)
    assert str(deployment.folder / "state") not in str(error.value)
    # The same sites may be summed again, and other tensors too.
    assert model_files(run(deployment, silent=False)) == model_files(first)
    other = summary(run(deployment, silent=True, seed=5))
    assert [client["status"] for client in other["clients"]] == ["completed"] * 3 + ["dropped"]
    folder = deployment.folder / "state" / "sums" / "site-0"
    assert [file.stat().st_mode & 0o77 for file in folder.glob("*.json")] == [0, 0]


def test_one_tensor_of_a_sum_is_enough(deployment: Bench) -> None:
    """Block by block the first round has the sums of the first block of a dense pass."""
    pooled = {"method": "pooled-pruning"}
    run(deployment, silent=False, **pooled)
    with pytest.raises(RunFailed, match="with other sites; the difference"):
        run(deployment, silent=True, **pooled, pruning__strategy="iterative")
    # The same sites may be summed again.
    run(deployment, silent=False, **pooled, pruning__strategy="iterative")


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "fedprllm", "pruning__metric": "magnitude"},
        {
            "method": "fedspallm", "fedspallm__local_method": "magnitude",
            "fedspallm__capabilities": "1", "federation__rounds": 2,
        },
    ],
)  # fmt: skip
def test_masks_that_do_not_depend_on_text_may_be_summed_again(
    deployment: Bench, changes: dict[str, Any]
) -> None:
    run(deployment, silent=False, **changes)
    found = summary(run(deployment, silent=True, **changes))
    assert [client["status"] for client in found["clients"]] == ["completed"] * 3 + ["dropped"]


def test_a_round_that_was_not_announced_is_refused(
    deployment: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """It would prune the same layers with the same samples again, perhaps with other sites."""
    changes = {"method": "fedspallm", "fedspallm__capabilities": "1"}
    grid = sites_of(deployment, silent=False, **changes)
    answer = grid.answer

    def as_second_round(message: Message, context: Context) -> Message:
        body = read(message.content)
        if body.header.kind == "train":
            header = body.header.model_copy(update={"server_round": 2})
            message.content = write(replace(body, header=header))
        return answer(message, context)

    grid.answer = as_second_round
    with pytest.raises(RunFailed, match="0 clients sent their keys"):
        deployment.run(grid, **changes)
    assert caplog.text.count("min-secure-sum = 3: in 2 rounds with the same samples") == 4


def test_small_tensors_count_together(deployment: Bench) -> None:
    """A matrix of rank 2 has four numbers, which may be those of another run by chance."""
    small = {"method": "fed-sb", "lora__rank": 2, "federation__rounds": 1}
    run(deployment, silent=False, **small)
    with pytest.raises(RunFailed, match="with other sites; the difference"):
        run(deployment, silent=True, **small)


def test_the_smaller_sum_first(deployment: Bench) -> None:
    run(deployment, silent=True)
    with pytest.raises(RunFailed, match="with other sites; the difference"):
        run(deployment, silent=False)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"sites": 3}', b"[" * 10**5])
def test_a_site_with_a_damaged_record_does_not_help(tmp_path: Path, content: bytes) -> None:
    node = SimpleNamespace(simulated=False, min_secure_sum=3, state_root=lambda: tmp_path)
    site: Any = SimpleNamespace(node=node, name="site-0")
    sites = ["site-0", "site-1", "site-2"]
    for _ in range(2):
        require_same_sites(site, "masks", {"a" * 64, "b" * 64}, sites, keep=True)
    (record,) = (tmp_path / "sums" / "site-0").glob("*.json")
    record.write_bytes(content)
    with pytest.raises(InputError, match=r"earlier sums is damaged.*another seed") as error:
        require_same_sites(site, "masks", {"a" * 64}, sites, keep=True)
    assert str(record) in str(error.value)
    assert str(tmp_path) not in error.value.outward

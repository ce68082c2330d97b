"""Secure sums of real sites, whose keys are signed."""

import shutil
from typing import Any

import pytest
from flwr.app import Message

from espalier.messages.records import read, write
from strategies.base.rounds import RunFailed
from tests.bench import Bench, model_files, summary
from tests.in_process import InProcessGrid

SITES = ("hospital-a", "hospital-b", "hospital-c")


@pytest.fixture
def deployment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return a bench whose server treats its grid as a deployment, with keys for three sites."""
    from espalier.cli.keys import make_keys

    monkeypatch.setattr("espalier.flower.shared_nodes.GRIDS", ())
    list(make_keys(bench.folder / "keys", ["localhost"], SITES, 365))
    bench.num_clients = 3
    bench.settings = bench.settings | {
        "site-keys": str(bench.folder / "keys" / "server" / "sites"),
        "quorum": 0.6,
    }
    # A site gets the public keys of the others from them, and not from the server.
    shutil.copytree(bench.folder / "keys" / "server" / "sites", bench.folder / "peers")
    return bench


def sites_of(bench: Bench, changes: dict[str, Any] | None = None, **more: Any) -> InProcessGrid:
    """Return a grid of real sites with their keys and the public keys of the others.

    ``changes`` are those of the run's settings, ``more`` those of the nodes' configuration.
    """
    nodes = [
        {
            "site": site,
            "site-key": str(bench.folder / "keys" / "sites" / site / f"{site}.key"),
            "peer-keys": str(bench.folder / "peers"),
            "data-path": str(bench.folder / f"text-{number}.txt"),
            "model-path": str(bench.model),
            "min-tokens": 1,
            "state-dir": str(bench.folder / "state"),
            **{key.replace("_", "-"): value for key, value in more.items()},
        }
        for number, site in enumerate(SITES)
    ]
    grid = InProcessGrid(bench.grid().app, nodes, bench.config(**(changes or {})))
    grid.simulated = False
    return grid


def test_sites_sum_with_signed_keys(deployment: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(deployment.folder / "other")
    folder = deployment.run(sites_of(deployment, require_site_keys=True, min_secure_sum=3))
    assert [client["status"] for client in summary(folder)["clients"]] == ["completed"] * 3
    assert "nothing shows that the keys" not in capsys.readouterr().err
    changes = {"federation__secure_sum": False, "site_keys": ""}
    plain = deployment.run(sites_of(deployment, changes, state_dir=other), **changes)
    assert model_files(folder) == model_files(plain)


def test_a_server_cannot_replace_keys_of_a_site(deployment: Bench) -> None:
    """It gives hospital-a its own keys in place of those of hospital-b."""
    grid = sites_of(deployment)
    answer = grid.answer

    def between(message: Message, context: Any) -> Message:
        body = read(message.content)
        if body.header.kind == "shares" and context.node_config["site"] == SITES[0]:
            body.fields["mask_keys"][1] = "ab" * 32
            message.content = write(body)
        return answer(message, context)

    grid.answer = between  # type: ignore[method-assign]
    with pytest.raises(
        RunFailed, match="the keys of site hospital-b are not signed with its key"
    ) as error:
        deployment.run(grid)
    assert "nothing was unmasked" in str(error.value)


def test_keys_of_unknown_sites_are_refused(deployment: Bench) -> None:
    (deployment.folder / "peers" / "hospital-c.key.pub").unlink()
    with pytest.raises(RunFailed, match=r"put hospital-c\.key\.pub there"):
        deployment.run(sites_of(deployment))


def test_a_site_without_peer_keys_warns(
    deployment: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment.run(sites_of(deployment, peer_keys=""))
    assert capsys.readouterr().err.count("nothing shows that the keys of this secure sum are") == 3


@pytest.mark.parametrize(
    ("more", "changes", "reason"),
    [
        (
            {"require_site_keys": True, "peer_keys": ""},
            {},
            (
                "require-site-keys: without peer-keys the server could use the names of the other"
                " sites"
            ),
        ),
        ({"min_secure_sum": 4}, {}, "min-secure-sum = 4: the sum of a round has 3 clients"),
        (
            {"min_secure_sum": 3},
            {"federation__secure_sum": False},
            "min-secure-sum = 3: the server would see this site's own reply",
        ),
        (
            {"min_secure_sum": 3},
            {"evaluation__local_baseline": True},
            "min-secure-sum = 3: the losses of this site's own model would leave it without a sum",
        ),
        (
            {"min_secure_sum": 3},
            {"method": "fedspallm", "fedspallm__capabilities": "1", "federation__rounds": 2},
            "min-secure-sum = 3: in 2 rounds with the same samples.*set federation.rounds = 1",
        ),
    ],
)
def test_a_site_demands_secure_sums(
    deployment: Bench, more: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RunFailed, match=reason):
        deployment.run(sites_of(deployment, changes, **more), **changes)


def test_one_approval_covers_a_round(deployment: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person sees the plain tensors once; masked tensors and shares then leave with them."""
    from client_app.policy import approval
    from client_app.policy.approval_command import decide, waiting_in

    shown = list[int]()

    def approve(_: float) -> None:
        found, _ = waiting_in(deployment.folder / "state")
        shown.extend(len(waiting.blobs) for _, waiting in found)
        list(decide(deployment.folder / "state", found, approved=True))

    monkeypatch.setattr(approval, "pause", approve)
    folder = deployment.run(sites_of(deployment, require_approval="tensors"))
    assert [client["status"] for client in summary(folder)["clients"]] == ["completed"] * 3
    assert shown == [2] * 3

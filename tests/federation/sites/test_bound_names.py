"""Runs with names bound to keys: real sites, the real server, and the signatures of nodes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from client_app.node.check_node import look
from espalier.cli.keys import make_keys
from espalier.errors import EspalierError
from espalier.messages.message import SCHEMA_VERSION, Header, MessageBody
from espalier.messages.records import address, read
from tests.bench import Bench, results, summary
from tests.in_process import InProcessGrid
from tests.run_names import BY_HAND

SITES = ("hospital-a", "hospital-b")
NONCE = "0f" * 32


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return a bench whose server treats its grid as a deployment, with keys for its two sites."""
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("espalier.flower.shared_nodes.GRIDS", ())
    list(make_keys(tmp_path / "keys", ["localhost"], SITES, 365))
    settings = {"site-keys": str(tmp_path / "keys" / "server" / "sites"), "quorum": 0.5}
    return Bench(tmp_path, "fedprllm", {"pruning.strategy": "iterative"} | settings, num_clients=2)


def key_of(bench: Bench, site: str) -> str:
    return str(bench.folder / "keys" / "sites" / site / f"{site}.key")


def grid_of(
    bench: Bench, *nodes: dict[str, Any], state: str = "state", **changes: Any
) -> InProcessGrid:
    """Return a grid of real nodes with their keys.

    There is one node per site or per entry of ``nodes``, whichever is more. Entries of ``nodes``
    change the configuration of their node; None removes a key.
    """
    made = []
    for number, more in enumerate([*nodes, *({} for _ in SITES[len(nodes) :])]):
        site = SITES[number % len(SITES)]
        own = {
            "data-path": str(bench.folder / f"text-{number % len(SITES)}.txt"),
            "model-path": str(bench.model),
        }
        key = {
            "site": site,
            "site-key": key_of(bench, site),
            "state-dir": str(bench.folder / state),
        }
        made.append(
            {
                key: value
                for key, value in ({**own, **key, "min-tokens": 1} | more).items()
                if value is not None
            }
        )
    grid = InProcessGrid(bench.grid().app, made, bench.config(**changes))
    grid.simulated = False
    return grid


def ledger(folder: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in entry.items() if name != "lineage"} for entry in entries
    ]


# ----- runs ---------------------------------------------------------------------------------------


def test_keys_change_no_byte_of_a_result(bench: Bench) -> None:
    with_keys = [bench.run(grid_of(bench, state=f"state-{run}")) for run in range(2)]
    claimed = bench.run(grid_of(bench, state="state-2", site_keys=""), site_keys="")
    assert [client["site"] for client in summary(with_keys[0])["clients"]] == list(SITES)
    assert results(with_keys[0]) == results(with_keys[1]) == results(claimed)
    assert ledger(with_keys[0]) == ledger(with_keys[1])


def test_sites_sign_again_for_resumed_server(bench: Bench) -> None:
    """The directory of keys has moved. An impostor that enrols first does not become hospital-b."""
    whole = bench.run(grid_of(bench, state="others"))
    killed = bench.killed(
        lambda header: (header.kind, header.server_round) == ("train", 2), grid_of(bench)
    )
    moved = str(shutil.move(bench.folder / "keys" / "server" / "sites", bench.folder / "moved"))
    changes = {"resume_from": str(killed), "site_keys": moved}
    impostor = {"site": SITES[1], "site-key": key_of(bench, SITES[0])}
    resumed = bench.run(grid_of(bench, {}, {}, impostor, **changes), **changes)
    assert results(resumed) == results(whole)
    ((who, why),) = summary(resumed)["refused"].items()
    assert who.startswith("node ")
    assert why == "claims to be hospital-b, but does not have the key of hospital-b in site-keys"


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (
            {"site-key": None},
            ("claims to be hospital-b: site-key: sites of this run prove their names with keys"),
        ),
        (
            {"site": "hospital-c"},
            (
                "claims to be hospital-c, but site-keys has no key of this site; put"
                " hospital-c.key.pub there"
            ),
        ),
        (
            {"site-key": "/no/such"},
            "claims to be hospital-b: the node's configuration is wrong: site-key = '/no/such'",
        ),
    ],
)
def test_site_without_valid_signature_is_dropped(
    bench: Bench, node: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    document = summary(bench.run(grid_of(bench, {}, node)))
    assert document["status"] == "completed"
    assert [client["site"] for client in document["clients"]] == ["hospital-a"]
    (why,) = document["refused"].values()
    assert words in why
    assert "PRIVATE" not in caplog.text


def test_invalid_key_directory_ends_run_early(bench: Bench) -> None:
    grid = grid_of(bench)
    sent = list[Any]()
    grid.before_push = sent.append
    with pytest.raises(EspalierError, match="site-keys = '/no/such': cannot be read"):
        bench.run(grid, site_keys="/no/such")
    assert (sent, bench.runs()) == ([], set())


def test_in_simulation_there_are_no_keys(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(EspalierError, match="simulated clients have no keys"):
        bench.run(grid_of(bench))


# ----- signatures of a site -----------------------------------------------------------------------


def ask(bench: Bench, fields: dict[str, Any], **changes: Any) -> MessageBody:
    """Return the answer of hospital-a to an enrolment request."""
    grid = grid_of(bench, **changes)
    common = {
        "schema_version": SCHEMA_VERSION,
        "client": -1,
        "attempt": 1,
        "part": 0,
        "num_parts": 1,
        "server_round": 0,
    }
    header = Header.model_validate(
        common | {"kind": "enrol", "method": "fedprllm", "lineage": BY_HAND}
    )
    (node_id, context), *_ = grid.contexts.items()
    return read(grid.answer(address(MessageBody(header, fields), node_id, 60.0), context).content)


def test_signature_covers_request_run_and_node(bench: Bench) -> None:
    """The signature is verified by hand, with the public key next to the private one."""
    told = dict(ask(bench, {"nonce": NONCE}).fields)
    signature = str(told.pop("signature"))
    document = {"fields": told, "nonce": NONCE, "lineage": BY_HAND, "node": 1000}
    text = b"espalier: a site says its name (1)\n" + json.dumps(document, sort_keys=True).encode()
    key = load_ssh_public_key(Path(f"{key_of(bench, SITES[0])}.pub").read_bytes())
    assert isinstance(key, ec.EllipticCurvePublicKey)
    key.verify(
        encode_dss_signature(int(signature[:96], 16), int(signature[96:], 16)),
        text,
        ec.ECDSA(SHA384()),
    )
    assert told["site"] == "hospital-a"


@pytest.mark.parametrize(
    ("fields", "site_keys"),
    [
        ({}, "sites"),
        ({"nonce": ""}, "sites"),
        ({"nonce": NONCE[:-2]}, "sites"),
        ({"nonce": "2026-01-01T00:00:00"}, "sites"),
        ({"nonce": NONCE, "site": "hospital-b"}, "sites"),
        ({"nonce": NONCE}, ""),
    ],
)
def test_it_signs_nothing_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], site_keys: str
) -> None:
    """A site does not sign in a run without keys either, even if the request has a nonce."""
    monkeypatch.setattr(
        "client_app.policy.identity.private_key", lambda path: pytest.fail("the key was read")
    )
    reply = ask(bench, fields, site_keys=site_keys)
    assert reply.header.status == "failed"
    assert reply.fields.keys() == {"reason", "lost"}


def test_a_run_without_keys_gets_no_signature(bench: Bench) -> None:
    reply = ask(bench, {}, site_keys="")
    assert reply.header.status == "ok"
    assert "signature" not in reply.fields


def test_egress_log_has_names_without_values(bench: Bench) -> None:
    signature = ask(bench, {"nonce": NONCE}).fields["signature"]
    (log,) = (bench.folder / "state" / "egress").iterdir()
    assert "signature" in json.loads(log.read_text())["fields"]
    assert str(signature) not in log.read_text()
    assert NONCE not in log.read_text()


# ----- check-node ---------------------------------------------------------------------------------


def test_check_node_looks_at_the_key(bench: Bench) -> None:
    context, *_ = grid_of(bench).contexts.values()
    run = bench.config()
    node = dict(context.node_config)
    (line,) = [line for line in look(node, run) if line.startswith("site-key")]
    assert line.startswith(f"site-key   {node['site-key']}: SHA256:")
    assert [
        line for line in look(node, run | {"site-keys": ""}) if line.startswith("site-key")
    ] == [line]
    del node["site-key"]
    with pytest.raises(
        EspalierError, match="site-key: sites of this run prove their names with keys"
    ):
        list(look(node, run))
    assert not [line for line in look(node, run | {"site-keys": ""}) if line.startswith("site-key")]
    Path(key_of(bench, SITES[0])).chmod(0o640)
    with pytest.raises(EspalierError, match="other users of this machine can read it"):
        list(look(node | {"site-key": key_of(bench, SITES[0])}, run | {"site-keys": ""}))

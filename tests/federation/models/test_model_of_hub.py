"""Runs whose model is named by its place on the Hugging Face hub, served on this machine."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from tests.bench import Bench, summary
from tests.federation.sites.one_site import OneSite
from tests.hf.hub_server import COMMIT, Hub, serving
from tests.run_names import named

TUNING = {
    "lora.rank": 2, "lora.targets": "attn.q", "training.steps": 2, "training.batch-size": 2,
    "federation.rounds": 2,
}  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    return Bench(tmp_path, "fedpetuning", TUNING, num_clients=2)


@pytest.fixture
def hub(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(bench.model, tmp_path / "cache", monkeypatch) as found:
        yield found


def test_result_names_model_and_commit(bench: Bench, hub: Hub) -> None:
    path = bench.run(model="ward/tiny")
    document = summary(path)
    assert (document["model"], document["model_revision"]) == ("ward/tiny", COMMIT)
    assert document["finished"] == 2
    config = json.loads((path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "ward/tiny"
    assert config["revision"] == COMMIT
    card = (path / "adapter" / "README.md").read_text()
    assert f"| base model | `ward/tiny` at commit `{COMMIT}`; SHA-256 of" in card
    assert "base_model: ward/tiny\n" in card
    assert tomllib.loads((path / "settings.toml").read_text())["model"] == f"ward/tiny@{COMMIT}"
    local = summary(bench.run())
    assert (local["model"], local["model_revision"]) == ("base", None)
    assert local["metrics"] == document["metrics"]


def test_resumed_run_keeps_its_commit(bench: Bench, hub: Hub) -> None:
    path = bench.killed(lambda header: header.server_round == 2, model="ward/tiny")
    hub.commit = "d" * 40
    resumed = bench.run(model="ward/tiny", resume_from=str(path))
    assert summary(resumed)["model_revision"] == COMMIT
    with pytest.raises(EspalierError, match=f"model was 'ward/tiny@{COMMIT}', is 'ward/tiny@d+'"):
        bench.run(model=f"ward/tiny@{hub.commit}", resume_from=str(path))


def test_a_site_downloads_nothing_by_itself(
    bench: Bench, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = OneSite(bench, {"model-path": ""}, model="ward/tiny")
    told = site.refusal("enrol")
    assert told.startswith("model-path: this site names no base model")
    assert "(model = 'ward/tiny'); set model-path in --node-config, or models=hub" in told
    # A run cannot name a directory of the site either.
    monkeypatch.chdir(tmp_path)
    for node, model in (({}, str(bench.model)), ({"models": "hub"}, str(bench.model))):
        site = OneSite(bench, {"model-path": "", **node}, model=model)
        assert "this site names no base model" in site.refusal("enrol", lineage=named("b"))
    assert not hub.requests


def test_owner_may_allow_models_of_the_hub(
    bench: Bench, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = OneSite(bench, {"model-path": "", "models": "hub"}, model="ward/tiny")
    # A directory of the site that has the model's name is not opened.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ward" / "tiny").mkdir(parents=True)
    enrolled = site.ask("enrol")
    assert enrolled.fields["model_sha256"] == OpenedModel(bench.model).sha256
    # All messages of the run use the commit of its enrolment, and ask the hub nothing.
    hub.commit = "d" * 40
    requests = hub.requests
    reply = site.ask("train", fields={"rank_limit": 2})
    assert reply.header.status == "ok", reply.fields
    assert hub.requests == requests
    assert site.ask("enrol").fields["model_sha256"] == enrolled.fields["model_sha256"]


def test_refusal_of_a_site_names_no_path(bench: Bench, hub: Hub, tmp_path: Path) -> None:
    site = OneSite(bench, {"model-path": "", "models": "hub"}, model="ward/none")
    told = site.refusal("enrol")
    assert told == (
        "model = 'ward/none': this site could not get it from the hub; the node's log gives the"
        " reason"
    )


def test_a_site_s_own_model_comes_first(bench: Bench, hub: Hub) -> None:
    site = OneSite(bench, {"models": "hub"}, model="ward/tiny")
    assert site.ask("enrol").header.status != "failed"
    assert not hub.requests

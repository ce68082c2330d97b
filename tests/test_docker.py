"""What can be checked of the containers without a Docker engine."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from espalier.launch.command import _parser
from espalier.settings.node import parse_node

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
COMPOSE_FILES = ("compose.yaml", "compose.cuda.yaml")
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
IMAGES = ("Dockerfile", "Dockerfile.cuda")
DOCUMENTED = {
    name: shlex.split(re.search(r"docker compose -f docker/compose.yaml up[^`\n]*", (ROOT / name).read_text())[0])
    for name in ("docs/deployment.md", "docker/compose.yaml")
}
"""The command that starts all, where it is written."""
SITES = ["hospital-a", "hospital-b", "hospital-c"]


def after(option: str, words: list[str]) -> str:
    return words[words.index(option) + 1]


def started_by(command: list[str]) -> set[str]:
    """Services that ``docker compose ... up [SERVICE...]`` starts: those named and all that they depend on; none named, all."""
    words = shlex.split(re.sub(r"--exit-code-from \S+", "", shlex.join(command[command.index("up") + 1 :])))
    waiting, started = [word for word in words if not word.startswith("-")] or list(SERVICES), set()
    while waiting:
        if (name := waiting.pop()) not in started:
            started.add(name)
            waiting += SERVICES[name].get("depends_on", {})
    return started


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_files_are_what_their_schema_says(name: str) -> None:
    done = CliRunner().invoke(check_jsonschema, ["--builtin-schema", "vendor.compose-spec", str(DOCKER / name)])
    assert done.exit_code == 0, done.output


def test_the_file_for_gpus_changes_services_that_there_are() -> None:
    document = yaml.safe_load((DOCKER / "compose.cuda.yaml").read_text())
    assert document["services"].keys() == SERVICES.keys()
    for name, service in document["services"].items():
        assert service["image"] == "espalier-cuda"
        assert ("build" in service) == (name == "superlink") == ("build" in SERVICES[name])
        assert ("deploy" in service) == (name in SITES)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_holds_every_room_that_is_installed(name: str) -> None:
    tools, dockerfile = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"], (DOCKER / name).read_text()
    rooms = {pattern.split("/")[0] for pattern in tools["flwr"]["app"]["fab-include"]}
    rooms |= {*tools["hatch"]["build"]["targets"]["wheel"]["packages"], "conf"}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for room in rooms:
        assert f"COPY {room} {room}" in dockerfile
        assert f"!{room}" in ignored


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_pinned_and_not_root_s(name: str) -> None:
    """Bases by their whole version, torch by the one that constraints.txt names, the rest by that file."""
    lines = (DOCKER / name).read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert all(re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base) for base in bases)
    (torch,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    (installed,) = [line for line in lines if "pip install --index-url" in line]
    assert installed.endswith(f" {torch}")
    assert any("pip install -c constraints.txt" in line for line in lines)
    users = [line for line in lines if line.startswith("USER")]
    assert users == ["USER espalier"]
    assert not [line for line in lines[lines.index("USER espalier") :] if line.startswith(("RUN", "COPY"))]


@pytest.mark.parametrize("name", IMAGES)
def test_all_that_an_image_copies_reaches_the_builder(name: str) -> None:
    copied = [
        word
        for line in (DOCKER / name).read_text().splitlines()
        if line.startswith("COPY") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "constraints.txt"} <= set(copied)
    assert {f"!{word}" for word in copied} <= set((ROOT / ".dockerignore").read_text().splitlines())
    assert all((ROOT / word).exists() for word in copied)


def test_an_image_has_the_compiler_that_counting_on_a_cuda_device_needs() -> None:
    last = (DOCKER / "Dockerfile.cuda").read_text().split("FROM")[-1]
    assert "gcc libc6-dev" in last
    assert "gcc" not in (DOCKER / "Dockerfile").read_text()


def test_every_site_describes_itself_validly_and_under_its_own_name(tmp_path: Path) -> None:
    """Its key, its text and its state are where its volumes are, and no other site's."""
    texts = []
    for name in SITES:
        words, volumes = SERVICES[name]["command"], SERVICES[name]["volumes"]
        given = after("--node-config", words)
        here = re.sub(r'"/(?:keys|data)/([^"]+)"', lambda place: f'"{tmp_path / place[1]}"', given)
        for place in ("notes.txt", f"{name}.key"):
            (tmp_path / place).touch(mode=0o600)
        settings = parse_node(tomllib.loads("\n".join(shlex.split(here.replace('"', "'\"'")))))
        assert settings.site == name
        assert given.count(name) == 2
        assert f"/keys/{name}.key" in given
        assert after("--auth-supernode-private-key", words) == f"/keys/{name}.key"
        (keys,) = [volume for volume in volumes if isinstance(volume, dict)]
        assert (keys["volume"]["subpath"], keys["read_only"]) == (f"sites/{name}", True)
        assert f"{name}-state:/state" in volumes
        texts += [
            volume.split(":")[0] for volume in volumes if isinstance(volume, str) and volume.endswith("/data/notes.txt:ro")
        ]
    assert len(set(texts)) == len(SITES)
    assert all((DOCKER / text).is_file() for text in texts)


@pytest.mark.parametrize("place", sorted(DOCUMENTED))
def test_the_documented_command_starts_the_superlink_and_as_many_sites_as_the_run_asks_for(place: str) -> None:
    started = started_by(DOCUMENTED[place])
    assert started == SERVICES.keys()
    assert after("--exit-code-from", DOCUMENTED[place]) == "run"
    given = _parser().parse_args(SERVICES["run"]["command"][1:])
    assert (DOCKER.parent / "conf" / f"{given.words[0]}.toml").exists()
    assert f"num-clients={len(SITES)}" in given.words
    assert given.superlink == after("--control-api-address", SERVICES["superlink"]["command"])


def test_only_the_fleet_api_can_be_reached_from_another_container() -> None:
    """The command that starts the run shares the SuperLink's loopback address; nothing is published on the host."""
    listening = {}
    for name, service in SERVICES.items():
        words = service["command"]
        listening |= {(name, word): words[place + 1] for place, word in enumerate(words) if word.endswith("-api-address")}
        assert "ports" not in service
    assert listening == {
        ("superlink", "--fleet-api-address"): "0.0.0.0:9092",
        ("superlink", "--control-api-address"): "127.0.0.1:9093",
        ("superlink", "--serverappio-api-address"): "127.0.0.1:9091",
    }
    assert SERVICES["run"]["network_mode"] == "service:superlink"
    assert "--insecure" not in (DOCKER / "compose.yaml").read_text()


def test_volumes_are_declared_and_services_wait_for_the_superlink() -> None:
    named = [volume for service in SERVICES.values() for volume in service.get("volumes", [])]
    used = {volume["source"] if isinstance(volume, dict) else volume.split(":")[0] for volume in named}
    assert {name for name in used if not name.startswith("..")} == set(COMPOSE["volumes"])
    assert all("superlink" in service["depends_on"] for name, service in SERVICES.items() if name != "superlink")

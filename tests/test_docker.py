"""What can be checked of the containers without a Docker engine."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from espalier.launch.command import _parser
from espalier.settings.node import parse_node

ROOT = Path(__file__).parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
DOCUMENTED = {
    name: shlex.split(re.search(r"docker compose -f docker/compose.yaml up[^`\n]*", (ROOT / name).read_text())[0])
    for name in ("docs/deployment.md", "docker/compose.yaml")
}
"""The command that starts all, where it is written."""


def started_by(command: list[str]) -> set[str]:
    """Services that ``docker compose ... up [SERVICE...]`` starts: those named and all that they depend on; none named, all."""
    words = [word for word in command[command.index("up") + 1 :] if not word.startswith("-")]
    waiting, started = words or list(COMPOSE["services"]), set()
    while waiting:
        if (name := waiting.pop()) not in started:
            started.add(name)
            waiting += COMPOSE["services"][name].get("depends_on", {})
    return started


def test_the_image_holds_every_room_that_is_installed() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    rooms = {pattern.split("/")[0] for pattern in tools["flwr"]["app"]["fab-include"]}
    rooms |= {*tools["hatch"]["build"]["targets"]["wheel"]["packages"], "conf"}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for room in rooms:
        assert f"COPY {room} {room}" in DOCKERFILE
        assert f"!{room}" in ignored


def test_the_image_holds_what_pip_needs_to_install_the_project() -> None:
    (copied,) = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY pyproject.toml")]
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE"} <= set(copied)
    assert {f"!{name}" for name in copied} <= set((ROOT / ".dockerignore").read_text().splitlines())


def test_the_image_has_the_compiler_that_counting_on_a_cuda_device_needs() -> None:
    assert "gcc libc6-dev" in DOCKERFILE


def test_every_site_describes_itself_validly_and_under_its_own_name() -> None:
    sites = []
    for name, service in COMPOSE["services"].items():
        if service["command"][0] == "flower-supernode":
            given = service["command"][service["command"].index("--node-config") + 1]
            settings = parse_node(tomllib.loads("\n".join(shlex.split(given.replace('"', "'\"'")))))
            assert settings.site == name
            sites.append(settings.site)
    assert sites == ["hospital-a", "hospital-b"]


@pytest.mark.parametrize("place", sorted(DOCUMENTED))
def test_the_documented_command_starts_the_superlink_and_as_many_sites_as_the_run_asks_for(place: str) -> None:
    started = started_by(DOCUMENTED[place])
    programs = [COMPOSE["services"][name]["command"][0] for name in started]
    given = _parser().parse_args(COMPOSE["services"]["run"]["command"][1:])
    preset = tomllib.loads((ROOT / "conf" / f"{given.words[0]}.toml").read_text())
    assert programs.count("flower-supernode") == preset["num-clients"]
    assert (programs.count("flower-superlink"), programs.count("espalier")) == (1, 1)
    assert started == COMPOSE["services"].keys()


def test_the_run_uses_a_preset_that_exists_and_asks_for_as_many_clients_as_there_are_sites() -> None:
    given = _parser().parse_args(COMPOSE["services"]["run"]["command"][1:])
    preset = tomllib.loads((ROOT / "conf" / f"{given.words[0]}.toml").read_text())
    assert preset["num-clients"] == 2
    assert given.superlink == "127.0.0.1:9093"


def test_only_the_fleet_api_can_be_reached_from_another_container() -> None:
    """The command that starts the run shares the SuperLink's loopback address; nothing is published on the host."""
    services = COMPOSE["services"]
    listening = {}
    for name, service in services.items():
        words = service["command"]
        listening |= {(name, word): words[place + 1] for place, word in enumerate(words) if word.endswith("-api-address")}
        assert "ports" not in service
    assert listening == {
        ("superlink", "--fleet-api-address"): "0.0.0.0:9092",
        ("superlink", "--control-api-address"): "127.0.0.1:9093",
        ("superlink", "--serverappio-api-address"): "127.0.0.1:9091",
        ("hospital-a", "--clientappio-api-address"): "127.0.0.1:9094",
        ("hospital-b", "--clientappio-api-address"): "127.0.0.1:9094",
    }
    assert services["run"]["network_mode"] == "service:superlink"


def test_volumes_are_declared_and_services_wait_for_the_superlink() -> None:
    used = {volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service.get("volumes", [])}
    assert used == set(COMPOSE["volumes"])
    assert all("superlink" in service["depends_on"] for name, service in COMPOSE["services"].items() if name != "superlink")

"""What can be checked of the containers without a Docker engine."""

import shlex
import tomllib
from pathlib import Path

import yaml

from espalier.launch.command import _parser
from espalier.settings.node import parse_node

ROOT = Path(__file__).parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


def test_the_image_holds_every_room_that_is_installed() -> None:
    rooms = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for room in [*rooms, "conf"]:
        assert f"COPY {room} {room}" in DOCKERFILE
        assert f"!{room}" in ignored


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


def test_the_run_uses_a_preset_that_exists_and_asks_for_as_many_clients_as_there_are_sites() -> None:
    given = _parser().parse_args(COMPOSE["services"]["run"]["command"][1:])
    preset = tomllib.loads((ROOT / "conf" / f"{given.words[0]}.toml").read_text())
    assert preset["num-clients"] == 2
    assert given.superlink == "superlink:9093"


def test_volumes_are_declared_and_services_wait_for_the_superlink() -> None:
    used = {volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service.get("volumes", [])}
    assert used == set(COMPOSE["volumes"])
    assert all("superlink" in service["depends_on"] for name, service in COMPOSE["services"].items() if name != "superlink")

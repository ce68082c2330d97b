"""Checks of the containers without a container engine.

``pytest -m containers`` runs them on an engine.

"""

import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from espalier.cli.command import _parser
from espalier.launch.presets import preset_files
from espalier.settings.node import parse_node

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE_FILES = ("compose.yaml", "compose.cuda.yaml")
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
MAX_LINES = 96
IMAGES = ("Dockerfile", "Dockerfile.cuda")
DOCUMENTED = "docker compose -f docker/compose.yaml run --rm run"
SITES = ["hospital-a", "hospital-b", "hospital-c"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def program(name: str) -> ModuleType:
    """Import a program of the image, which belongs to no package."""
    specification = importlib.util.spec_from_file_location(f"image_{name}", DOCKER / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def words_of(service: str) -> list[str]:
    return shlex.split(SERVICES[service]["command"])


def after(option: str, words: list[str]) -> str:
    return words[words.index(option) + 1]


def mounts(service: str) -> dict[str, tuple[str, bool]]:
    """Return a service's mounts: path in the container -> (source, whether it is writable)."""
    parts = [volume.split(":") for volume in SERVICES[service].get("volumes", [])]
    return {part[1]: (part[0], part[2:] != ["ro"]) for part in parts}


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_files_are_what_their_schema_says(name: str) -> None:
    done = CliRunner().invoke(
        check_jsonschema, ["--builtin-schema", "vendor.compose-spec", str(DOCKER / name)]
    )
    assert done.exit_code == 0, done.output


def test_compose_file_is_short_and_portable() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    assert len(text.splitlines()) <= MAX_LINES
    # docker-compose 1.29 refuses `name`.
    assert COMPOSE.keys() == {"x-espalier", "x-site", "x-times", "services", "volumes"}
    for service in SERVICES.values():
        # Docker below version 26 drops `subpath`.
        assert all(isinstance(volume, str) for volume in service["volumes"])
        # Podman has no health checks without systemd.
        assert isinstance(service.get("depends_on", []), list)


def test_nothing_is_pulled_and_servers_restart() -> None:
    for name, service in SERVICES.items():
        assert service["build"] == {"context": "..", "dockerfile": "docker/Dockerfile"}
        assert service["pull_policy"] == "never"
        assert service["init"] is True
        assert service.get("restart") == (None if name == "run" else "unless-stopped")


def test_gpu_file_changes_existing_services() -> None:
    document = yaml.safe_load((DOCKER / "compose.cuda.yaml").read_text())
    assert document["services"].keys() == SERVICES.keys()
    for name, service in document["services"].items():
        assert service["image"] == "${ESPALIER_IMAGE:-espalier-cuda}"
        assert service["build"] == {"context": "..", "dockerfile": "docker/Dockerfile.cuda"}
        assert ("deploy" in service) == (name in SITES)


@pytest.mark.parametrize("name", IMAGES)
def test_image_has_every_installed_package(name: str) -> None:
    tools = PROJECT["tool"]
    dockerfile = (DOCKER / name).read_text()
    packages = {pattern.split("/")[0] for pattern in tools["flwr"]["app"]["fab-include"]}
    packages |= {*tools["hatch"]["build"]["targets"]["wheel"]["packages"], "conf"}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for package in packages:
        assert f"COPY {package} {package}" in dockerfile
        assert f"!{package}" in ignored


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_pinned_and_not_root_s(name: str) -> None:
    """The base image is pinned by digest, torch and other libraries by constraints.txt.

    The package index can be replaced.
    """
    lines = (DOCKER / name).read_text().splitlines()
    (base,) = [line for line in lines if line.startswith("ARG BASE=")]
    assert re.fullmatch(r"ARG BASE=python:3\.11\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    outside = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert set(outside) - {"libraries"} == {"${BASE}"}
    assert "ENV PIP_CONSTRAINT=/build/constraints.txt" in lines
    assert any("--index-url ${TORCH_INDEX} torch " in line for line in lines)
    assert any(
        line.startswith("ARG TORCH_INDEX=https://download.pytorch.org/whl/") for line in lines
    )
    users = [line for line in lines if line.startswith("USER")]
    assert users == ["USER espalier"]
    assert not [
        line for line in lines[lines.index("USER espalier") :] if line.startswith(("RUN", "COPY"))
    ]


@pytest.mark.parametrize("name", IMAGES)
def test_changed_source_reinstalls_no_library(name: str) -> None:
    """A layer is rebuilt if its files or earlier layers change.

    Libraries are therefore installed before any source is copied.
    """
    stages = re.split(r"^FROM ", (DOCKER / name).read_text(), flags=re.MULTILINE)
    (libraries,) = [stage for stage in stages if stage.startswith("${BASE} AS libraries")]
    copied = [line.split()[1:] for line in libraries.splitlines() if line.startswith("COPY")]
    assert copied == [
        ["constraints.txt", "./"],
        ["--from=requirements", "/requirements.txt", "./"],
        ["docker/imports.py", "./"],
    ]
    assert (
        "COPY --from=libraries /opt/espalier /opt/espalier\nCOPY --from=package /package"
        " /opt/espalier\n" in stages[-1]
    )


@pytest.mark.parametrize("name", [*IMAGES, "Dockerfile.sbom"])
def test_every_copied_file_reaches_the_builder(name: str) -> None:
    copied = [
        word
        for line in (DOCKER / name).read_text().splitlines()
        if line.startswith("COPY") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    reaching = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert "docker/*.py" in reaching
    for word in copied:
        assert (ROOT / word).exists()
        assert word in reaching or re.fullmatch(r"docker/\w+\.py", word)


def test_cuda_image_has_compiler() -> None:
    last = (DOCKER / "Dockerfile.cuda").read_text().split("FROM")[-1]
    assert "gcc libc6-dev" in last
    assert "gcc" not in (DOCKER / "Dockerfile").read_text()


def test_image_needs_all_libraries_but_ray() -> None:
    requirements = program("requirements").requirements
    declared = PROJECT["project"]["dependencies"]
    found = requirements(ROOT / "pyproject.toml", [])
    assert len(found) == len(declared)
    assert [line for line in found if line not in declared] == [
        line.replace("flwr[simulation]", "flwr") for line in declared if line.startswith("flwr")
    ]
    assert requirements(ROOT / "pyproject.toml", ["nf4"]) == [
        *found,
        *PROJECT["project"]["optional-dependencies"]["nf4"],
    ]


def test_every_site_has_valid_settings_and_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site's node finds key, text and state in the volumes of that site only."""
    site = program("site")
    texts = []
    for name in SITES:
        words = words_of(name)
        volumes = mounts(name)
        assert words[:2] == ["python", "/opt/espalier/site.py"]
        folders = {folder: tmp_path / name / folder for folder in ("site", "outbox", "public")}
        for folder in folders.values():
            folder.mkdir(parents=True)
        (folders["public"] / "sites").mkdir()
        (folders["public"] / "ca.crt").touch()
        given = site.read_arguments(
            [*words[2:], *(f"--{folder}={path}" for folder, path in folders.items())]
        )
        started = node_of(site, given, monkeypatch)
        assert started[:4] == ["espalier", "node", "--superlink", "superlink:9092"]
        config = after("--node-config", started)
        (tmp_path / "notes.txt").touch()
        here = config.replace("/data/notes.txt", str(tmp_path / "notes.txt"))
        settings = parse_node(tomllib.loads("\n".join(shlex.split(here.replace('"', "'\"'")))))
        assert settings.site == name
        assert after("--auth-supernode-private-key", started) == str(settings.site_key)
        assert volumes["/site"] == (name, True)
        assert volumes["/outbox"] == (f"{name}-outbox", True)
        assert volumes["/public"] == ("public", False)
        texts.append(volumes["/data/notes.txt"][0])
    assert len(set(texts)) == len(SITES)
    assert all((DOCKER / text).is_file() for text in texts)


def node_of(site: ModuleType, given: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Start a site and return the node command that it becomes.

    The simulated server registers its key as soon as it is submitted.
    """
    became: list[list[str]] = []

    def register(_: float) -> None:
        key = f"{given.name}.key.pub"
        (given.public / "sites" / key).write_bytes((given.outbox / key).read_bytes())

    monkeypatch.setattr(site.os, "execvp", lambda _, words: became.append(words))
    monkeypatch.setattr(site, "time", SimpleNamespace(sleep=register))
    site.main(given)
    return became[0]


def test_a_site_keeps_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key is created once in the site's own volume.

    The site submits its public half at every start.
    """
    site = program("site")
    folders = {folder: tmp_path / folder for folder in ("site", "outbox", "public")}
    for folder in folders.values():
        folder.mkdir()
    (folders["public"] / "sites").mkdir()
    given = site.read_arguments(
        ["a", "server:1", *(f"--{folder}={path}" for folder, path in folders.items())]
    )
    first = node_of(site, given, monkeypatch)
    assert capsys.readouterr().err == "espalier: a waits until the server has registered its key\n"
    key = Path(after("--auth-supernode-private-key", first))
    assert key.is_relative_to(folders["site"])
    assert key.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in folders["outbox"].iterdir()] == ["a.key.pub"]
    before = key.read_bytes()
    (folders["outbox"] / "a.key.pub").unlink()
    assert node_of(site, given, monkeypatch) == first
    assert key.read_bytes() == before
    assert (folders["outbox"] / "a.key.pub").exists()
    assert capsys.readouterr().err == ""


def test_no_key_is_seen_by_others() -> None:
    """The server reads the sites' public keys and cannot change them.

    No other service sees the volumes of a site.
    """
    server = mounts("superlink")
    for name in SITES:
        assert server[f"/sites/{name}"] == (f"{name}-outbox", False)
        others = {
            volume
            for service in SERVICES
            if service != name
            for volume, _ in mounts(service).values()
        }
        assert name not in others
        assert not [
            service
            for service in SITES
            if service != name and f"{name}-outbox" in str(SERVICES[service]["volumes"])
        ]
    assert [
        name for name in SERVICES if "server" in {volume for volume, _ in mounts(name).values()}
    ] == ["superlink"]
    assert mounts("run") == {"/public": ("public", False)}


@pytest.mark.parametrize(
    "place", ["docs/how-to/containers.md", "docs/how-to/deployment.md", "docker/compose.yaml"]
)
def test_documented_command_starts_all_services(place: str) -> None:
    assert DOCUMENTED in (ROOT / place).read_text()
    assert set(SERVICES["run"]["depends_on"]) == {"superlink", *SITES}
    words = words_of("run")
    given = _parser().parse_args(words[1:])
    assert given.words[0] in preset_files(ROOT)
    assert f"num-clients={len(SITES)}" in given.words
    server = words_of("superlink")
    assert given.superlink == f"{after('--host', server)}:{after('--port', server)}"
    assert server[3 : server.index("--")] == SITES


def test_only_fleet_api_is_reachable() -> None:
    """The command that starts the run shares the SuperLink's loopback address.

    The host publishes no port.
    """
    words = words_of("superlink")
    assert (after("--host", words), after("--fleet-api-address", words)) == (
        "127.0.0.1",
        "0.0.0.0:9092",
    )
    assert [word for word in words if word.endswith("-api-address")] == ["--fleet-api-address"]
    assert all("ports" not in service for service in SERVICES.values())
    assert SERVICES["run"]["network_mode"] == "service:superlink"
    assert "--insecure" not in (DOCKER / "compose.yaml").read_text()


def test_restarted_superlink_knows_its_sites() -> None:
    words = words_of("superlink")
    assert mounts("superlink")[str(Path(after("--database", words)).parent)] == ("server", True)
    assert "--disable-runtime-dependency-installation" in words


def test_volumes_are_declared() -> None:
    used = {volume for service in SERVICES for volume, _ in mounts(service).values()}
    assert {name for name in used if not name.startswith("..")} == set(COMPOSE["volumes"])


def test_mounted_folders_belong_to_user() -> None:
    """A volume gets its owner from the image's folder.

    The server's outbox volumes get their owner at the site.
    """
    for name in IMAGES:
        (made,) = re.findall(
            r"mkdir ([^&\\]+) \\\n *&& chown espalier ([^\n]+)", (DOCKER / name).read_text()
        )
        assert made[0].split() == made[1].split()
        places = {
            place
            for service in SERVICES
            for place, (_, writable) in mounts(service).items()
            if writable
        }
        assert places == set(made[0].split()) or places == {*made[0].split()} | {"/data/notes.txt"}


def test_the_sbom_names_debian_s_packages() -> None:
    listed = "zlib1g\t1:1.2.13.dfsg-1\tamd64\nlibstdc++6\t12.2.0-14\tamd64\n"
    found = program("sbom").debian_packages(listed)
    assert [entry["purl"] for entry in found] == [
        "pkg:deb/debian/zlib1g@1%3A1.2.13.dfsg-1?arch=amd64",
        "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14?arch=amd64",
    ]
    assert {entry["type"] for entry in found} == {"library"}

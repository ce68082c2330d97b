"""Commands of all containers as processes of this machine.

They run in their order and with their environment; volumes are folders.
"""

import json
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from espalier.flower.programs import sites_share_port
from tests.processes.deployment import environment, free_ports, process

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        sites_share_port(), reason="the image has Flower 1.39, whose sites have a port of their own"
    ),
]

ROOT = Path(__file__).parent.parent.parent
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())[
    "services"
]
IMAGE = (ROOT / "docker" / "Dockerfile").read_text().split("FROM")[-1]
LATER = "run"
"""Name of the service that starts last; all others end after it."""


class Outside:
    """Places outside the containers for everything that containers see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = dict(zip(("9092", "9093"), map(str, free_ports(2)), strict=True))

    def mounts(self, name: str) -> dict[str, Path]:
        """Return paths in a service's container with the folders that are mounted there."""
        found = {}
        for volume in SERVICES[name].get("volumes", []):
            source, target, *_ = volume.split(":")
            found[target] = (
                (ROOT / "docker" / source) if source.startswith(".") else self.folder / source
            )
            if not source.startswith("."):
                found[target].mkdir(exist_ok=True)
        return found

    def words(self, name: str) -> list[str]:
        """Return a service's command with the paths, ports and names of this machine."""
        mounts = self.mounts(name)
        places = re.compile("|".join(sorted(map(re.escape, mounts), key=len, reverse=True)))
        words = [
            word if "/opt/" in word else places.sub(lambda place: str(mounts[place[0]]), word)
            for word in shlex.split(SERVICES[name]["command"])
        ]
        words = [re.sub(r"\b(0\.0\.0\.0|superlink):(\d+)", r"127.0.0.1:\2", word) for word in words]
        words = [re.sub(r"\b(909\d)\b", lambda port: self.ports[port[1]], word) for word in words]
        if words[0] == "python":
            program = Path(words[1]).name
            folders = [f"--{folder}={self.folder_of(name, folder)}" for folder in FOLDERS[program]]
            words = [sys.executable, str(ROOT / "docker" / program), *folders, *words[2:]]
        return words

    def folder_of(self, name: str, folder: str) -> Path:
        """Return a container's folder.

        If the container mounts one volume per site, the folder links to each of them.
        """
        mounts = self.mounts(name)
        if (place := mounts.get(f"/{folder}")) is not None:
            return place
        together = self.folder / f"{name}-{folder}"
        together.mkdir(exist_ok=True)
        for target, source in mounts.items():
            if (
                target.startswith(f"/{folder}/")
                and not (link := together / Path(target).name).exists()
            ):
                link.symlink_to(source)
        return together

    def environment(self) -> dict[str, str]:
        """Return the image's environment, except for the path of programs."""
        told = re.findall(r"(\w+)=(\S+)", IMAGE.split("ENV")[1])
        return environment(self.folder / "flower") | {
            key: value for key, value in told if key != "PATH"
        }

    def working_directory(self, name: str) -> Path:
        folder = self.mounts(name).get("/results", self.folder / f"{name}-home")
        folder.mkdir(parents=True, exist_ok=True)
        return folder


FOLDERS = {"superlink.py": ("keys", "public", "sites"), "site.py": ("site", "outbox", "public")}


@pytest.mark.slow
def test_compose_services_complete_a_run(tmp_path: Path) -> None:
    """All services start at once, and each waits for what it needs from the others."""
    outside = Outside(tmp_path)
    env = outside.environment()
    with ExitStack() as stack:
        for name in SERVICES:
            words = outside.words(name)
            where = outside.working_directory(name)
            if name != LATER:
                stack.enter_context(process(words, where, name, env))
        words += ["evaluation.max-samples=4", "evaluation.local-baseline=false", "--app", str(ROOT)]
        done = subprocess.run(
            words, cwd=where, env=env, capture_output=True, text=True, timeout=1200, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "results" / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert [(client["site"], client["status"]) for client in summary["clients"]] == [
        (name, "completed") for name in SERVICES if name.startswith("hospital")
    ]
    assert (run / "model" / "model.safetensors").exists()
    logs = [
        json.loads(line)
        for file in tmp_path.glob("hospital-?/**/*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert len([entry for entry in logs if entry.get("kind") == "train"]) == 3

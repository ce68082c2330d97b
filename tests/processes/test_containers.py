"""The commands of all containers, as processes of this machine: in their order, with their environment, volumes as folders."""

import json
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import environment, eventually, free_ports, process

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
IMAGE = (ROOT / "docker" / "Dockerfile").read_text().split("FROM")[-1]
LATER = "run"
"""The service whose end is everybody's."""


class Outside:
    """Where what containers see lies outside of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = dict(zip(("9091", "9092", "9093"), map(str, free_ports(3)), strict=True))

    def mounts(self, name: str) -> dict[str, Path]:
        """Paths in a service's container, and what is mounted there."""
        found = {"/opt/espalier/server.py": ROOT / "docker" / "server.py"}
        for volume in SERVICES[name].get("volumes", []):
            if isinstance(volume, dict):
                found[volume["target"]] = self.folder / volume["source"] / volume["volume"]["subpath"]
            else:
                source, target, *_ = volume.split(":")
                found[target] = (ROOT / "docker" / source) if source.startswith(".") else self.folder / source
        return found

    def words(self, name: str, words: list[str]) -> list[str]:
        """A command with the paths, ports and names of this machine."""
        mounts = self.mounts(name)
        places = re.compile("|".join(sorted(map(re.escape, mounts), key=len, reverse=True)))
        found = [places.sub(lambda place: str(mounts[place[0]]), word) for word in words]
        found = [re.sub(r"\b(0\.0\.0\.0|superlink):(\d+)", r"127.0.0.1:\2", word) for word in found]
        return [re.sub(r":(909\d)\b", lambda port: f":{self.ports[port[1]]}", word) for word in found]

    def environment(self) -> dict[str, str]:
        """The image's, but for where programs lie."""
        told = re.findall(r"(\w+)=(\S+)", IMAGE.split("ENV")[1])
        return environment(self.folder / "flower") | {key: value for key, value in told if key != "PATH"}

    def working_directory(self, name: str) -> Path:
        folder = self.mounts(name).get("/results", self.folder / name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def test_the_services_of_the_compose_file_do_a_run_and_end_with_0(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    (tmp_path / "keys").mkdir()
    env = outside.environment()
    with ExitStack() as stack:
        for name, service in SERVICES.items():
            for needed, when in service.get("depends_on", {}).items():
                if when["condition"] == "service_healthy":
                    check = outside.words(needed, SERVICES[needed]["healthcheck"]["test"][1:])
                    eventually(lambda check=check: subprocess.run(check, check=False).returncode == 0)  # type: ignore[misc]
            words, where = outside.words(name, service["command"]), outside.working_directory(name)
            if name == LATER:
                words += ["evaluation.max-windows=4", "evaluation.local-only=false", "--app", str(ROOT)]
                done = subprocess.run(words, cwd=where, env=env, capture_output=True, text=True, timeout=1200, check=False)
                assert done.returncode == 0, done.stdout + done.stderr
                continue
            if words[0] == "python":
                words[0] = sys.executable
            stack.enter_context(process(words, where, name, env))
    (run,) = (tmp_path / "results" / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert [(client["site"], client["status"]) for client in summary["clients"]] == [
        (name, "completed") for name in SERVICES if name.startswith("hospital")
    ]
    assert (run / "model" / "model.safetensors").exists()
    logs = [json.loads(line) for file in tmp_path.glob("*-state/**/*.jsonl") for line in file.read_text().splitlines()]
    assert len([entry for entry in logs if entry.get("kind") == "train"]) == 3

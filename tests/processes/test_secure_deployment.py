"""Commands of docs/how-to/deployment.md, from nothing to a run of three sites.

The tests also check what keeps others out.
"""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import tomli_w

from espalier.flower.programs import sites_share_port
from tests.bench import private_text
from tests.processes.deployment import (
    BIN,
    Tap,
    environment,
    eventually,
    flwr,
    free_ports,
    process,
    tapped,
    tensor_names,
    wait_for_port,
)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        sites_share_port(), reason="for Flower 1.39; test_reverse_proxy follows the page for 1.40"
    ),
]

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "deployment.md").read_text()
WALK, OTHER_WAYS = PAGE[PAGE.index("\n## 3. ") :].split("\n## 6. ")
"""Part of the page from nothing to a run, and the part after it."""
SITES = ("hospital-a", "hospital-b", "hospital-c")
LATE = "hospital-d"
"""Site for which the page creates a key, but no node."""
TAPPED = SITES[0]
SERVER = "server.example.org"
COMMAND_SECONDS = 900


def blocks(page: str, language: str = "") -> list[str]:
    found = re.findall(r"^```([a-z]*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [content for name, content in found if name == language]


def commands(part: str) -> list[list[str]]:
    return [shlex.split(line) for block in blocks(part) for line in block.splitlines()]


(OF_FLOWERS_NODE,) = [
    command for command in commands(OTHER_WAYS) if command[0] == "flower-supernode"
]


@dataclass
class Machines:
    """Folder of each machine of the page, with its processes."""

    folder: Path
    stack: ExitStack
    tap: Tap | None = None
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    """Output of commands that have ended, by their second word."""

    def __post_init__(self) -> None:
        names = ("9091", "9092", "9093", "9094", "9095")
        self.ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))

    def machine(self, name: str) -> Path:
        made = self.folder / name
        made.mkdir(exist_ok=True)
        return made

    @property
    def server(self) -> Path:
        return self.machine("server")

    def here(self, command: list[str], site: str = "") -> list[str]:
        """Return a command of the page with other ports and this machine as the server."""
        reached = self.tap.port if self.tap and site == TAPPED else self.ports["9092"]
        words = [word.replace(f"{SERVER}:9092", f"127.0.0.1:{reached}") for word in command]
        for page, port in self.ports.items():
            words = [
                re.sub(rf"^(?:127\.0\.0\.1|0\.0\.0\.0):{page}$", f"127.0.0.1:{port}", word)
                for word in words
            ]
        return [str(BIN / words[0]), *(self.ports.get(word, word) for word in words[1:])]

    def give(self, command: list[str], machine: Path) -> str:
        """Run a command that ends, and return its output."""
        env = environment(machine / "flower")
        done = subprocess.run(
            self.here(command),
            cwd=machine,
            env=env,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, command: list[str], machine: Path, name: str) -> subprocess.Popen[bytes]:
        """Start a command that keeps running; its output goes to ``<name>.log``."""
        env = environment(machine / "flower")
        return self.stack.enter_context(
            process(self.here(command, site_of(command)), machine, name, env)
        )

    def log(self, name: str) -> str:
        return (self.machine(name) / f"{name}.log").read_text(errors="replace")

    def listed(self) -> dict[str, str]:
        """Return the status of each registered node by its ID, in order of registration.

        It uses the command of the page.
        """
        (command,) = [
            command for command in commands(WALK) if command[:3] == ["flwr", "supernode", "list"]
        ]
        return dict(
            re.findall(
                r"(\d{6,}) .*?(online|offline|registered)",
                flwr(self.server / "flower", *command[1:]),
            )
        )

    def online(self) -> int:
        return list(self.listed().values()).count("online")


def site_of(command: list[str]) -> str:
    """Return the site whose key a node command uses."""
    keys = [value for word, value in pairwise(command) if word == "--auth-supernode-private-key"]
    return Path(keys[0]).stem if keys else ""


def with_site(command: list[str], site: str, key: str) -> list[str]:
    """Return the page's command of a plain SuperNode with another key and site name."""
    return [
        word.replace("hospital-a/", f"{key}/")
        .replace(f"/{TAPPED}.key", f"/{key}.key")
        .replace(TAPPED, site)
        for word in command
    ]


def follow(machines: Machines, command: list[str]) -> None:
    """Follow the page: run a command on its machine, with the files that it needs."""
    match command[:2]:
        case ["espalier", "keys"]:
            machines.give(command, machines.machine("keys"))
        case ["flower-superlink", *_]:
            made = machines.folder / "keys" / "federation"
            shutil.copytree(made / "server", machines.server / "server")
            for site in (*SITES, LATE):
                shutil.copytree(made / "sites" / site, machines.machine(site) / site)
                (machines.machine(site) / "notes.txt").write_text(
                    "\n\n".join(private_text(n) for n in range(10))
                )
            started = machines.start(command, machines.server, "server")
            for port in ("9092", "9093"):
                wait_for_port(int(machines.ports[port]), started)
            machines.tap = machines.stack.enter_context(tapped(int(machines.ports["9092"])))
            stanza = tomllib.loads(blocks(WALK, "toml")[0])
            connection = stanza["superlink"]["deployment"]
            assert connection == {
                "address": "127.0.0.1:9093",
                "root-certificates": "/srv/espalier/server/ca.crt",
            }
            connection["address"] = f"127.0.0.1:{machines.ports['9093']}"
            connection["root-certificates"] = str(machines.server / "server" / "ca.crt")
            (machines.server / "flower" / "config.toml").write_text(tomli_w.dumps(stanza))
        case ["flwr", "supernode"]:
            words = [
                str(machines.server / word) if word.startswith("server/") else word
                for word in command[1:]
            ]
            flwr(machines.server / "flower", *words)
        case ["espalier", "check-node"]:
            machines.said["check-node"] = machines.give(command, machines.machine(TAPPED))
        case ["espalier", "node"]:
            site = site_of(command)
            machines.nodes[site] = machines.start(command, machines.machine(site), site)
            if len(machines.nodes) == len(SITES):
                eventually(lambda: machines.online() == len(SITES))
        case ["espalier", "run"]:
            send_others(machines)
            machines.said["run"] = machines.give(command, machines.server)
        case _:
            raise AssertionError(f"no machine for {command}")


def send_others(machines: Machines) -> None:
    """Start two nodes with false names.

    One is registered, claims another site's name and is online. The other has an unregistered key
    and has been refused.
    """
    stranger = machines.machine("stranger")
    machines.give(["espalier", "keys", "own", "--site", "stranger"], stranger)
    shutil.copytree(stranger / "own" / "sites" / "stranger", stranger / "stranger")
    shutil.copy(machines.machine(LATE) / LATE / "ca.crt", stranger / "stranger")
    public = machines.server / "server" / "sites" / f"{LATE}.key.pub"
    flwr(machines.server / "flower", "supernode", "register", str(public), "deployment")
    for number, (site, key) in enumerate(((SITES[1], LATE), (SITES[2], "stranger"))):
        command = with_site(OF_FLOWERS_NODE, site, key)
        command[command.index("--port") + 1] = machines.ports[f"909{4 + number}"]
        machines.nodes[key] = machines.start(command, machines.machine(key), key)
    eventually(lambda: machines.online() == len(SITES) + 1)
    eventually(lambda: machines.nodes["stranger"].poll() is not None)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Follow the page up to its run."""
    with ExitStack() as stack:
        walked = Machines(tmp_path_factory.mktemp("page"), stack)
        for command in commands(WALK):
            follow(walked, command)
        yield walked


@pytest.fixture(scope="module")
def run(machines: Machines) -> Path:
    """Return the run's directory."""
    (found,) = (machines.server / "runs").iterdir()
    return found


def test_the_page_leads_to_a_run_of_three_sites(machines: Machines, run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert [(client["site"], client["status"]) for client in summary["clients"]] == [
        (site, "completed") for site in SITES
    ]
    assert (run / "model").is_dir()
    assert "The node can take part" in machines.said["check-node"]


def test_unregistered_node_is_turned_away(machines: Machines) -> None:
    assert machines.nodes["stranger"].returncode not in (None, 0)
    assert machines.online() == len(SITES) + 1


def test_node_with_another_s_name_is_refused(machines: Machines, run: Path) -> None:
    *_, impostor = machines.listed()
    reason = "claims to be hospital-b, but does not have the key of hospital-b in site-keys"
    assert json.loads((run / "summary.json").read_text())["refused"] == {f"node {impostor}": reason}
    assert f"refused      node {impostor}: {reason}" in machines.said["run"]


def test_tls_hides_tensor_names_on_wire(machines: Machines, run: Path) -> None:
    """``test_deployment`` finds the names with the same search if there is no TLS."""
    lineage = json.loads((run / "run.json").read_text())["lineage"]
    state = machines.machine(TAPPED) / "flower" / "state" / "egress"
    names = tensor_names(state / f"{lineage}-{TAPPED}.jsonl")
    sent = sum(
        json.loads(line)["bytes"]
        for line in (state / f"{lineage}-{TAPPED}.jsonl").read_text().splitlines()
    )
    assert any("prune_mask" in name for name in names)
    assert machines.tap is not None
    assert machines.tap.num_bytes() > sent > 100_000
    assert machines.tap.readable([*names, "prune_mask", TAPPED, "espalier"]) == set()

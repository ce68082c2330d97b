"""SuperLink of Flower 1.40 or later behind the reverse proxy of docs/how-to/deployment.md.

Sites reach it, and strangers do not.
"""

import json
import shlex
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import tomli_w
from typer.testing import CliRunner

from espalier.flower.control_api import answers
from espalier.flower.programs import sites_share_port
from tests.bench import private_text
from tests.flower.flower_parts import flwr_command
from tests.processes.deployment import (
    BIN,
    environment,
    espalier,
    espalier_command,
    eventually,
    flwr,
    free_ports,
    process,
    secured_superlink,
    wait_for_port,
)
from tests.tiny_model import save_tiny_llama

ROOT = Path(__file__).parent.parent.parent
SITE, OTHER = "hospital-a", "hospital-b"
LARGE_BODY = 64 * 1024**2
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not sites_share_port(), reason="before Flower 1.40 sites have a port of their own"
    ),
    pytest.mark.skipif(NGINX is None, reason="needs nginx"),
]


@dataclass(frozen=True)
class Proxied:
    """Ports of a SuperLink and of its proxy, and the folder of their files."""

    folder: Path
    superlink: int
    proxy: int

    @property
    def authority(self) -> Path:
        """Path of the certificate that every site has."""
        return self.folder / "server" / "ca.crt"

    def home(self, name: str, port: int) -> Path:
        """Create a Flower home in which ``it`` names the SuperLink at this port."""
        home = self.folder / name
        home.mkdir(exist_ok=True)
        connection = {"address": f"localhost:{port}", "root-certificates": str(self.authority)}
        (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"it": connection}}))
        return home


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    folder = tmp_path_factory.mktemp("proxied")
    assert (
        espalier(
            folder,
            "keys",
            "federation",
            "--server",
            "localhost",
            "--site",
            SITE,
            "--site",
            OTHER,
            "--site",
            "stranger",
        ).returncode
        == 0
    )
    shutil.copytree(folder / "federation" / "server", folder / "server")
    superlink, proxy = free_ports(2)
    conf = (ROOT / "docker" / "reverse-proxy.conf").read_text()
    conf = conf.replace("listen 9092", f"listen 127.0.0.1:{proxy}").replace(
        "127.0.0.1:9093", f"127.0.0.1:{superlink}"
    )
    (folder / "reverse-proxy.conf").write_text(conf)
    command = secured_superlink(folder / "server", folder / "superlink.db", superlink, "")
    with ExitStack() as stack:
        link = stack.enter_context(
            process(command, folder, "superlink", environment(folder / "flower"))
        )
        wait_for_port(superlink, link)
        page = (ROOT / "docs" / "how-to" / "deployment.md").read_text()
        (line,) = (line for line in page.splitlines() if line.startswith("nginx "))
        nginx = [str(NGINX), *shlex.split(line)[1:]]
        wait_for_port(
            proxy,
            stack.enter_context(process(nginx, folder, "nginx", environment(folder / "flower"))),
        )
        found = Proxied(folder, superlink, proxy)
        for site in (SITE, OTHER):
            key = folder / "server" / "sites" / f"{site}.key.pub"
            flwr(found.home("owner", superlink), "supernode", "register", str(key), "it")
        yield found


def node_command(proxied: Proxied, key_of: str, folder: Path) -> list[str]:
    """Return the command of a node that claims to be ``SITE`` and has the key of a site."""
    own = proxied.folder / "federation" / "sites" / key_of
    key = own / f"{key_of}.key"
    return [
        str(BIN / "espalier"), "node", "--superlink", f"localhost:{proxied.proxy}",
        "--root-certificates", str(own / "ca.crt"), "--auth-supernode-private-key", str(key),
        "--node-config",
        (
            f'site="{SITE}" site-key="{key}" model-path="{folder}/model"'
            f' data-path="{folder}/notes.txt" state-dir="{folder}/state-{key_of}" min-tokens=1'
        ),
    ]  # fmt: skip


def test_only_the_authenticated_site_runs_through_proxy(proxied: Proxied, tmp_path: Path) -> None:
    """Another registered node that claims the site's name is refused."""
    save_tiny_llama(tmp_path / "model")
    for name, seed in (("notes", 1), ("public", 2)):
        (tmp_path / f"{name}.txt").write_text(private_text(seed) * 4)
    words = [
        "fedprllm", f"model={tmp_path}/model", "data.source=files",
        f"data.path={tmp_path}/notes.txt", "num-clients=1", "quorum=1.0", "data.num-samples=2",
        "data.sequence-length=16", f"evaluation.texts=public={tmp_path}/public.txt",
        "evaluation.sequence-length=32", "evaluation.max-samples=2",
        "evaluation.local-baseline=false", "threads=1", f"site-keys={proxied.folder}/server/sites",
        "enrol-seconds=1800", "--app", str(ROOT),
        "--superlink", f"localhost:{proxied.superlink}",
        "--root-certificates", str(proxied.authority),
    ]  # fmt: skip
    env = environment(tmp_path / "flower")
    refused = f"claims to be {SITE}, but does not have the key of {SITE} in site-keys"
    log = tmp_path / "run.log"
    with ExitStack() as stack:

        def start(command: list[str], name: str) -> subprocess.Popen[bytes]:
            return stack.enter_context(process(command, tmp_path, name, env))

        start(node_command(proxied, OTHER, tmp_path), "other")
        run = start(espalier_command(tmp_path, "run", *words)[0], "run")
        eventually(lambda: refused in log.read_text() or run.poll() is not None)
        start(node_command(proxied, SITE, tmp_path), "node")
        eventually(lambda: run.poll() is not None)
    assert run.returncode == 0, log.read_text()
    assert refused in log.read_text()
    (summary,) = proxied.folder.glob("runs/*/summary.json")
    assert [client["site"] for client in json.loads(summary.read_text())["clients"]] == [SITE]


def test_sites_are_not_warned_of_the_proxy(proxied: Proxied) -> None:
    """It answers plain HTTP too, with an error; only the SuperLink's own port takes runs."""
    assert not answers(f"localhost:{proxied.proxy}")
    assert answers(f"localhost:{proxied.superlink}")


def test_large_body_reaches_superlink(proxied: Proxied) -> None:
    """The SuperLink refuses the unsigned request itself; nginx's own limit would be 1 MiB."""
    url = f"https://localhost:{proxied.proxy}/v1/fleet/push-object"
    context = ssl.create_default_context(cafile=str(proxied.authority))
    with httpx.Client(verify=context, timeout=600, trust_env=False) as client:
        answers = [client.post(url, content=bytes(size)) for size in (16, LARGE_BODY)]
    assert {answer.status_code for answer in answers} == {answers[0].status_code}
    assert answers[0].text == answers[1].text
    assert "nginx" not in answers[0].text


@pytest.mark.parametrize(
    "words", [["ls"], ["supernode", "list"], ["supernode", "register", "{key}"]], ids=" ".join
)
def test_stranger_has_no_control_access(proxied: Proxied, words: list[str]) -> None:
    key = proxied.folder / "federation" / "server" / "sites" / "stranger.key.pub"
    home = proxied.home("stranger", proxied.proxy)
    given = [*(word.replace("{key}", str(key)) for word in words), "it"]
    done = CliRunner(env={**environment(home), "COLUMNS": "200"}).invoke(flwr_command, given)
    assert done.exit_code != 0
    assert "403" in done.output


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/list-runs",
        "/v1/control/list-runs%3f/../../fleet/x",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "//v1/fleet/../control/list-runs",
    ],
)
def test_detours_have_no_control_access(proxied: Proxied, path: str) -> None:
    """The request is sent as written; most clients would shorten the path."""
    context = ssl.create_default_context(cafile=str(proxied.authority))
    with (
        socket.create_connection(("127.0.0.1", proxied.proxy), 60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        request = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
        secure.sendall(request.encode())
        assert secure.recv(64).split()[1] == b"403"

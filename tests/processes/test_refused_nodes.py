"""Messages of nodes that a SuperLink refuses, as quoted in docs/how-to/deployment.md, section 7."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import Popen

import pytest
import tomli_w

from espalier.cli.keys import make_keys
from espalier.flower.programs import sites_share_port
from espalier.launch import authority
from tests.processes.deployment import (
    BIN,
    environment,
    eventually,
    flwr,
    free_ports,
    process,
    secured_superlink,
    wait_for_port,
)

pytestmark = pytest.mark.processes

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "deployment.md").read_text()
TABLE = PAGE[PAGE.index("\n## 7. ") : PAGE.index("\n## What failures cost")]
KNOWN, UNKNOWN = "hospital-a", "hospital-b"
NOT_ACTIVATED = "Failed to activate SuperNode"
VERIFY = "certificate verify failed"
CONNECTED = "SuperNode ID:"
RETRIES = "Connection attempt failed, retrying"


@dataclass(frozen=True)
class Server:
    """SuperLink with TLS and node authentication, at which the key of ``KNOWN`` is registered."""

    folder: Path
    fleet: int

    @property
    def trusted(self) -> list[str]:
        """Options of a node that trusts the SuperLink's certificate."""
        return ["--root-certificates", str(self.folder / "keys" / "server" / "ca.crt")]

    def key(self, site: str) -> list[str]:
        """Options of a node with the key of a site."""
        return [
            "--auth-supernode-private-key",
            str(self.folder / "keys" / "sites" / site / f"{site}.key"),
        ]


def start(folder: Path, stack: ExitStack, *, expired: bool = False) -> Server:
    """Start a SuperLink with keys of its own, and register the key of ``KNOWN``."""
    keys = folder / "keys"
    with pytest.MonkeyPatch.context() as monkeypatch:
        if expired:
            monkeypatch.setattr(authority, "datetime", TwoYearsAgo)
        list(make_keys(keys, ["localhost"], [KNOWN, UNKNOWN], 30))
    control, fleet = free_ports(2)
    own = keys / "server"
    command = secured_superlink(own, folder / "superlink.db", control, f"127.0.0.1:{fleet}")
    env = environment(folder / "flower")
    wait_for_port(control, stack.enter_context(process(command, folder, "superlink", env)))
    if not expired:
        connection = {"address": f"localhost:{control}", "root-certificates": str(own / "ca.crt")}
        (folder / "config.toml").write_text(tomli_w.dumps({"superlink": {"it": connection}}))
        flwr(folder, "supernode", "register", str(own / "sites" / f"{KNOWN}.key.pub"), "it")
    return Server(folder, control if sites_share_port() else fleet)


class TwoYearsAgo:
    """Clock for certificates that have expired."""

    @staticmethod
    def now(zone: object) -> datetime:
        return datetime.now(UTC) - timedelta(days=730)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ExitStack() as stack:
        yield start(tmp_path_factory.mktemp("refusing"), stack)


def node(
    stack: ExitStack, server: Server, folder: Path, words: list[str], program: str
) -> tuple[Popen[bytes], Path]:
    """Start a node, and return its process and its log."""
    first, *rest = program.split()
    command = [str(BIN / first), *rest, "--superlink", f"localhost:{server.fleet}", *words]
    command += [] if rest else ["--port", str(free_ports(1)[0])]
    env = environment(folder / "flower")
    return stack.enter_context(process(command, folder, "node", env)), folder / "node.log"


def refusal(
    server: Server, folder: Path, words: list[str], program: str = "flower-supernode"
) -> str:
    """Return the log of a node that ends by itself."""
    with ExitStack() as stack:
        started, log = node(stack, server, folder, words, program)
        eventually(lambda: started.poll() is not None)
    return log.read_text()


def require_quoted(quote: str, log: str) -> None:
    """Fail unless the page quotes these words, and the log has them."""
    assert f'"{quote}' in TABLE
    # OpenSSL and gRPC write the same reason with other letters.
    assert quote.lower() in log.lower().replace("certificate_verify_failed", VERIFY)


@pytest.mark.parametrize("program", ["flower-supernode", "espalier node"])
def test_key_is_not_registered(server: Server, tmp_path: Path, program: str) -> None:
    log = refusal(server, tmp_path, [*server.trusted, *server.key(UNKNOWN)], program)
    require_quoted(NOT_ACTIVATED, log)
    assert ("espalier: the SuperLink" in log) == (program == "espalier node")


def test_node_without_key(server: Server, tmp_path: Path) -> None:
    require_quoted("All SuperNodes must be registered", refusal(server, tmp_path, server.trusted))


def test_node_without_authority(server: Server, tmp_path: Path) -> None:
    require_quoted(VERIFY, refusal(server, tmp_path, server.key(KNOWN)))


def test_key_without_tls(server: Server, tmp_path: Path) -> None:
    log = refusal(server, tmp_path, ["--insecure", *server.key(KNOWN)])
    require_quoted("Insecure connection is enabled, but", log)


def test_no_tls(server: Server, tmp_path: Path) -> None:
    with ExitStack() as stack:
        _, log = node(stack, server, tmp_path, ["--insecure"], "flower-supernode")
        eventually(lambda: RETRIES in log.read_text())
    require_quoted(RETRIES, log.read_text())


def test_key_is_in_use(server: Server, tmp_path: Path) -> None:
    """So it is for a minute after a node was killed; here the first node stays."""
    words = [*server.trusted, *server.key(KNOWN)]
    with ExitStack() as stack:
        _, log = node(stack, server, tmp_path / "first", words, "flower-supernode")
        eventually(lambda: CONNECTED in log.read_text())
        require_quoted(NOT_ACTIVATED, refusal(server, tmp_path / "again", words))


def test_certificate_has_expired(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = start(tmp_path / "expired", stack, expired=True)
        log = refusal(server, tmp_path, [*server.trusted, *server.key(KNOWN)])
    require_quoted(VERIFY, log)
    assert "certificate has expired" in log

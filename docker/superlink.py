"""The server in a container: makes its keys, runs a SuperLink with TLS and registers named sites.

    python superlink.py HOST SITE [SITE ...] -- OPTION [OPTION ...]    options of flower-superlink

``HOST`` is the name by which sites reach the server. Folders:

    keys      the authority and the server's private key; only for the server
    public    ca.crt, and sites/NAME.key.pub of each registered site; readable by everybody
    sites     NAME/NAME.key.pub: sent by each site

Covers: a site's private key is never here. The first key under a name stays the key of that name.
Existing files are kept, so the container can be restarted at any time.
Does not cover: authenticity of that first key. Everybody who can write to the site's volume can
place it. On other machines compare fingerprints (docs/how-to/deployment.md).
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

CONNECTION = '[superlink.here]\naddress = "{address}"\nroot-certificates = "{certificate}"\n'
KNOWN = "already in use"
"""Text in Flower's answer for a key that is already registered."""
POLL_SECONDS = 1.0
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Minimum and maximum seconds until a failed registration is repeated; doubled each time."""


@dataclass
class Register:
    """Registration of the sites' keys at the SuperLink.

    Parameters
    ----------
    address : ``host:port`` of the Control API
    public : folder that everybody may read
    sites : folder with the keys that the sites send
    """

    address: str
    public: Path
    sites: Path
    _settled: dict[str, bytes] = field(default_factory=dict)
    """Keys that are registered or refused for good while this program runs, by site."""
    _failed: dict[str, tuple[bytes, str, float, float]] = field(default_factory=dict)
    """Keys whose registration failed, by site: key, reason, time of the next try, pause."""

    def look(self, name: str, now: float) -> None:
        """Register a site's key if a new one has arrived; ``now`` in seconds."""
        try:
            key = (self.sites / name / f"{name}.key.pub").read_bytes()
        except OSError:
            return
        failed, reason, when, pause = self._failed.get(name, (b"", "", 0.0, 0.0))
        if self._settled.get(name) == key or (failed == key and now < when):
            return
        accepted = self.public / "sites" / f"{name}.key.pub"
        if accepted.exists() and accepted.read_bytes() != key:
            say(
                f"{name} handed in another key than before, which is refused; if it has lost its"
                f" own, remove {accepted}"
            )
            self._settled[name] = key
        elif why := self._refused(name, key):
            if (failed, reason) != (key, why):
                say(f"the key of {name} was not registered: {why}")
            pause = min(2 * pause, LONGEST_PAUSE) if failed == key else FIRST_PAUSE
            self._failed[name] = (key, why, now + pause, pause)
        else:
            publish(key, accepted)
            say(f"the key of {name} is registered")
            self._settled[name] = key

    def _refused(self, name: str, key: bytes) -> str:
        """Register a key and return Flower's reason if it refuses; a known key is accepted."""
        with tempfile.TemporaryDirectory() as home:
            # A home of its own for each call, so that no other connections are configured.
            certificate = (self.public / "ca.crt").absolute()
            (Path(home) / "config.toml").write_text(
                CONNECTION.format(address=self.address, certificate=certificate)
            )
            file = Path(home) / f"{name}.key.pub"
            file.write_bytes(key)
            command = ["flwr", "supernode", "register", str(file), "here", "--format", "json"]
            done = subprocess.run(
                command, capture_output=True, text=True, env={**os.environ, "FLWR_HOME": home}
            )
        told = f"{done.stdout}{done.stderr}".strip()
        with suppress(ValueError, TypeError, KeyError):
            answer = json.loads(done.stdout)
            return (
                ""
                if answer["success"] or KNOWN in answer["error-message"]
                else str(answer["error-message"])
            )
        return "" if KNOWN in told else told or f"flwr ended with {done.returncode}"


def main(arguments: argparse.Namespace, options: list[str]) -> int:
    """Run until the SuperLink ends, and return its exit code."""
    keys = arguments.keys / "federation"
    if not keys.exists():
        make_keys(arguments.host, keys)
    server = keys / "server"
    publish((server / "ca.crt").read_bytes(), arguments.public / "ca.crt")
    secure = [
        "--ssl-ca-certfile",
        server / "ca.crt",
        "--ssl-certfile",
        server / "server.pem",
        "--ssl-keyfile",
        server / "server.key",
    ]
    with subprocess.Popen(
        ["flower-superlink", *map(str, secure), "--enable-supernode-auth", *options]
    ) as superlink:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: superlink.terminate())
        address = f"{options[options.index('--host') + 1]}:{options[options.index('--port') + 1]}"
        register = Register(address, arguments.public, arguments.sites)
        while superlink.poll() is None:
            if listens(address):
                for name in arguments.names:
                    register.look(name, time.monotonic())
            time.sleep(POLL_SECONDS)
        return superlink.returncode


def make_keys(host: str, keys: Path) -> None:
    """Make an authority and a certificate of the server atomically."""
    folder = tempfile.mkdtemp(dir=keys.parent)
    subprocess.run(
        ["espalier", "keys", folder, "--server", host], check=True, stdout=subprocess.DEVNULL
    )
    os.replace(folder, keys)


def publish(data: bytes, file: Path) -> None:
    """Write a file that others read, atomically."""
    file.parent.mkdir(exist_ok=True)
    new = file.with_name(f".{file.name}.new")
    new.write_bytes(data)
    os.replace(new, file)


def listens(address: str) -> bool:
    """Return True if a server listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def say(line: str) -> None:
    """Print a line to the container's log."""
    print(f"espalier: {line}", file=sys.stderr, flush=True)


def read_arguments(words: list[str]) -> argparse.Namespace:
    """Parse the arguments before ``--``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("host", metavar="HOST")
    parser.add_argument("names", nargs="+", metavar="SITE")
    for folder in ("keys", "public", "sites"):
        parser.add_argument(f"--{folder}", type=Path, default=Path("/", folder))
    return parser.parse_args(words)


if __name__ == "__main__":
    place = sys.argv.index("--")
    sys.exit(main(read_arguments(sys.argv[1:place]), sys.argv[place + 1 :]))

"""The server of the demonstration in containers: keys for all, a SuperLink with TLS, and the sites' keys registered there.

    python server.py KEYS NAME SITE [SITE ...] -- OPTION [OPTION ...]    options of flower-superlink

``NAME`` is the server's, as its sites know it. Keys that are there are kept. When the sites may come, the file ``ready`` lies
in the folder where the command was given. Of a real federation keys are made elsewhere, and by the sites (docs/deployment.md).
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

READY = Path("ready")
CONNECTION = '[superlink.here]\naddress = "{address}"\nroot-certificates = "{certificate}"\n'


def main(keys: Path, name: str, sites: list[str], options: list[str]) -> int:
    """Serve until the SuperLink ends; returns its exit code."""
    READY.unlink(missing_ok=True)
    if not (keys / "server" / "server.key").exists():
        wanted = [word for site in sites for word in ("--site", site)]
        subprocess.run(["espalier", "keys", str(keys), "--server", name, *wanted], check=True)
    own = keys / "server"
    secure = ["--ssl-ca-certfile", own / "ca.crt", "--ssl-certfile", own / "server.pem", "--ssl-keyfile", own / "server.key"]
    with subprocess.Popen(["flower-superlink", *map(str, secure), "--enable-supernode-auth", *options]) as superlink:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: superlink.terminate())
        address = options[options.index("--control-api-address") + 1]
        while superlink.poll() is None and not _listens(address):
            time.sleep(0.2)
        if superlink.poll() is None:
            _register(address, own, sites)
            READY.touch()
        return superlink.wait()


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def _register(address: str, own: Path, sites: list[str]) -> None:
    """A SuperLink without a database begins with no site, however often it is started."""
    with tempfile.TemporaryDirectory() as home:
        text = CONNECTION.format(address=address, certificate=(own / "ca.crt").absolute())
        (Path(home) / "config.toml").write_text(text, encoding="utf-8")
        for site in sites:
            key = str(own / "sites" / f"{site}.key.pub")
            subprocess.run(["flwr", "supernode", "register", key, "here"], check=True, env={**os.environ, "FLWR_HOME": home})


if __name__ == "__main__":
    place = sys.argv.index("--")
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:place], sys.argv[place + 1 :]))

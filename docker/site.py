"""A site in a container: makes its key pair, sends the public key to the server and runs a node.

    python site.py NAME SUPERLINK [KEY=VALUE ...]    further settings are those of --node-config

Folders:

    site      the private key and the site's state; only for the site
    outbox    NAME.key.pub: read by the server
    public    ca.crt and sites/NAME.key.pub: published by the server

Covers: the private key is made here and never leaves ``site``. Existing files are kept, so the
container can be restarted at any time.
Does not cover: authenticity of ``ca.crt``. Everybody who can write to that volume can replace it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POLL_SECONDS = 1.0


def main(given: argparse.Namespace) -> None:
    """Prepare the keys, wait until the server has registered them, and become ``espalier node``."""
    keys = given.site / "keys"
    if not keys.exists():
        make_key(given.name, keys)
    key = keys / "sites" / given.name / f"{given.name}.key"
    public = key.with_suffix(".key.pub").read_bytes()
    hand_in(public, given.outbox / f"{given.name}.key.pub")
    registered = given.public / "sites" / f"{given.name}.key.pub"
    if not holds(registered, public):
        print(
            f"espalier: {given.name} waits until the server has registered its key",
            file=sys.stderr,
            flush=True,
        )
    while not holds(registered, public):
        time.sleep(POLL_SECONDS)
    own = [
        f'site="{given.name}"',
        f'site-key="{key}"',
        f'state-dir="{given.site / "state"}"',
        *given.settings,
    ]
    command = [
        "espalier",
        "node",
        "--superlink",
        given.superlink,
        "--root-certificates",
        str(given.public / "ca.crt"),
    ]
    command += ["--auth-supernode-private-key", str(key), "--node-config", " ".join(own)]
    # The node replaces this process, so that it receives the container's signals.
    os.execvp(command[0], command)


def make_key(name: str, keys: Path) -> None:
    """Make a key pair atomically."""
    folder = tempfile.mkdtemp(dir=keys.parent)
    subprocess.run(
        ["espalier", "keys", folder, "--site", name], check=True, stdout=subprocess.DEVNULL
    )
    os.replace(folder, keys)


def hand_in(data: bytes, file: Path) -> None:
    """Write a file that the server reads, atomically."""
    new = file.with_name(f".{file.name}.new")
    new.write_bytes(data)
    os.replace(new, file)


def holds(file: Path, data: bytes) -> bool:
    """Return True if a file exists with exactly these bytes."""
    try:
        return file.read_bytes() == data
    except OSError:
        return False


def read_arguments(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("superlink", metavar="SUPERLINK", help="host:port of the Fleet API")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    for folder in ("site", "outbox", "public"):
        parser.add_argument(f"--{folder}", type=Path, default=Path("/", folder))
    return parser.parse_args(words)


if __name__ == "__main__":
    main(read_arguments(sys.argv[1:]))

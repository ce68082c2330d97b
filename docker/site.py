"""A site in a container: makes its own key, hands the public half to the server, and becomes a warm SuperNode.

    python site.py NAME SUPERLINK [KEY=VALUE ...]    further settings are those of --node-config

Folders:

    site      the private key and the site's state; the site's only
    outbox    NAME.key.pub: what the server reads
    public    ca.crt and sites/NAME.key.pub: what the server hands out

Covers: the private key is made here and is never outside of ``site``. What is there already is kept, so the container can be
started again at any time. Does not cover: whether ``ca.crt`` is the server's; here whoever can write that volume says so.
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
    """Prepare the keys, wait until the server has registered them, and go on as ``espalier node``."""
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
    os.execvp(command[0], command)


def make_key(name: str, keys: Path) -> None:
    """Make a pair of keys, both or none."""
    folder = tempfile.mkdtemp(dir=keys.parent)
    subprocess.run(
        ["espalier", "keys", folder, "--site", name], check=True, stdout=subprocess.DEVNULL
    )
    os.replace(folder, keys)


def hand_in(data: bytes, file: Path) -> None:
    """Write a file that the server reads: whole or not at all."""
    new = file.with_name(f".{file.name}.new")
    new.write_bytes(data)
    os.replace(new, file)


def holds(file: Path, data: bytes) -> bool:
    """Return True if a file is there with these bytes."""
    try:
        return file.read_bytes() == data
    except OSError:
        return False


def read_arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
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

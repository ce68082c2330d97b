"""``espalier node``: a SuperNode with one warm process that runs the installed program.

The command starts two processes, which end with it in every case: Flower's ``flower-supernode`` in
process isolation, and ``client_app.node.warm_node``, which claims the SuperNode's tasks. They share
a secret that is made for this run of the command.
"""

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from espalier.cli import Commands
from espalier.environment.loopback import past_proxies
from espalier.errors import InputError, tell
from espalier.flower.programs import (
    DEFAULT_HOST,
    NODE_CONFIG,
    SET_BY_US,
    SUPERNODE_MODULE,
    process_supernode,
    read_node_config,
    value_of,
)
from espalier.flower.supernode import SupernodeLog
from espalier.identity.site_keys import fingerprint, private_key
from espalier.launch.addresses import MAX_PORT, free_port
from espalier.launch.app import installed_app, started_in_app
from espalier.launch.child_processes import kept, take_interrupts
from espalier.settings.node import claimed_name, parse_node

PRIVATE_KEY = "--auth-supernode-private-key"
LOG_SECONDS = 5.0
"""Seconds for reading the last lines of a SuperNode that has ended."""
POLL_SECONDS = 0.2
STOP_SECONDS = 20.0
"""Seconds for a SuperNode to tell the SuperLink that it leaves."""
MAX_WARM_SECONDS = 7 * 86_400
MEGA = 10**6


def add_node(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "node",
        help=(
            "start a warm SuperNode that runs only the installed program; takes the options of"
            " flower-supernode"
        ),
        epilog=(
            "All further options are those of flower-supernode (flower-supernode --help):"
            " --superlink, --root-certificates, --auth-supernode-private-key, --node-config."
        ),
    )
    parser.add_argument(
        "--warm-seconds",
        type=float,
        default=900.0,
        help="seconds after which a worker without a task ends; default 900",
    )
    parser.add_argument(
        "--max-idle-megabytes",
        type=int,
        default=0,
        metavar="N",
        help=(
            "memory that a worker may hold between tasks; above it, the worker drops its model, and"
            " ends if that is not enough; default 0: half of the machine's memory"
        ),
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="loopback port on which the node hands out tasks; default: a free port",
    )
    parser.set_defaults(execute=node)


def node(args: argparse.Namespace) -> int:
    """Run a SuperNode; options that the command does not know go to ``flower-supernode``."""
    take_interrupts()
    return run_node(
        installed_app(), args.further, args.port, args.warm_seconds, args.max_idle_megabytes
    )


def run_node(
    app: Path, words: Sequence[str], port: int, warm_seconds: float, max_idle_megabytes: int = 0
) -> int:
    """Run a node until it ends or is ended, and return the SuperNode's exit code.

    ``words`` are options for ``flower-supernode``; raise InputError if the command sets one of them
    itself, or if a number is out of range.
    """
    _check(words, port, warm_seconds, max_idle_megabytes)
    port = port or free_port()
    secret = secrets.token_bytes(32)
    order = {
        "address": f"{DEFAULT_HOST}:{port}",
        "warm-seconds": warm_seconds,
        "secret": secret.hex(),
        "max-idle-bytes": max_idle_megabytes * MEGA,
    }
    with tempfile.TemporaryDirectory(prefix="espalier-node-") as name:
        folder = Path(name)
        # ``flower-supernode`` reads the secret from this file.
        file = folder / "secret"
        file.touch(mode=0o600)
        file.write_bytes(secret)
        options = process_supernode(words, port, str(file))
        with kept(
            [sys.executable, "-P", "-m", SUPERNODE_MODULE, *options],
            folder,
            {**os.environ, **past_proxies(os.environ)},
            Path.cwd(),
            grace=STOP_SECONDS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
        ) as supernode:
            log = Thread(target=_log_of(words).pass_on, args=(supernode.stdout,), daemon=True)
            log.start()
            with started_in_app(app, "client_app.node.warm_node", order) as desk:
                while supernode.poll() is None:
                    if desk.poll() is not None:
                        tell("the process that handles the node's tasks ended; the node ends too")
                        return 1
                    time.sleep(POLL_SECONDS)
            log.join(LOG_SECONDS)
            return supernode.returncode


def _check(words: Sequence[str], port: int, warm_seconds: float, max_idle_megabytes: int) -> None:
    options = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    if own := sorted(
        {word for word in options if any(option.startswith(word) for option in SET_BY_US)}
    ):
        raise InputError(
            f"{', '.join(own)}: espalier node sets this option itself, or does not allow it;"
            " omit it"
        )
    # Flower silently ignores unknown keys and what it cannot read, so they are checked here.
    if (config := value_of(NODE_CONFIG, words)) is not None:
        parse_node(read_node_config(config))
    # Of a file that it cannot read, Flower shows a traceback.
    if (key := value_of(PRIVATE_KEY, words)) is not None:
        private_key(key, PRIVATE_KEY)
    if not 0 < warm_seconds <= MAX_WARM_SECONDS:
        raise InputError(
            f"--warm-seconds {warm_seconds:g}: must be above 0 and at most {MAX_WARM_SECONDS}"
        )
    if max_idle_megabytes < 0:
        raise InputError(
            f"--max-idle-megabytes {max_idle_megabytes}: must be 0 or more; 0 means half of"
            " the machine's memory"
        )
    if not 0 <= port <= MAX_PORT:
        raise InputError(f"--port {port}: must be from 1 to {MAX_PORT}, or 0 for a free port")


def _log_of(words: Sequence[str]) -> SupernodeLog:
    """Return the filter for the SuperNode's log, which states as whom the node connects."""
    config = value_of(NODE_CONFIG, words)
    key = value_of(PRIVATE_KEY, words) or ""
    shown = fingerprint(private_key(key, PRIVATE_KEY).public_key()) if key else ""
    return SupernodeLog(
        claimed_name(read_node_config(config)) if config else "",
        value_of("--superlink", words) or "at Flower's default address",
        key,
        shown,
    )

"""Run a module of the app in a process of its own.

The command itself imports settings and Flower only: it starts at once, and holds no memory while a run works. And what the
module imports are the rooms of the app that will run, also where the command was installed with another copy.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from espalier.settings.loopback import past_proxies


def run_in_app(app: Path, module: str, document: Any) -> int:
    """Call ``main(document)`` of a module of the app; returns its exit code.

    It works in the directory where the command was given, writes where the command writes, and ends when the command ends.
    """
    with started_in_app(app, module, document) as process:
        return process.wait()


@contextmanager
def started_in_app(app: Path, module: str, document: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The same, which goes on beside this block, and ends with it."""
    paths = os.pathsep.join(filter(None, [str(app), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, module], stdin=subprocess.PIPE,
        env={**os.environ, **past_proxies(os.environ), "PYTHONPATH": paths},
        # Ctrl-C comes to the command alone, which ends it without a traceback.
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(document).encode() + b"\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()


def _work(module: str) -> int:
    """In the new process."""
    document = json.loads(sys.stdin.readline())
    Thread(target=_end_with_the_command, daemon=True).start()
    code: int = import_module(module).main(document)
    return code


def _end_with_the_command() -> None:
    """Whatever ends the command closes the pipe, a SIGKILL too."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(_work(sys.argv[1]))

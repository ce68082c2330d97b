"""Run a module of the app in a separate process.

The command itself imports only settings and Flower, so it starts quickly and needs little memory
during a run. The module imports the packages of the app that will run, even if the command was
installed with another copy.
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

from espalier.environment.loopback import past_proxies


def run_in_app(app: Path, module: str, document: Any) -> int:
    """Call ``main(document)`` of a module of the app and return its exit code.

    The process uses the command's working directory and output streams, and ends with the command.
    """
    with started_in_app(app, module, document) as process:
        return process.wait()


@contextmanager
def started_in_app(app: Path, module: str, document: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``main(document)`` of a module of the app; the process ends with the block."""
    paths = os.pathsep.join(filter(None, [str(app), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, module], stdin=subprocess.PIPE,
        env={**os.environ, **past_proxies(os.environ), "PYTHONPATH": paths},
        # Ctrl-C reaches only the command, which ends this process without a traceback.
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(document).encode() + b"\n")
        process.stdin.flush()
        # The pipe stays open: its end tells the process that the command is gone.
        yield process
    finally:
        process.kill()
        process.wait()


def _work(module: str) -> int:
    """Run the module in the new process and return its exit code."""
    document = json.loads(sys.stdin.readline())
    Thread(target=_end_with_the_command, daemon=True).start()
    code: int = import_module(module).main(document)
    return code


def _end_with_the_command() -> None:
    """End this process when the pipe closes, which happens even if the command is killed."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(_work(sys.argv[1]))

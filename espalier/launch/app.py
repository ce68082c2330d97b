"""Flower app: its folder with the app's packages, and its modules as separate processes.

It is a checkout, or the copy in a wheel: ``espalier_assets/app`` next to the package
(docs/how-to/packaging.md).

The command itself imports only settings and Flower, so it starts quickly and needs little memory
during a run. The module imports the packages of the app that will run, even if the command was
installed with another copy.
"""

import json
import os
import signal
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import IO, Any

import espalier
from espalier.environment.loopback import past_proxies
from espalier.errors import InputError

ROOT = Path(espalier.__file__).parent.parent
INSTALLED = (ROOT, ROOT / "espalier_assets" / "app")
"""Directories that may hold the installed app."""


def installed_app() -> Path:
    """Return the directory of the installed app; raise InputError if there is none."""
    return _first_app(INSTALLED)


def find_app(given: str | None) -> Path:
    """Return the app's directory: the given, the current or the installed one.

    Installed is a checkout with ``pip install -e``, or a wheel with a copy of the app. Raises
    InputError if none of them contains the app.
    """
    return _first_app([Path(given)] if given else [Path.cwd(), *INSTALLED])


def _first_app(candidates: Sequence[Path]) -> Path:
    for candidate in candidates:
        if _is_app(candidate):
            return candidate.resolve()
    tried = ", ".join(str(candidate.absolute()) for candidate in candidates)
    raise InputError(f"no Espalier app in {tried}; install Espalier, or name a checkout with --app")


def _is_app(folder: Path) -> bool:
    try:
        return bool(_project(folder)["project"]["name"] == "espalier")
    except (OSError, ValueError, KeyError):
        return False


def _project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def default_config(app: Path) -> dict[str, Any]:
    """Return the default run configuration of ``pyproject.toml``, nested."""
    config: dict[str, Any] = _project(app)["tool"]["flwr"]["app"]["config"]
    return config


def run_in_app(
    app: Path, module: str, document: Any, on_line: Callable[[str], None] | None = None
) -> int:
    """Call ``main(document)`` of a module of the app and return its exit code.

    The process uses the command's working directory and output streams, and ends with the command.
    With ``on_line``, that function receives each line of standard error instead, with its line
    break.
    """
    errors = subprocess.PIPE if on_line else None
    with started_in_app(app, module, document, errors) as process:
        if on_line:
            assert process.stderr is not None
            for line in process.stderr:
                on_line(line.decode(errors="replace"))
        return process.wait()


def calls(module: str, *options: str) -> Callable[[Namespace], int]:
    """Return the function of a command that calls ``main`` of a module of the installed app.

    The document has the values of these options.
    """
    return lambda args: run_in_app(
        installed_app(), module, {option: getattr(args, option) for option in options}
    )


@contextmanager
def started_in_app(
    app: Path, module: str, document: Any, errors: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``main(document)`` of a module of the app; the process ends with the block.

    ``errors`` is standard error, as for ``subprocess.Popen``.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, module], stdin=subprocess.PIPE, stderr=errors,
        env=_environment(app),
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
        if process.stderr is not None:
            process.stderr.close()


def run_in_terminal(app: Path, module: str, document: Any) -> int:
    """Call ``main(document)`` of a module that reads the terminal, and return its exit code.

    Unlike with ``run_in_app``, standard input belongs to the process, and so does Ctrl-C.
    """
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, module, str(reading)],
        env=_environment(app), pass_fds=[reading],
    )  # fmt: skip
    # The new process must not inherit that interrupts are ignored.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(reading)
    try:
        with suppress(BrokenPipeError):
            os.write(writing, json.dumps(document).encode() + b"\n")
        # The pipe stays open: its end tells the process that the command is gone.
        return process.wait()
    finally:
        os.close(writing)
        process.kill()
        process.wait()
        signal.signal(signal.SIGINT, before)


def _environment(app: Path) -> dict[str, str]:
    """Return this process's environment, with the app first on the path of imports."""
    paths = os.pathsep.join(filter(None, [str(app), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **past_proxies(os.environ), "PYTHONPATH": paths}


def _work(module: str, pipe: IO[str]) -> int:
    """Run the module in the new process and return its exit code.

    ``pipe`` has the document in its first line, and ends with the command.
    """
    document = json.loads(pipe.readline())
    Thread(target=_end_with_the_command, args=[pipe], daemon=True).start()
    try:
        code: int = import_module(module).main(document)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has closed it, as ``head`` does. Python flushes it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _end_with_the_command(pipe: IO[str]) -> None:
    """End this process when the pipe closes, which happens even if the command is killed."""
    pipe.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(_work(sys.argv[1], os.fdopen(int(sys.argv[2])) if sys.argv[2:] else sys.stdin))

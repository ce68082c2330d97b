"""Flower app: its folder with the app's packages, and its modules as separate processes.

It is a checkout, or the copy in a wheel: ``espalier_assets/app`` next to the package
(docs/packaging.md).

The command itself imports only settings and Flower, so it starts quickly and needs little memory
during a run. The module imports the packages of the app that will run, even if the command was
installed with another copy.
"""

import difflib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

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


def read_preset(app: Path, name: str) -> dict[str, Any]:
    """Read a preset by name (``conf/<name>.toml``) or path, nested.

    Raises InputError if the file does not exist or is not TOML.
    """
    path = Path(name) if name.endswith(".toml") else app / "conf" / f"{name}.toml"
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        known = sorted(file.stem for file in (app / "conf").glob("*.toml"))
        close = difflib.get_close_matches(name.lower(), known, n=1)
        meant = f"did you mean '{close[0]}'? " if close else ""
        raise InputError(
            f"preset '{name}': there is no {path}; {meant}known presets are {', '.join(known)}"
        ) from None
    except OSError as error:
        raise InputError(
            f"preset '{name[:200]}': cannot be read ({error.strerror}); name a preset or a TOML"
            " file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"preset '{name}': {path} is not TOML: {error}") from None


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

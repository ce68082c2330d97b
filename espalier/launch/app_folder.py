"""Folder of the Flower app, with ``pyproject.toml``, the app's packages and the presets.

It is a checkout, or the copy in a wheel: ``espalier_assets/app`` next to the package
(docs/packaging.md).
"""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import espalier
from espalier.errors import InputError


def installed_app() -> Path:
    """Return the directory of the installed app, ignoring the current directory.

    Raises
    ------
    InputError
        The app is not installed.
    """
    return _first_app(_installed())


def find_app(given: str | None) -> Path:
    """Return the app's directory: the given, the current or the installed one.

    Installed is a checkout with ``pip install -e``, or a wheel with a copy of the app.

    Raises
    ------
    InputError
        No candidate contains the app.
    """
    return _first_app([Path(given)] if given else [Path.cwd(), *_installed()])


def _installed() -> list[Path]:
    installed = Path(espalier.__file__).parent.parent
    return [installed, installed / "espalier_assets" / "app"]


def _first_app(candidates: Sequence[Path]) -> Path:
    for candidate in candidates:
        if _is_app(candidate):
            return candidate.resolve()
    tried = ", ".join(str(candidate.absolute()) for candidate in candidates)
    raise InputError(f"no Espalier app in {tried}; install Espalier, or name a checkout with --app")


def _is_app(folder: Path) -> bool:
    try:
        return bool(
            tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"] == "espalier"
        )
    except (OSError, ValueError, KeyError):
        return False


def default_config(app: Path) -> dict[str, Any]:
    """Return the default run configuration of ``pyproject.toml``, nested."""
    config: dict[str, Any] = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"][
        "app"
    ]["config"]
    return config


def read_preset(app: Path, name: str) -> dict[str, Any]:
    """Read a preset by name (``conf/<name>.toml``) or path, nested.

    Raises
    ------
    InputError
        The file does not exist or is not TOML.
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

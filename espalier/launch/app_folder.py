"""Where the Flower app is: the folder that holds ``pyproject.toml``, the rooms and the presets.

That is a checkout, or what a wheel brings: ``espalier_assets/app`` beside the package (docs/packaging.md).
"""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import espalier
from espalier.settings.mistakes import Mistake


def installed_app() -> Path:
    """The app's directory as it is installed, whatever lies in the current one.

    Raises
    ------
    Mistake
        It is not there.
    """
    return _first_app(_installed())


def find_app(given: str | None) -> Path:
    """The app's directory: the given one, the current one, or the installed one.

    Installed is a checkout with ``pip install -e``, or a wheel with a copy of the app.

    Raises
    ------
    Mistake
        None of them holds the app.
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
    raise Mistake(
        f"no Espalier app in {tried}; install Espalier, or name a checkout of it with --app"
    )


def _is_app(folder: Path) -> bool:
    try:
        return bool(
            tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"] == "espalier"
        )
    except (OSError, ValueError, KeyError):
        return False


def default_config(app: Path) -> dict[str, Any]:
    """The run configuration of ``pyproject.toml``, nested."""
    config: dict[str, Any] = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"][
        "app"
    ]["config"]
    return config


def read_preset(app: Path, name: str) -> dict[str, Any]:
    """A preset by name (``conf/<name>.toml``) or path, nested.

    Raises
    ------
    Mistake
        There is no such file, or it is not TOML.
    """
    path = Path(name) if name.endswith(".toml") else app / "conf" / f"{name}.toml"
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        known = sorted(file.stem for file in (app / "conf").glob("*.toml"))
        close = difflib.get_close_matches(name.lower(), known, n=1)
        meant = f"did you mean '{close[0]}'? " if close else ""
        raise Mistake(
            f"preset '{name}': there is no {path}; {meant}known presets are {', '.join(known)}"
        ) from None
    except OSError as error:
        raise Mistake(
            f"preset '{name[:200]}': cannot be read ({error.strerror}); name a preset or a TOML"
            " file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Mistake(f"preset '{name}': {path} is not TOML: {error}") from None

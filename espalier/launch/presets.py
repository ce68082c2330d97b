"""Presets of an app: TOML files in ``conf`` and its folders, each with a name of its own."""

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from espalier.errors import InputError


def preset_files(app: Path) -> dict[str, Path]:
    """Return the presets of an app by name, in order of name.

    A preset may be in any folder of ``conf`` but ``conf/devices``, which holds fleets. Raises
    InputError if two presets have the same name.
    """
    conf = app / "conf"
    devices = conf / "devices"
    presets: dict[str, Path] = {}
    for file in sorted(conf.rglob("*.toml"), key=lambda file: (file.stem, file)):
        if file.is_relative_to(devices):
            continue
        if file.stem in presets:
            raise InputError(
                f"preset '{file.stem}': {presets[file.stem]} and {file} have the same name;"
                " rename one"
            )
        presets[file.stem] = file
    return presets


def read_preset(app: Path, name: str) -> dict[str, Any]:
    """Read a preset by name or path, nested.

    Raises InputError if the file does not exist or is not TOML.
    """
    presets = preset_files(app)
    if not name.endswith(".toml") and name not in presets:
        raise _not_found(name, f"there is none of this name in {app / 'conf'}", presets)
    path = Path(name) if name.endswith(".toml") else presets[name]
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise _not_found(name, f"there is no {path}", presets) from None
    except OSError as error:
        raise InputError(
            f"preset '{name[:200]}': cannot be read ({error.strerror}); name a preset or a TOML"
            " file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"preset '{name}': {path} is not TOML: {error}") from None


def _not_found(name: str, reason: str, known: Iterable[str]) -> InputError:
    """Return an error that suggests the preset whose name is most similar, if one is."""
    own = name.lower().rpartition("/")[2].removesuffix(".toml")
    close = difflib.get_close_matches(own, known, n=1)
    meant = f"did you mean '{close[0]}'? " if close else ""
    return InputError(
        f"preset '{name[:200]}': {reason}; {meant}known presets are {', '.join(known)}"
    )

"""The run configuration that a command line asks for: defaults, preset, then key=value."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.launch.app_folder import default_config, read_preset
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings, parse

Config = dict[str, Any]


def configuration(app: Path, words: Sequence[str], *, on_this_machine: bool) -> tuple[Config, RunSettings]:
    """Read the words after ``espalier run``: at most one preset, and ``key=value`` pairs.

    Returns
    -------
    (flat configuration, settings) : for a run on this machine paths are absolute, so that they mean what they mean where
        the command was given; for another machine they are left alone

    Raises
    ------
    Mistake
        A word is neither, or a setting is wrong; all wrong settings at once.
    """
    presets = [word for word in words if "=" not in word]
    if len(presets) > 1:
        raise Mistake(f"more than one preset: {', '.join(presets)}; give one preset and key=value pairs")
    defaults = _flatten(default_config(app))
    flat = dict(defaults)
    if presets:
        flat |= _flatten(read_preset(app, presets[0]))
    flat |= dict(_pair(word, defaults) for word in words if "=" in word)
    settings = parse(flat)
    if not on_this_machine:
        return flat, settings
    flat = _with_absolute_paths(flat)
    return flat, parse(flat)


def _flatten(nested: Mapping[str, Any]) -> Config:
    flat: Config = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": given for inner, given in _flatten(value).items()}
        else:
            flat[key] = value
    return flat


def _pair(word: str, defaults: Config) -> tuple[str, Any]:
    """``key=value``; the value is read as TOML, and as a plain string where it is none, or where the key's default is one."""
    key, _, text = word.partition("=")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    key = key.strip()
    wants_text = isinstance(defaults.get(key), str) and not isinstance(value, str)
    return key, text if wants_text or isinstance(value, dict | list) else value


def _with_absolute_paths(flat: Config) -> Config:
    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute()) if path else path

    texts = [part.strip().partition("=") for part in flat["evaluation.texts"].split(",")]
    paths = ("out-dir", "resume-from") if flat["data.source"] == "hub" else ("out-dir", "resume-from", "data.path")
    changed = {key: absolute(flat[key]) for key in paths}
    changed["model"] = flat["model"] if flat["model"] == "demo" else absolute(flat["model"])
    changed["evaluation.texts"] = ",".join(name + equals + absolute(path) for name, equals, path in texts)
    if isinstance(test_path := flat["task.test-path"], str):  # of a pruning method's settings [task] is not validated
        changed["task.test-path"] = absolute(test_path)
    return flat | changed

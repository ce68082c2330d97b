"""Run configuration from a command line: defaults, then a preset, then ``key=value`` pairs."""

import difflib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.environment.hub_models import download_model, is_on_hub
from espalier.environment.paths import DEMO, at_home, require_data, require_model
from espalier.errors import InputError
from espalier.launch.app import default_config
from espalier.launch.presets import read_preset
from espalier.settings.keys import changed, concerns, default_values, flatten, unread
from espalier.settings.libraries import require_libraries
from espalier.settings.run import RunSettings, parse
from espalier.settings.tables.evaluation import BUILT_IN_TEXTS

FORM = "settings have the form key=value, without leading dashes and without spaces"


def require_pairs(words: Sequence[str], keys: Collection[str]) -> None:
    """Raise InputError if a word is only the name of a setting.

    Examples are ``num-clients 3``, ``num-clients: 3`` and ``num-clients = 3``.
    """
    for place, word in enumerate(words):
        key = word.removesuffix(":")
        if key in keys:
            raise InputError(f"{key}: {FORM}; write {key}={_value_in(words[place + 1 :], keys)}")


def explain_options(options: Sequence[str], words: Sequence[str], keys: Collection[str]) -> str:
    """Return what to write in place of unknown options; empty if none resembles a setting.

    ``words`` are all words, among which the value of an option is searched.
    """
    lines = []
    for option in options:
        name, is_joined, value = option.lstrip("-").partition("=")
        if (key := _key_of(name.replace("_", "-"), words, keys)) is not None:
            if not is_joined:
                value = _value_in(words[words.index(option) + 1 :], keys)
            lines.append(f"{option}: {FORM}; write {key}={value}")
    return "\n".join(lines)


def _key_of(name: str, words: Sequence[str], keys: Collection[str]) -> str | None:
    """Return the setting with this name, with this name in a table, or with a similar name."""
    if name in keys:
        return name
    namesakes = [key for key in keys if key.rpartition(".")[2] == name]
    # Tables that the words name come first.
    namesakes.sort(key=lambda key: key.partition(".")[0] not in words)
    similar = difflib.get_close_matches(name, list(keys), n=1, cutoff=0.8)
    return next(iter([*namesakes, *similar]), None)


def _value_in(words: Sequence[str], keys: Collection[str]) -> str:
    """Return the value at the beginning of these words, or a placeholder."""
    first = next((word.lstrip("=") for word in words if word != "="), "")
    is_value = (
        first
        and not first.startswith("--")
        and "=" not in first
        and first.removesuffix(":") not in keys
    )
    return first if is_value else "VALUE"


Config = dict[str, Any]


def configuration(
    app: Path, words: Sequence[str], *, on_this_machine: bool, works: bool = True
) -> tuple[Config, RunSettings]:
    """Read the words after ``espalier run``: at most one preset, and ``key=value`` pairs.

    Returns and further parameters are those of ``resolve``. Raises InputError if a word is neither
    a preset nor a pair, a key has two values, or for the reasons of ``resolve``.
    """
    defaults = flatten(default_config(app))
    presets = [word for word in words if "=" not in word]
    require_pairs(words, defaults)
    if len(presets) > 1:
        raise InputError(
            f"more than one preset: {', '.join(presets)}; give one preset and key=value pairs"
        )
    pairs = [read_pair(word, defaults) for word in words if "=" in word]
    given = dict(pairs)
    for key, value in pairs:
        # NaN differs from itself.
        if value != given[key] and repr(value) != repr(given[key]):
            raise InputError(f"{key}: is given as {value} and as {given[key]}; leave one out")
    preset = presets[0] if presets else None
    return resolve(app, preset, given, on_this_machine=on_this_machine, works=works)


def resolve(
    app: Path,
    name: str | None,
    given: Mapping[str, Any],
    *,
    on_this_machine: bool,
    works: bool = True,
) -> tuple[Config, RunSettings]:
    """Resolve the settings of a run: defaults, then a preset, then what the user gave.

    Parameters
    ----------
    app : directory of the app
    name : preset, by name or path; None for none
    given : settings by dotted key
    on_this_machine : whether the run is simulated on this machine
    works : whether the run is to be done here, so that its libraries must be installed

    Returns
    -------
    Flat configuration, and settings. For a run on this machine paths are absolute, so that they
    mean what they mean where the command was given; for another machine they are left as they are.

    Raises
    ------
    InputError
        Settings are wrong or not read in such a run; all errors are reported together. On this
        machine also: a library is missing, the name of a file looks like a name on the hub, or the
        configuration of a model of the hub cannot be downloaded.
    """
    defaults = flatten(default_config(app))
    preset = flatten(read_preset(app, name)) if name is not None else {}
    if "data.path" in given and preset.get("data.source") in BUILT_IN_TEXTS:
        # Files by hand take the place of the text that a preset names.
        preset["data.source"] = "auto"
    flat = {**defaults, **preset, **given}
    # A preset's settings for its own method, task and source are no error if the user chose others.
    by_choice = unread(flat).keys() - unread(defaults | preset).keys()
    by_hand = given.keys() | (set() if "method" in given else changed(preset) - by_choice)
    settings = parse(flat, simulation=on_this_machine, by_hand=by_hand)
    not_read = unread(flat).keys() - given.keys()
    flat |= {
        key: value
        for key, value in default_values().items()
        if key in not_read or not concerns(key, settings.method)
    }
    if not on_this_machine:
        return flat, settings
    if works:
        require_libraries(settings)
    # A preset may name a directory that its user still has to create.
    if "model" in given:
        require_model(settings.model)
    require_data(settings.data.origin, settings.data.path)
    if is_on_hub(settings.model):
        # With its commit, the name means the same model in all processes of the run. Its weights
        # are downloaded when everything else has been checked.
        flat["model"] = download_model(settings.model, weights=False)
    flat = _with_absolute_paths(flat)
    return flat, parse(flat, simulation=True)


def read_pair(word: str, defaults: Config) -> tuple[str, Any]:
    """Split ``key=value``; the value is read as TOML, if it is TOML and the key wants no string.

    Raises InputError if the key is missing.
    """
    key, _, text = word.partition("=")
    if not key.strip():
        raise InputError(f"{word}: has no key; write key=value, for instance num-clients=4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    key = key.strip()
    wants_text = isinstance(defaults.get(key), str) and not isinstance(value, str)
    return key, text if wants_text or isinstance(value, dict | list) else value


def _with_absolute_paths(flat: Config) -> Config:
    def absolute(path: str) -> str:
        return str(at_home(path).absolute()) if path else path

    keys = ["out-dir", "resume-from", "task.test-path"]
    if flat["data.source"] != "hub":
        keys.append("data.path")
    if flat["model"] != DEMO and not is_on_hub(flat["model"]):
        keys.append("model")
    texts = [part.strip().partition("=") for part in flat["evaluation.texts"].split(",")]
    named = ",".join(name + equals + absolute(path) for name, equals, path in texts)
    return flat | {key: absolute(flat[key]) for key in keys} | {"evaluation.texts": named}

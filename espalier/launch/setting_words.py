"""Hints for settings written in another program's form: ``--num-clients 3``, ``num-clients: 3``."""

import difflib
from collections.abc import Collection, Sequence

from espalier.errors import InputError

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

    Parameters
    ----------
    options : unknown words that begin with a dash
    words : all words, among which the value of an option is searched
    keys : keys of the settings
    """
    lines = [_explained(option, words, keys) for option in options]
    return "\n".join(line for line in lines if line)


def _explained(option: str, words: Sequence[str], keys: Collection[str]) -> str:
    name, is_joined, value = option.lstrip("-").partition("=")
    key = _key_of(name.replace("_", "-"), words, keys)
    if key is None:
        return ""
    if not is_joined:
        value = _value_in(words[words.index(option) + 1 :], keys)
    return f"{option}: {FORM}; write {key}={value}"


def _key_of(name: str, words: Sequence[str], keys: Collection[str]) -> str | None:
    """Return the setting with this name, with this name in a table, or with a similar name.

    Tables that the words name come first.
    """
    if name in keys:
        return name
    namesakes = sorted(
        (key for key in keys if key.rpartition(".")[2] == name),
        key=lambda key: key.partition(".")[0] not in words,
    )
    return next(
        iter([*namesakes, *difflib.get_close_matches(name, list(keys), n=1, cutoff=0.8)]), None
    )


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

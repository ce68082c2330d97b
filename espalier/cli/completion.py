"""Completion of presets, settings keys and values in a shell.

eval "$(register-python-argcomplete espalier)"
"""

import argparse
from typing import Any

from argcomplete import autocomplete

from espalier.errors import EspalierError
from espalier.launch.app import find_app


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks for completions, and return if none asks."""
    for action in _actions(parser):
        if action.dest == "words":
            action.completer = complete_words  # type: ignore[attr-defined]
    autocomplete(parser)


def complete_words(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Return the presets and ``key=`` words, or the values of the key that ``prefix`` names."""
    # Only a shell that asks for completions needs the schema.
    from espalier.settings.reference.schema import keys_of_a_run

    keys = keys_of_a_run()
    name, equals, _value = prefix.partition("=")
    if equals:
        values = [value for key in keys if key.dotted == name for value in key.choices]
        return [f"{name}={_as_text(value)}" for value in values]
    try:
        presets = [
            file.stem for file in sorted((find_app(parsed_args.app) / "conf").glob("*.toml"))
        ]
    except EspalierError:
        presets = []
    return [*presets, *(f"{key.dotted}=" for key in keys)]


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return all actions of a parser and of its subcommands."""
    found = []
    for action in parser._actions:
        found.append(action)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found += _actions(command)
    return found

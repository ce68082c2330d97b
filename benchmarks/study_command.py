"""Command line that studies have in common: arguments, conditions of the rows, and exit status."""

import argparse
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from espalier.errors import EspalierError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from espalier.hf.opening.opened_model import OpenedModel

ARGUMENTS: dict[str, dict[str, Any]] = {
    "model": {"required": True, "help": "directory of a Hugging Face model"},
    "text": {
        "required": True, "action": "append", "metavar": "NAME=FILE",
        "help": "evaluation text, may be given several times",
    },
    "sequence-length": {"type": int, "default": 256, "help": "tokens of a sample"},
    "max-samples": {"type": int, "default": 32, "help": "samples of each evaluation text; 0: all"},
    "set": {
        "action": "append", "default": [], "metavar": "KEY=VALUE",
        "help": "setting of all runs, for instance training.steps=10",
    },
    "seeds": {"type": int, "nargs": "+", "default": [0, 1, 2]},
    "threads": {"type": int, "default": 1},
    "device": {"default": "auto", "choices": ("auto", "cpu", "cuda")},
    "work": {"type": Path, "help": "where runs are kept"},
    "out": {"type": Path, "default": Path("docs/studies")},
}  # fmt: skip
"""Arguments that several studies have, by name."""


def new_parser(module: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m <module>``, described by the docstring of the module."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_arguments(parser: argparse.ArgumentParser, names: str, **defaults: Any) -> None:
    """Add common arguments, whose names are separated by spaces; ``defaults`` replace theirs."""
    for name in names.split():
        parser.add_argument(f"--{name}", **ARGUMENTS[name])
    parser.set_defaults(**defaults)


def chosen(pairs: list[str]) -> dict[str, Any]:
    """Return the settings of ``--set``, parsed as TOML if possible, otherwise as strings.

    Raises
    ------
    InputError
        A pair has no equals sign.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"--set {pair}: is no KEY=VALUE, for instance training.steps=5")
        try:
            found[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = value
    return found


def model_conditions(
    model: "OpenedModel", size: Literal["weights", "parameters"]
) -> dict[str, str | int]:
    """Return name, size and hash of a model; the size in prunable weights or in parameters."""
    plan = model.plan
    number = plan.num_weights if size == "weights" else plan.num_parameters
    return {"name": model.directory.name, size: number, "sha256": model.sha256}


def text_conditions(texts: Mapping[str, "Tensor"]) -> dict[str, dict[str, Any]]:
    """Return number and hash of the samples of each evaluation text."""
    # Commands that only count import this module too, and need no training libraries.
    from espalier.data.samples import samples_sha256

    return {
        name: {"samples": len(samples), "sha256": samples_sha256(samples)}
        for name, samples in texts.items()
    }


def exit_status(work: Callable[[], object]) -> int:
    """Do the work; return 2 after an error, whose message is printed on stderr, otherwise 0."""
    try:
        work()
    except EspalierError as error:
        print(error, file=sys.stderr)
        return 2
    return 0

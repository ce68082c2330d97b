"""Default settings of a run, as pyproject.toml has them."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.settings.run import parse

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys, as Flower passes them."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        )
    return values


DEFAULTS = flat(PYPROJECT["tool"]["flwr"]["app"]["config"])


def mistake_lines(config: dict[str, Any]) -> list[str]:
    with pytest.raises(EspalierError) as caught:
        parse(config, simulation=True)
    heading, *lines = str(caught.value).splitlines()
    assert heading == "the run's settings are wrong:"
    return [line.strip() for line in lines]

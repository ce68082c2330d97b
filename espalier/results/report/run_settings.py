"""Settings of a run that differ from the defaults."""

from dataclasses import dataclass
from typing import Any

from espalier.results.finished_run import FinishedRun
from espalier.settings.keys import as_text, default_values, flatten


@dataclass(frozen=True)
class Changed:
    """Setting that differs from its default."""

    key: str
    value: str
    default: str


def changed_settings(run: FinishedRun) -> list[Changed]:
    """Return the settings that differ from the defaults, in the order of ``settings.toml``."""
    defaults = default_values()
    return [
        Changed(key, _shown(value), _shown(defaults.get(key, "")))
        for key, value in flatten(run.settings).items()
        if key not in defaults or value != defaults[key]
    ]


def _shown(value: Any) -> str:
    return as_text(value) or "empty"

"""Estimate of a run's resources, printed by ``espalier plan``; it needs no weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.environment.hub_models import cached_model, is_on_hub
from espalier.environment.paths import DEMO
from espalier.errors import InputError, as_command
from espalier.hf.machine.computing import measured_capability, set_up
from espalier.hf.opening.base_check import beyond_positions
from espalier.hf.opening.config_only_model import described
from espalier.hf.opening.opened_model import OpenedModel, model_folder, open_model
from espalier.settings.run import RunSettings, parse
from server_app.estimate.estimate import STATED_MEGABITS, STATED_TERAFLOPS, Plan, Speeds
from strategies.base.method import require_fit


def planned(settings: RunSettings, model: OpenedModel) -> Plan:
    """Return the estimate of a run with this model.

    Raises InputError if the method cannot work on the model, or its sequences are longer than the
    model accepts.
    """
    if lines := beyond_positions(settings, model):
        raise InputError("\n".join(lines))
    require_fit(settings, model, {})
    return Plan(settings, model)


@as_command
def main(document: Mapping[str, Any]) -> None:
    """Print the estimate of a run."""
    settings = parse(document["run"], simulation=True)
    speeds = _speeds(settings, document)
    if settings.model == DEMO:
        text = planned(settings, open_model(DEMO)).long(speeds)
    else:
        name = settings.model
        path = cached_model(name) if is_on_hub(name) else model_folder(name)
        with described(path) as directory:
            text = planned(settings, open_model(str(directory))).long(speeds)
    print(text)


def _speeds(settings: RunSettings, document: Mapping[str, Any]) -> Speeds:
    megabits = document.get("megabits") or STATED_MEGABITS
    if not document.get("measure"):
        return Speeds(document.get("teraflops") or STATED_TERAFLOPS, megabits)
    giga = measured_capability(set_up(settings, Path(settings.out_dir)))
    return Speeds(giga / 1000, megabits, measured=True)

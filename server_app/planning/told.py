"""The plan of a run in a few lines, when it starts."""

import logging

from espalier.modeling.opened import OpenedModel
from espalier.settings.methods import METHODS
from espalier.settings.run import RunSettings
from server_app.planning.plan import Plan
from server_app.public_tests import PublicTests


def tell_plan(settings: RunSettings, model: OpenedModel, tests: PublicTests, *, simulation: bool) -> None:
    """Print it; whatever is wrong with a forecast, no run fails for it."""
    row = METHODS[settings.method]
    if not (row.messages and row.work):
        return
    try:
        lines = Plan(settings, model, tests, simulation).short()
    except Exception:
        logging.getLogger("espalier").debug("no plan", exc_info=True)
        print("planned      nothing: the forecast failed, which is no matter of the run's", flush=True)
        return
    print("\n".join(lines), flush=True)

"""Short form of the estimate, printed and recorded when a run starts.

Simulated clients run on this machine, so their time follows from its measured speed. Real sites
measure their speed at enrolment. Until then, the estimate uses and names default speeds; afterwards
the time is printed again.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from espalier.amounts import duration
from espalier.hf.machine.computing import GIGA, Computing, measured_capability
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.run import RunSettings
from server_app.estimate.estimate import STATED_MEGABITS, TERA, Plan, Speeds
from server_app.estimate.record import record_plan
from server_app.public_tests import PublicTests
from strategies.base.roster import Seat


def tell_plan(
    settings: RunSettings,
    model: OpenedModel,
    tests: PublicTests,
    computing: Computing,
    *,
    simulation: bool,
    folder: Path | None = None,
) -> None:
    """Print the estimate, and record it in the run directory ``folder``.

    Errors in it are only logged, so that they cannot make the run fail.
    """
    try:
        speeds = Speeds()
        if simulation:
            speeds = Speeds(measured_capability(computing) * GIGA / TERA, measured=True)
        plan = Plan(settings, model, tests, simulation)
        text = plan.short(speeds)
        if folder is not None:
            record_plan(plan, speeds, folder)
    except Exception:
        logging.getLogger("espalier").debug("no plan", exc_info=True)
        text = "planned      nothing: the forecast failed, which does not affect the run"
    print(text, flush=True)


def tell_time_of_sites(
    settings: RunSettings, model: OpenedModel, tests: PublicTests, seats: Sequence[Seat]
) -> None:
    """Print the time of a round at sites that measured their speed at enrolment, if any."""
    try:
        plan = Plan(settings, model, tests, simulation=False)
        times = {
            seat.site: plan.seconds_of_round(seat.client, Speeds(seat.capability * GIGA / TERA))
            for seat in seats
            if seat.measured
        }
    except Exception:
        logging.getLogger("espalier").debug("no plan", exc_info=True)
        return
    if times:
        slowest = max(times, key=times.__getitem__)
        print(
            f"planned      time: a client's round {duration(times[slowest], tenths=True)} at"
            f" {slowest}, the slowest by the speeds that sites measured, and {STATED_MEGABITS:g}"
            " megabits per second",
            flush=True,
        )

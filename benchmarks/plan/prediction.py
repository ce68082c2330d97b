"""Estimate of one run, in a new process; the flat configuration is read from stdin."""

import json
import sys
from pathlib import Path

from espalier.hf.machine.computing import measured_capability, set_up
from espalier.hf.opening.opened_model import open_model
from espalier.settings.run import parse
from server_app.estimate.estimate import Plan, Speeds
from server_app.public_tests import public_tests


def main() -> None:
    """Print the figures as one line of JSON."""
    settings = parse(json.load(sys.stdin), simulation=True)
    model = open_model(settings.model)
    plan = Plan(settings, model, public_tests(settings, model))
    speed = Speeds(measured_capability(set_up(settings, Path("."))) / 1000)
    total = plan.traffic.total()
    rounds = plan.traffic.strategy.num_rounds
    found = {
        "down_planned": total.down, "up_planned": total.up, "client_planned": plan.client.peak,
        "server_planned": plan.server.peak, "client_libraries": plan.client.libraries,
        "server_libraries": plan.server.libraries,
        "disk_planned": sum(
            size for name, size in plan.server_disk.items() if name != "replies of a round"
        ),
        "seconds_planned": rounds * speed.seconds(plan.work.operations()),
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
